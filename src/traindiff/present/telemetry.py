"""Verdicts as metrics and events of OpenTelemetry.

Metrics, with the attributes `traindiff.command`, `traindiff.recording` and, of a comparison, `traindiff.baseline`:

* `traindiff.verdict`: the exit code, with the word in the attribute `traindiff.verdict`
* `traindiff.findings`: the number of findings and, in a series of their own (`traindiff.severity`), of warnings
* `traindiff.steps`: the number of steps that were judged

Events, as log records: `traindiff.verdict`, and `traindiff.finding` for each place, with step, rank, phase and site.
"""

from __future__ import annotations

import math
from typing import Any

from traindiff.analyse.findings import Finding
from traindiff.present.alerts import sentence, told

SCOPE = "traindiff"


def send(result: Any) -> None:
    """Send a verdict over OTLP (HTTP). `OTEL_EXPORTER_OTLP_ENDPOINT` and OpenTelemetry's other variables say where.

    Args:
        result: Of `check` or `compare`.

    Raises:
        ConnectionError: It did not arrive.
    """
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    failed: list[str] = []

    class Metrics(OTLPMetricExporter):
        def export(self, *given: Any, **options: Any) -> Any:
            return _noted(super().export(*given, **options), failed)

    class Logs(OTLPLogExporter):
        def export(self, *given: Any, **options: Any) -> Any:
            return _noted(super().export(*given, **options), failed)

    meters = MeterProvider(metric_readers=[PeriodicExportingMetricReader(Metrics(), export_interval_millis=math.inf)])
    logs = LoggerProvider()
    logs.add_log_record_processor(BatchLogRecordProcessor(Logs()))
    try:
        emit(result, meters=meters, logs=logs)
        meters.force_flush()  # which its shutdown does not do for such an interval
    finally:
        meters.shutdown()
        logs.shutdown()
    if failed:
        raise ConnectionError("OpenTelemetry's exporter could not send it")


def _noted(sent: Any, failed: list[str]) -> Any:
    """What an exporter returns; noted if it failed, which nobody is told otherwise."""
    if sent.name != "SUCCESS":
        failed.append(sent.name)
    return sent


def emit(result: Any, *, meters: Any = None, logs: Any = None) -> None:
    """Make the metrics and events of a verdict.

    Args:
        result: Of `check` or `compare`.
        meters: A `MeterProvider`; the process's own, if left out.
        logs: A `LoggerProvider`; the process's own, if left out.
    """
    from opentelemetry._logs import SeverityNumber, get_logger
    from opentelemetry.metrics import get_meter

    about = _about(result)
    meter = get_meter(SCOPE, meter_provider=meters)
    meter.create_gauge("traindiff.verdict", description="Exit code of the verdict.").set(
        result.exit_code, {**about, "traindiff.verdict": result.verdict}
    )
    meter.create_gauge("traindiff.steps", unit="{step}", description="Steps that were judged.").set(
        len(result.steps), about
    )
    findings = meter.create_gauge("traindiff.findings", unit="{finding}", description="Findings and warnings.")
    findings.set(len(result.findings), {**about, "traindiff.severity": "finding"})
    findings.set(len(getattr(result, "warnings", ())), {**about, "traindiff.severity": "warning"})

    logger = get_logger(SCOPE, logger_provider=logs)
    logger.emit(
        event_name="traindiff.verdict", body=sentence(result),
        severity_number=SeverityNumber.ERROR if result.exit_code else SeverityNumber.INFO,
        attributes={**about, "traindiff.verdict": result.verdict, "traindiff.exit_code": result.exit_code},
    )  # fmt: skip
    for finding, is_warning in told(result):
        logger.emit(
            event_name="traindiff.finding", body=finding.message, attributes={**about, **_of_finding(finding)},
            severity_number=SeverityNumber.WARN if is_warning else SeverityNumber.ERROR,
        )  # fmt: skip


def _about(result: Any) -> dict[str, str]:
    if hasattr(result, "baseline"):
        about = {"traindiff.command": "compare", "traindiff.recording": result.candidate}
        return {**about, "traindiff.baseline": result.baseline}
    return {"traindiff.command": "check", "traindiff.recording": result.recording}


def _of_finding(finding: Finding) -> dict[str, str | int]:
    found: dict[str, str | int | None] = {
        "step": finding.step, "micro_step": finding.micro_step, "rank": finding.rank, "phase": finding.phase,
        "stage": finding.stage or None, "path": finding.path, "slot": finding.slot, "kind": finding.kind,
    }  # fmt: skip
    return {f"traindiff.{name}": value for name, value in found.items() if value is not None}
