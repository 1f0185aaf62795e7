"""Everything that reads other people's files is given the mutants of the corpus, and some more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.campaigns import corpus, mutating, workers
from tests.campaigns.drafts import Draft, Special, Tree
from tests.campaigns.mutating import Seed
from tests.campaigns.readers import READERS, Case
from tests.campaigns.workers import Judged, Kept, Plan, Replay, judged
from traindiff.errors import TraindiffError

PATIENCE = 60.0
"""Seconds that a reader may take here: the machine of a test may be busy."""

IN_PROCESS = 1500
COMMANDS = 40
"""Mutants of a run of the tests: about a minute. The campaigns have many more (tests/campaigns/mutants.py)."""


def campaign(*arguments: str) -> str:
    """What the program prints; it must succeed.

    It is a program of its own, because it forks: other tests have left threads in this process, autograd's among them.
    """
    command = [sys.executable, "-m", "tests.campaigns.mutants", *arguments, "--jobs", "1"]
    ended = subprocess.run(
        [*command, "--hang-seconds", f"{PATIENCE}"], check=False, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2], env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def replayed(kept: tuple[Kept, ...], plan: Plan) -> list[Judged]:
    """What becomes of trees."""
    own = Replay(
        seed=plan.seed, seeds=plan.seeds, commands=plan.commands, hang_seconds=plan.hang_seconds, kept=kept
    )  # fmt: skip
    return list(judged(own, range(len(kept)), jobs=1))


def failures(found: list[Judged]) -> list[str]:
    return [f"{one.number} {one.reader}: {one.failure}" for one in found if one.failure is not None]


def test_no_mutant_that_a_reader_once_failed_on_fails_it_again() -> None:
    printed = campaign("--corpus")
    assert f"\n{len(list(corpus.everything())):,} mutants in " in printed


@pytest.mark.parametrize(("commands", "count"), [(False, IN_PROCESS), (True, COMMANDS)])
def test_no_mutant_crashes_hangs_or_misleads_a_reader(commands: bool, count: int) -> None:
    printed = campaign("--commands" if commands else "--in-process", f"{count}", "--seed", "17")
    assert f"\n{count:,} mutants in " in printed
    outcomes = [line.split() for line in printed.splitlines() if re.match(r"[a-z][a-z ]*( +[0-9,]+){4}$", line)]
    assert sum(int(row[-3].replace(",", "")) for row in outcomes) > 0  # read
    assert sum(int(row[-2].replace(",", "")) for row in outcomes) > 0  # refused


def test_every_reader_takes_what_mutants_are_made_of() -> None:
    """Otherwise it would refuse every mutant for what its seed has, and see nothing else."""
    seeds = mutating.all_seeds()
    plain = [Kept(name=seed.name, kind=seed.kind, seed=seed.name, reader=reader, failed="", tree=dict(seed.files))
             for seed in seeds for reader in READERS[seed.kind]]  # fmt: skip
    found = replayed(tuple(plain), Plan(seed=1, seeds=seeds, hang_seconds=PATIENCE))
    refused = {one.reader for one in found if one.outcome != "read"}
    assert failures(found) == []
    assert refused <= {"export msprobe", "compare"}  # not all have whole gradients, or measure noise


def test_a_draft_is_put_together_as_it_was() -> None:
    for seed in mutating.all_seeds():
        tree = Draft.of(seed.files).tree()
        assert tree.keys() == seed.files.keys()
        streams = {path: content for path, content in seed.files.items() if not path.endswith(".json")}
        assert {path: tree[path] for path in streams} == streams


def test_a_number_gives_the_same_mutant_every_time() -> None:
    plan = Plan(seed=3, seeds=mutating.all_seeds())
    for number in range(200):
        first, second = plan.case(number), plan.case(number)
        assert (first[0], first[1]) == (second[0], second[1])


def test_mutants_are_kept_as_they_are(tmp_path: Path) -> None:
    tree: Tree = {
        "run.json": b"{}", "a/b": Special(kind="fifo"), "c": Special(kind="link", target="../../x"),
        "d": Special(kind="socket"), "e": Special(kind="gone"), "f": Special(kind="directory"), "\x1b[2J": b"x",
    }  # fmt: skip
    failure = workers.Failure(kind="crash", place="KeyError recording/manifest.py:80 load_run", message="")
    about = Judged(
        number=1,
        seed="plain",
        mutator="json",
        reader="show",
        outcome="failed",
        seconds=1,
        peak_bytes=1,
        failure=failure,
    )
    path = corpus.keep(about, tree, kind="recording", directory=tmp_path)
    assert path is not None
    assert path.name == "show-crash-keyerror-recording-manifest-py-load-run.tar.xz"
    kept = corpus.load(path)
    assert (kept.tree, kept.kind, kept.seed, kept.reader) == (tree, "recording", "plain", "show")


def test_the_corpus_is_small() -> None:
    paths = list(corpus.DIRECTORY.glob("*"))
    assert all(path.stat().st_size <= corpus.MOST_BYTES for path in paths)
    assert paths


Planted = Callable[[Case], None]


def _crashing(case: Case) -> None:
    raise KeyError("settings")


def _refusing(case: Case) -> None:
    raise TraindiffError("it is damaged")


def _hanging(case: Case) -> None:
    while True:
        time.sleep(0.1)


def _hanging_whatever_is_raised(case: Case) -> None:
    while True:
        with suppress(BaseException):  # no alarm ends it
            time.sleep(60)


def _dying(case: Case) -> None:
    os.abort()


def _greedy(case: Case) -> None:
    kept = b"x" * (600 << 20)
    del kept


def _asking_for_too_much(case: Case) -> None:
    bytes(1 << 42)


def _reading_outside(case: Case) -> None:
    (case.places.outside / "secret").read_bytes()


def _reading_through_a_link(case: Case) -> None:
    (case.places.mutant / "link").read_bytes()


def _listing_outside(case: Case) -> None:
    list(Path("/etc").iterdir())


def _starting_a_program(case: Case) -> None:
    os.system("true")


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize(
    ("planted", "kind", "place"),
    [
        (_refusing, "", ""),
        (_crashing, "crash", "KeyError"),
        (_hanging, "hang", "HangError"),
        (_hanging_whatever_is_raised, "hang", ""),
        (_dying, "signal", ""),
        (_greedy, "memory", "MB"),
        (_asking_for_too_much, "crash", "MemoryError"),
        (_reading_outside, "outside", "open"),
        (_reading_through_a_link, "outside", "open"),
        (_listing_outside, "outside", "os.listdir"),
        (_starting_a_program, "outside", "os.system"),
    ],
)
def test_the_judge_notices(
    planted: Planted, kind: str, place: str, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[int] = []
    monkeypatch.setattr(Plan, "forks", forks)
    monkeypatch.setattr(Plan, "readers", lambda plan: {"configuration": {"planted": (1, planted)}})
    monkeypatch.setattr(workers.Worker, "_warm", lambda worker, places: warmed.append(1))
    monkeypatch.setattr(workers, "_GRACE_SECONDS", 1.0)
    (seed,) = (one for one in mutating.all_seeds() if one.kind == "configuration")
    tree: Tree = {"link": Special(kind="link", target="../../../outside/secret")}
    kept = Kept(name="", kind="configuration", seed="configuration", reader="planted", failed="", tree=tree)
    seeds = [seed, Seed(name="plain", kind="recording", files={})]
    found = replayed((kept, kept), Plan(seed=1, seeds=seeds, hang_seconds=1.0 if kind == "hang" else PATIENCE))

    assert [one.number for one in found] == [0, 1]
    if not kind:
        assert [one.outcome for one in found] == ["refused", "refused"]
        return
    for one in found:
        assert one.outcome == "failed"
        assert one.failure is not None
        assert one.failure.kind == kind
        assert place in one.failure.place


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """No directory of a worker stays behind."""
    where = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    before = set(where.glob("traindiff-mutants-*"))
    yield
    left = set(where.glob("traindiff-mutants-*")) - before
    for _ in range(600):  # tests that run beside this one have theirs until they end
        if not any(one.exists() for one in left):
            break
        time.sleep(0.1)
    assert [one for one in left if one.exists()] == []
