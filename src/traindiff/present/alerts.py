"""Verdicts for tools that watch trainings: OpenTelemetry, TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from traindiff.analyse.findings import Finding, grouped, where_text
from traindiff.errors import ConfigError, Problem

MOST_FINDINGS = 20
"""So many findings are told; the result has all of them."""


class _Tool(NamedTuple):
    """A tool that verdicts are told to.

    Attributes:
        package: What it needs.
        where: What stands behind `=`; empty if nothing does.
        tell: Tells it a result.
    """

    package: str
    where: str
    tell: Callable[[Any, str], None]


def check_alert(alert: str) -> None:
    """Refuse an alert that cannot be raised.

    Args:
        alert: `TOOL` or `TOOL=WHERE`.

    Raises:
        ConfigError: There is no such tool, its package is not installed, or it is not said where.
    """
    name, _, where = alert.partition("=")
    if name not in TOOLS:
        problem = Problem.unknown_name(where=f"--alert {alert}", kind="a tool", found=name, known=TOOLS)
        raise ConfigError("--alert", [problem], consequence="nothing was read")
    tool = TOOLS[name]
    if bool(where) != bool(tool.where):
        example = f"{name}={tool.where}" if tool.where else name
        problem = Problem(where=f"--alert {alert}", what="does not say where.", fix=f"Write --alert {example}.")
        if where:
            problem = Problem(where=f"--alert {alert}", what="takes nothing behind =.", fix=f"Write --alert {example}.")
        raise ConfigError("--alert", [problem], consequence="nothing was read")
    if not _is_there(tool.package):
        fix = f"Run pip install 'traindiff[{name}]' where traindiff is installed."
        problem = Problem(where=f"--alert {alert}", what=f"needs {tool.package}, which is not installed.", fix=fix)
        raise ConfigError("--alert", [problem], consequence="nothing was read")


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # nor the package that it is in
        return False


def raise_alert(alert: str, result: Any) -> str:
    """Tell a tool a verdict, good or bad.

    Args:
        alert: See `check_alert`.
        result: Of `check` or `compare`.

    Returns:
        Why it could not be told; empty if it was.
    """
    name, _, where = alert.partition("=")
    try:
        TOOLS[name].tell(result, where)
    except Exception as error:  # noqa: BLE001  of another package: the verdict stands whatever it raises
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def sentence(result: Any) -> str:
    """The verdict in one sentence."""
    return str(result).partition("\n")[0]


def told(result: Any) -> Iterator[tuple[Finding, bool]]:
    """The first of the findings at each place, and of the warnings; true for a warning."""
    sides: Sequence[tuple[Sequence[Finding], bool]] = (
        (result.findings, False),
        (getattr(result, "warnings", ()), True),
    )
    for findings, is_warning in sides:
        for group in grouped(findings)[:MOST_FINDINGS]:
            yield group.first, is_warning


def to_tensorboard(result: Any, directory: str) -> None:
    """Write the verdict and its findings as texts into an event file, at the steps of the findings."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def text(tag: str, content: str) -> Any:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[content.encode()], tensor_shape=shape)
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)

    writer = EventFileWriter(directory)
    try:
        last = max(result.steps, default=0)
        writer.add_event(Event(step=last, summary=Summary(value=[text("traindiff/verdict", sentence(result))])))
        for finding, is_warning in told(result):
            tag = f"traindiff/{'warning' if is_warning else 'finding'}"
            content = f"{where_text(finding)}: {finding.said}"
            writer.add_event(Event(step=finding.step, summary=Summary(value=[text(tag, content)])))
    finally:
        writer.close()


def to_wandb(result: Any, where: str) -> None:
    """Raise an alert in a run of Weights & Biases if the verdict is bad, and note the verdict in its summary.

    Whether anything goes over the network is said by wandb's own settings, e.g. `WANDB_MODE=offline`.
    """
    import wandb

    project, _, run_id = where.partition("/")
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    with wandb.init(project=project, id=run_id or None, resume="allow" if run_id else None, settings=settings) as run:
        run.summary["traindiff/verdict"] = result.verdict
        if result.exit_code:
            lines = [f"{where_text(one)}: {one.said}" for one, is_warning in told(result) if not is_warning]
            run.alert(title=f"traindiff: {result.verdict}", text="\n\n".join([sentence(result), *lines]), level="ERROR")
    wandb.teardown()  # its service writes the end of the file when it stops


def to_otel(result: Any, _: str) -> None:
    """Send the verdict as metrics, and its findings as events, to where OpenTelemetry's own variables say."""
    from traindiff.present.telemetry import send

    send(result)


TOOLS: Mapping[str, _Tool] = {
    "otel": _Tool(package="opentelemetry.exporter.otlp.proto.http", where="", tell=to_otel),
    "tensorboard": _Tool(package="tensorboard", where="DIRECTORY", tell=to_tensorboard),
    "wandb": _Tool(package="wandb", where="PROJECT[/RUN]", tell=to_wandb),
}
"""By the name that `--alert` takes. The extras of traindiff have the same names."""
