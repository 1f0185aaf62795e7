"""What `--json` prints is what the schemas and docs/json.md say, to the key."""

from __future__ import annotations

import ast
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from typer.testing import CliRunner

import traindiff
from tests.cli.conftest import GOLDEN
from tests.made_up import at, record
from tests.run.verify.recipes import one_thread
from traindiff.analyse.rules import RULES
from traindiff.cli.commands import app
from traindiff.present.data.observations import COLUMNS

DOCS = Path(__file__).parents[2] / "docs"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in sorted((DOCS / "schemas").glob("*.json"))}
REGISTRY: Any = Registry().with_resources((one["$id"], Resource.from_contents(one)) for one in SCHEMAS.values())

RECIPES = """
from tests.run.verify.recipes import mlp, other_gelu

recipe = mlp()
wrong = mlp(other_gelu)
"""


def printed(*arguments: str) -> Any:
    """What a command prints as JSON."""
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def assert_fits(found: Any, schema: str) -> None:
    errors = Draft202012Validator(SCHEMAS[schema], registry=REGISTRY).iter_errors(found)
    assert [f"{error.json_path}: {error.message}" for error in errors] == []
    assert found["schema"]["name"] == f"traindiff-{schema}"


def objects(schema: Any) -> Iterator[Any]:
    """All schemas of objects in a schema."""
    if isinstance(schema, dict):
        if "properties" in schema and not isinstance(schema.get("properties", {}).get("type"), str):
            yield schema
        for value in schema.values():
            yield from objects(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from objects(value)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_valid_and_lets_no_key_be_left_out_or_added(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])
    for one in objects(SCHEMAS[name]):
        assert one["additionalProperties"] is False
        assert one["required"] == list(one["properties"])


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)


@pytest.mark.usefixtures("golden")
@pytest.mark.parametrize(
    "arguments",
    [
        ("again",),
        ("candidate",),
        ("again", "--rename", "head=other"),
        ("candidate", "--noise", "again"),
        ("again", "--steps", "7-9"),
    ],
)
def test_a_comparison_fits_its_schema(arguments: tuple[str, ...]) -> None:
    assert_fits(printed("compare", "baseline", *arguments), "comparison")


def test_a_comparison_with_measured_floors_and_findings_without_a_size_fits_its_schema(tmp_path: Path) -> None:
    gradient = ("grad", "", "fc.weight", "grad")
    runs = {
        "baseline": record(tmp_path / "baseline"),
        "candidate": record(tmp_path / "candidate", at(gradient, lambda values: values * float("nan"))),
        "first": record(tmp_path / "first", at(gradient, lambda values: values * 1.0000002)),
        "second": record(tmp_path / "second", at(gradient, lambda values: values * 0.9999998)),
    }
    noise = [text for name in ("first", "second") for text in ("--noise", str(runs[name]))]

    found = printed("compare", str(runs["baseline"]), str(runs["candidate"]), *noise)

    assert_fits(found, "comparison")
    assert found["first_divergence"]["difference"] is None
    assert found["noise"]["recordings"]


def test_a_check_fits_its_schema(tmp_path: Path) -> None:
    for rank in range(3):
        edit = at(("param", "", "fc.weight", "value"), lambda values: values + 1, step=1)
        record(tmp_path / "run", *([edit] if rank == 2 else []), rank=rank, run={"world_size": 3})

    found = printed("check", str(tmp_path / "run"))

    assert_fits(found, "check")
    assert found["findings"]


@pytest.mark.usefixtures("golden")
def test_observations_fit_their_schema_and_have_the_columns_of_the_table() -> None:
    assert_fits(printed("show", "baseline", "--samples"), "observations")
    assert list(SCHEMAS["observations"]["$defs"]["observation"]["properties"]) == list(COLUMNS)


@pytest.mark.parametrize("options", [("--candidate", "train.py:wrong"), ("--pin", "always")])
def test_a_verification_fits_its_schema(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(RECIPES)

    with one_thread():
        found = printed("verify", "train.py:recipe", *options, "--steps", "2", "--replica", "ulp:1")

    assert_fits(found, "verification")
    assert found["pinned"]
    for one in found["pinned"]:
        assert_fits(one["comparison"], "comparison")


def test_a_verification_of_a_candidate_that_failed_fits_its_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(RECIPES)
    candidate = ("--candidate", "tests.run.verify.divided:raising", "--verbose-logging")

    with one_thread():
        found = printed("verify", "tests.run.verify.divided:recipe", *candidate, "--steps", "2", "--replica", "ulp:1")

    assert_fits(found, "verification")
    assert found["failed"]["ranks"]
    assert found["compiler"] is not None


def test_an_investigation_fits_its_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(RECIPES)
    options = ("--steps", "1", "--seeds", "0", "--replica", "ulp:1")

    with one_thread():
        found = printed("investigate", "train.py:recipe", "--candidate", "train.py:wrong", *options)

    assert_fits(found, "investigation")
    assert found["steady"]["zoomed"]


def test_a_matrix_fits_its_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text("[grid]\nnproc = [1, 2]\n")

    with one_thread():
        found = printed(
            "verify", "tests.run.verify.divided:recipe", "--matrix", "grid.toml", "--steps", "1", "--no-repeat"
        )

    assert_fits(found, "matrix")
    assert [row["verdict"] for row in found["rows"]] == ["identical", "impossible"]


@pytest.mark.parametrize("factor", [1e39, math.nan, 0.0])
def test_a_rerun_fits_its_schema(factor: float, tmp_path: Path) -> None:
    class Ratio(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor if factor else x / factor

    model = torch.nn.Sequential(Ratio())
    with traindiff.watch(model, output=tmp_path, file=io.StringIO()), pytest.raises(traindiff.NonFiniteError):
        model(torch.ones(3))
    (where,) = tmp_path.iterdir()

    found = printed("rerun", str(where))

    assert_fits(found, "rerun")
    assert found["cause"] == ("dtype" if factor > 1 else "mathematics")


def test_a_comparison_of_weights_fits_its_schema(tmp_path: Path) -> None:
    state = {"first": torch.randn(3, 4), "second": torch.randn(5), "third": torch.randn(6, 2)}
    torch.save(state, tmp_path / "a.pt")
    torch.save(
        {"first": state["first"].bfloat16(), "second": 2 * state["second"], "new": state["third"].T}, tmp_path / "b.pt"
    )

    found = printed("weights", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))

    assert_fits(found, "weights")
    assert {one["kind"] for one in found["relations"]} == {"cast", "scaled", "rearranged"}


def test_a_resume_fits_its_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])

    found = printed(
        "resume",
        "tests.run.resume.recipes:without_scheduler",
        "--at",
        "1",
        "--steps",
        "1",
        "-o",
        str(tmp_path / "runs"),
    )

    assert_fits(found, "resumption")
    assert [one["what"] for one in found["differences"]] == ["scheduler"]


def test_what_a_resume_can_leave_out_is_that_of_the_documentation() -> None:
    table = (DOCS / "resume.md").read_text().partition("| what | sentence |")[2].partition("\n\n")[0]
    documented = re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)

    assert documented == SCHEMAS["resumption"]["$defs"]["difference"]["properties"]["what"]["enum"]


def test_the_kinds_of_relation_are_those_of_the_code_and_of_the_documentation() -> None:
    table = (DOCS / "weights.md").read_text().partition("| kind | what it means |")[2].partition("\n\n")[0]
    documented = re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)
    known = SCHEMAS["weights"]["$defs"]["relation"]["properties"]["kind"]["enum"]
    code = "".join(file.read_text() for file in (Path(traindiff.__file__).parent / "state").glob("*.py"))

    assert sorted(documented) == sorted(known)
    assert [kind for kind in known if f'"{kind}"' not in code and not kind.startswith("only-")] == []


def test_a_diagnosis_fits_its_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(RECIPES)

    with one_thread():
        assert_fits(printed("doctor", "train.py:recipe", "--no-compiled", "--rounds", "2", "--steps", "2"), "doctor")


@pytest.mark.parametrize(
    "command",
    [
        ("compare", "a", "b"),
        ("check", "a"),
        ("show", "a"),
        ("verify", "a"),
        ("doctor", "a"),
        ("rerun", "a"),
        ("weights", "a", "b"),
    ],
)
def test_what_cannot_be_used_leaves_standard_output_empty(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("traindiff: ")


@pytest.mark.parametrize("words", [(), ("noise", "floor"), ("vanishing-gradients",), ("cast", "scheduler"), ("json",)])
def test_an_explanation_fits_its_schema(words: tuple[str, ...]) -> None:
    found = printed("explain", *words)

    assert_fits(found, "explanation")
    assert bool(found["explanations"]) == bool(words)


# What the documentation says.

DOCUMENTED = {
    "`traindiff compare --json`": ("comparison", ""),
    "A finding": ("finding", ""),
    "A site of `unaligned`": ("comparison", "unaligned"),
    "`noise`": ("comparison", "noise"),
    "`traindiff verify --matrix --json`": ("matrix", ""),
    "A combination": ("matrix", "row"),
    "An entry of `operators`": ("comparison", "zoom"),
    "An entry of `rows`": ("comparison", "row"),
    "`traindiff investigate --json`": ("investigation", ""),
    "A stage": ("investigation", "stage"),
    "`traindiff check --json`": ("check", ""),
    "`traindiff weights --json`": ("weights", ""),
    "A relation": ("weights", "relation"),
    "`traindiff resume --json`": ("resumption", ""),
    "A thing that was not restored": ("resumption", "difference"),
    "`traindiff rerun --json`": ("rerun", ""),
    "A tensor that an operator made": ("rerun", "made"),
    "`traindiff show --json`": ("observations", ""),
    "An observation": ("observations", "observation"),
    "`traindiff doctor --json`": ("doctor", ""),
    "A rule of `rules`": ("check", "rule"),
    "`traindiff ls --json`": ("recordings", ""),
    "A recording of `recordings`": ("recordings", "recording"),
    "`traindiff explain --json`": ("explanation", ""),
    "An explanation": ("explanation", "explanation"),
}
"""By heading: a schema, and a part of it."""


def tables(document: str) -> dict[str, list[str]]:
    """By heading, the words in the first column of the table under it."""
    found = {}
    for part in re.split(r"^##+ ", (DOCS / document).read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        found[title] = [word for cell in cells for word in re.findall(r"`([^`]+)`", cell)]
    return found


@pytest.mark.parametrize("title", DOCUMENTED)
def test_the_tables_of_the_documentation_have_the_keys_of_the_schema(title: str) -> None:
    name, part = DOCUMENTED[title]
    schema = SCHEMAS[name]["$defs"][part] if part else SCHEMAS[name]

    assert tables("json.md")[title] == list(schema["properties"])


@pytest.mark.usefixtures("golden")
def test_a_list_of_recordings_fits_its_schema() -> None:
    found = printed("ls", ".")

    assert_fits(found, "recordings")
    assert {"baseline", "candidate"} <= {one["path"] for one in found["recordings"]}


def test_the_keys_of_a_verification_are_those_of_a_comparison_and_its_own() -> None:
    own = tables("json.md")["`traindiff verify --json`"]
    common = SCHEMAS["comparison"]["properties"]

    assert [*common, *(key for key in own if key not in common)] == list(SCHEMAS["verification"]["properties"])


def test_the_keys_of_a_check_of_the_doctor_are_documented() -> None:
    found = tables("json.md")["A check"]

    assert found == list(SCHEMAS["doctor"]["properties"]["checks"]["items"]["properties"])


def test_the_kinds_of_finding_are_those_of_the_code_and_of_the_documentation() -> None:
    documented = re.findall(r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \|", (DOCS / "findings.md").read_text(), re.MULTILINE)
    documented = [kind for cell in documented for kind in re.findall(r"[a-z-]+", cell)]

    assert set(documented) == set(SCHEMAS["finding"]["properties"]["kind"]["enum"]) == set(kinds())


def kinds() -> Iterator[str]:
    """Every kind that the code gives a finding: `kind="..."`, constants of that name, and those of rules."""
    yield from (kind for rule in RULES for kind in rule.kinds)
    package = Path(traindiff.__file__).parent
    for file in package.rglob("*.py"):
        if file.is_relative_to(package / "state"):  # kinds of relations: docs/weights.md
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            named = node.arg if isinstance(node, ast.keyword) else ""
            named = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else named
            for one in ast.walk(node) if named in ("KIND", "kind") else ():
                if isinstance(one, ast.Constant) and isinstance(one.value, str) and re.fullmatch(r"[a-z-]+", one.value):
                    yield one.value
