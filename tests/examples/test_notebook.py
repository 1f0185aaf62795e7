"""The notebook runs from its first cell to its last one, as Jupyter runs it, and its results show themselves."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def shown(cell: str, names: dict[str, Any]) -> Any:
    """The value of the last expression of a cell; None if it ends in a statement."""
    body = ast.parse(cell).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_every_cell_runs_and_results_are_shown() -> None:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    values = [shown("".join(cell["source"]), names) for cell in content["cells"] if cell["cell_type"] == "code"]

    assert (content["nbformat"], all("id" in cell for cell in content["cells"])) == (4, True)
    pages = [page for value in values if hasattr(value, "_repr_html_") and (page := value._repr_html_())]
    assert [part in page for page, part in zip(pages, ("diverged", "healthy", "1 rank"), strict=True)] == [True] * 3
    comparison = names["comparison"]
    assert comparison.first_divergence.step == 3
    assert (comparison.first_divergence.path, comparison.first_divergence.slot) == ("2.weight", "grad")
    assert any(isinstance(value, list) and value and value[0]["site"] == "2.weight" for value in values)
    assert (names["runs"] / "report.html").stat().st_size > 100_000


def test_it_is_stored_without_results() -> None:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))

    assert all(not cell["outputs"] for cell in content["cells"] if cell["cell_type"] == "code")
