"""Options that several commands have: each with one name, one meaning, and one place in the help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traindiff.present.data import FORMATS

JUDGED = "What is looked at"
"""Group of options that say what is read and judged, and how."""

SHOWN = "What is shown and written"
"""Group of options that say where a result goes."""

FOLLOWED = "While the run goes on"
"""Group of options that follow a run."""

RUNS = "How the runs are made"
"""Group of options of commands that run trainings."""

SETUP = "How the candidate is run"
"""Group of options that say what divides, compiles and casts a training."""

BaselineArgument = Annotated[str, typer.Argument(metavar="BASELINE", help="Recording of the run that is trusted.")]
CandidateArgument = Annotated[str, typer.Argument(metavar="CANDIDATE", help="Recording of the run in question.")]
RecordingArgument = Annotated[str, typer.Argument(metavar="RECORDING", help="Recording to read.")]

StepsOption = Annotated[
    str | None,
    typer.Option(
        metavar="STEPS", rich_help_panel=JUDGED, help='Steps to look at, e.g. "0-9,20,30-". All of them, if left out.'
    ),
]
NoiseOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RECORDING",
        rich_help_panel=JUDGED,
        help="Recording of a replica of the baseline, or of the baseline run again, to measure floors from. "
        "Repeatable.",
    ),
]
RenameOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=REPLACEMENT",
        rich_help_panel=JUDGED,
        help="Regular expression that turns the candidate's paths into the baseline's. Repeatable.",
    ),
]
MapOption = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="FILE.toml",
        rich_help_panel=JUDGED,
        help="Which tensors and modules are which, or the name of a map (traindiff explain maps).",
    ),
]
AcceptOption = Annotated[
    Path | None,
    typer.Option(
        "--accept",
        metavar="FILE.toml",
        rich_help_panel=JUDGED,
        help="Intended differences, each with a reason (traindiff explain maps).",
    ),
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        rich_help_panel=JUDGED,
        help="Sites at which what differs or is wrong is counted, but is no finding: a path, or a path and a slot. "
        "Repeatable.",
    ),
]
RtolOption = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        rich_help_panel=JUDGED,
        help="Relative tolerance in place of floors: ||c-b|| <= rtol ||b|| + atol sqrt(n).",
    ),
]
AtolOption = Annotated[
    float | None,
    typer.Option(metavar="NUMBER", rich_help_panel=JUDGED, help="Absolute tolerance per element, in the same formula."),
]
IdenticalOption = Annotated[
    bool,
    typer.Option(
        "--identical",
        rich_help_panel=JUDGED,
        help="Demand the same bits: the first divergence is the first site whose bits differ, however little.",
    ),
]
OffsetOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=JUDGED,
        help="Compare step k of the candidate with step k + N of the baseline, for a run that continues from a "
        "checkpoint. Found by the first parameters, if left out; 0 for none.",
    ),
]
RulesOption = Annotated[
    str | None,
    typer.Option(metavar="A,B", rich_help_panel=JUDGED, help="Rules to ask, by name. All, if left out."),
]
SkipOption = Annotated[
    str | None, typer.Option(metavar="A,B", rich_help_panel=JUDGED, help="Rules to leave out, by name.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.toml",
        rich_help_panel=JUDGED,
        help="Limits of rules: a table [RULE] of LIMIT = NUMBER for each.",
    ),
]
SiteOption = Annotated[
    str,
    typer.Option(
        metavar="GLOB",
        rich_help_panel=JUDGED,
        help="Sites to look at: a path, e.g. 'transformer.h.3.*', or a path and a slot.",
    ),
]
PhaseOption = Annotated[
    list[str] | None,
    typer.Option(metavar="PHASE", rich_help_panel=JUDGED, help="Phase to look at, e.g. grad. Repeatable."),
]
DeviceOption = Annotated[
    str, typer.Option(metavar="DEVICE", rich_help_panel=RUNS, help='Where to run it, e.g. "cuda".')
]

TopOption = Annotated[int, typer.Option(min=0, metavar="N", rich_help_panel=SHOWN, help="Rows of each table.")]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", rich_help_panel=SHOWN, help="Also write a report for a browser (traindiff explain report)."
    ),
]
JunitOption = Annotated[
    Path | None, typer.Option(metavar="FILE", rich_help_panel=SHOWN, help="Also write the verdict as JUnit XML.")
]
WebhookOption = Annotated[
    str | None,
    typer.Option(metavar="URL", rich_help_panel=SHOWN, help="Send the verdict to this address, as JSON."),
]
AlertOption = Annotated[
    list[str] | None,
    typer.Option(
        "--alert",
        metavar="TOOL[=WHERE]",
        rich_help_panel=SHOWN,
        help="Tell the verdict to otel, tensorboard=DIRECTORY or wandb=PROJECT[/RUN]. Repeatable "
        "(traindiff explain scale.md).",
    ),
]
WorkersOption = Annotated[
    str | None,
    typer.Option(
        "--workers",
        metavar="N|ray",
        rich_help_panel=JUDGED,
        help="Read by N processes of this machine, or by a Ray cluster: the same result (traindiff explain scale.md).",
    ),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", rich_help_panel=SHOWN, help="Replace a recording that is already there.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", rich_help_panel=SHOWN, help="Print the result as JSON (traindiff explain json).")
]


def _format(name: str) -> str:
    if name not in ("text", *FORMATS):
        raise typer.BadParameter(f"{name!r} is not a format. Known: {', '.join(('text', *FORMATS))}.")
    return name


FormatOption = Annotated[
    str,
    typer.Option(
        "--format", "-f", parser=_format, metavar="|".join(("text", *FORMATS)), rich_help_panel=SHOWN,
        autocompletion=lambda: ["text", *FORMATS], help="text for people, the others for programs.",
    ),
]  # fmt: skip
"""Option of every command that gives a verdict."""

FollowOption = Annotated[
    bool,
    typer.Option(
        "--follow",
        rich_help_panel=FOLLOWED,
        help="Wait for the steps of a run that goes on (traindiff explain scale.md).",
    ),
]
PatienceOption = Annotated[
    float,
    typer.Option(
        min=0.1,
        metavar="SECONDS",
        rich_help_panel=FOLLOWED,
        help="With --follow: a rank that adds nothing for so long has ended.",
    ),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        rich_help_panel=RUNS,
        help="Time that a run may go without ending a step. 600 for the first and then ten times the slowest, "
        "but at least 60, if left out.",
    ),
]
SeedOption = Annotated[
    int, typer.Option(metavar="N", rich_help_panel=RUNS, help="Seed of torch's, NumPy's and Python's generators.")
]
