"""What torch's compiler prints, gathered."""

from __future__ import annotations

from pathlib import Path

from traindiff.run.verify.failed import compiler_log

AT = "V1121 21:47:41.630000 26943 torch/_dynamo/x.py:5124] [0/0]"
PRINTED = f"""what the training prints
{AT} [__graph_breaks] Graph break in user code at train.py:6
{AT} [__graph_breaks] Graph Break Reason: a call of print
{AT} [__graph_breaks]   Hint: do not
{AT} [__guards] GUARDS:
{AT} [__guards] +- RootGuardManager
{AT} [__guards] | +- DEFAULT_DEVICE: utils_device.CURRENT_DEVICE == None
{AT} [__guards] | +- GuardManager: source=L['x']
{AT} [__guards] | | +- TENSOR_MATCH: check_tensor(L['x'])
{AT} [__recompiles] Recompiling function step in train.py:4
{AT} [__recompiles]     triggered by the following guard failure(s):
{AT} [__recompiles]     - 1/0: k == 1                # return y*k
"""


def test_breaks_recompilations_and_guards_of_all_ranks_are_gathered(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank-{rank}.txt").write_text(PRINTED)

    found = compiler_log(tmp_path)

    assert found.graph_breaks == ("train.py:6: a call of print",) * 2
    assert found.recompiles == ("step in train.py:4: k == 1",) * 2
    assert found.num_guards == 4
    assert found.message == f"Compiler: 2 graph breaks, 2 recompilations, 4 guards; see {tmp_path / 'compiler.txt'}."
    gathered = (tmp_path / "compiler.txt").read_text().splitlines()
    assert len(gathered) == 22
    assert gathered[0].startswith("rank-0: V1121")


def test_nothing_is_gathered_of_a_compiler_that_said_nothing(tmp_path: Path) -> None:
    found = compiler_log(tmp_path / "none")

    assert (found.graph_breaks, found.recompiles, found.num_guards) == ((), (), 0)
