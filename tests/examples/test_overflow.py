"""What docs/watch.md and the README show of the example in float16 is what it prints."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.warm_process import warm

ROOT = Path(__file__).parents[2]


def run(*command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return warm(*command, cwd=directory, env=environment)


def test_the_example_overflows_where_the_documentation_says(tmp_path: Path) -> None:
    trained = run(str(ROOT / "examples" / "overflow.py"), directory=tmp_path)
    assert trained.returncode == 1
    document = (ROOT / "docs" / "watch.md").read_text(encoding="utf-8")
    titles = re.findall(r"^ {18}(\S.*)$", document, re.MULTILINE)
    printed = re.findall(r"^ {18}(\S.*)$", trained.stderr.partition("Traceback")[0], re.MULTILINE)
    assert printed == titles
    assert re.search(r"1\.wo output holds infinity; what Linear was given is finite", trained.stderr)

    (saved,) = (tmp_path / "traindiff-watch").iterdir()
    run_again = run("-m", "traindiff", "rerun", str(saved), directory=tmp_path)
    assert run_again.returncode == 0
    assert "The overflow is float16's: operator 1, aten.mm.default makes what is not finite" in run_again.stdout
