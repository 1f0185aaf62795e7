"""What lies in a directory that is no regular file of it: pipes, sockets, links, directories, odd names, nothing."""

from __future__ import annotations

from random import Random

from tests.campaigns.drafts import Special, Tree, paths_of

OUTSIDE = "../../outside"
"""Directory that no reader may open, from the one that holds the mutant."""

_DEVICES = (
    "/dev/zero",
    "/dev/full",
    "/dev/tty",
    "/dev/random",
    "/proc/self/environ",
    "/proc/kmsg",
    "/etc/passwd",
    "/",
    "/dev",
)


def _up(path: str) -> str:
    """From the directory of a path to the one that holds the mutant."""
    return "../" * (path.count("/") + 1)


def mutate(tree: Tree, rng: Random) -> None:  # noqa: C901  a list of cases
    """Put something else in the place of a file or a directory, or add a file."""
    path = rng.choice(list(paths_of(tree)))
    change = rng.randrange(12)
    if change == 0:
        tree[path] = Special(kind="fifo")
    elif change == 1:
        tree[path] = Special(kind="socket")
    elif change == 2:
        tree[path] = Special(kind="directory")
    elif change == 3:
        tree[path] = Special(kind="link", target=rng.choice(_DEVICES))
    elif change == 4:  # to a file, or to a whole directory, that is not the mutant's
        secret = _up(path) + OUTSIDE + rng.choice(("/secret", "", "/" + path))
        tree[path] = Special(kind="link", target=secret)
    elif change == 5:
        target = rng.choice((path.rpartition("/")[2], ".", "..", "a" * 300, "nothing", "/nothing/at/all", "\udcff"))
        tree[path] = Special(kind="link", target=target)
    elif change == 6:  # two links that lead to each other
        tree[path] = Special(kind="link", target=path.rpartition("/")[2] + ".x")
        tree[path + ".x"] = Special(kind="link", target=path.rpartition("/")[2])
    elif change == 7:
        tree[path] = Special(kind="gone")
    elif change == 8:
        tree[path] = b""
    elif change == 9:
        _strange_name(tree, path, rng)
    elif change == 10:
        for _ in range(2):
            mutate(tree, rng)
    else:  # to another file of the mutant
        other = rng.choice(list(paths_of(tree)))
        tree[path] = Special(kind="link", target=_up(path).removeprefix("../") + other)


def _strange_name(tree: Tree, path: str, rng: Random) -> None:
    """Files and directories of more names."""
    content = next((one for one in tree.values() if isinstance(one, bytes)), b"")
    name = rng.choice(
        ("rank-99999", "rank-00001", "rank-000000", "rank-1", "rank-00000x", "rank-\u0663\u0663\u0663\u0663\u0663",
        "rank-" + "9" * 200,
         "rank-00002/observations.crc", "rank0", "rank65535", "rank65536", "rank999999999999", "step_1",
         "step_999999999999999999",
         "rank_1/step_0/order.txt", "run.json.unfinished", "\udcff", "a\nb", "\x1b[2J", "a" * 255, "-rf",
         "rank0/grad_summary_99999999999999999999.csv",
         "rank0/step0/..npy", "deep/" * 60 + "run.json", "rank2/grad_summary_0.csv", "rank1000/grad_summary_0.csv")
    )  # fmt: skip
    if rng.random() < 0.5:
        tree[name] = content
    else:
        tree[name] = Special(kind=rng.choice(("directory", "fifo", "link")), target="..")
