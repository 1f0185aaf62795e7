"""Verdicts as tools that watch trainings get them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.analyse.compact.made_up_ranks import record_ranks
from tests.analyse.compact.test_compacting import CHANGES
from tests.present.test_exports import records
from traindiff.analyse.check import check
from traindiff.analyse.compare import compare
from traindiff.errors import ConfigError
from traindiff.present.alerts import TOOLS, check_alert, raise_alert


@pytest.fixture
def diverged(tmp_path: Path) -> Any:
    baseline, candidate = record_ranks(tmp_path / "one"), record_ranks(tmp_path / "other", CHANGES["a shard"])
    return compare(baseline, candidate)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[bytes]]]:
    """What an OpenTelemetry collector is sent, by path."""
    got: dict[str, list[bytes]] = {}

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.setdefault(self.path, []).append(
                gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield got
    server.shutdown()
    thread.join()
    server.server_close()


def attributes(one: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in one.attributes}


@pytest.mark.filterwarnings("ignore")
def test_a_collector_gets_metrics_and_events(diverged: Any, collector: dict[str, list[bytes]]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="not installed (make test-scale)")
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    check_alert("otel")
    assert raise_alert("otel", diverged) == ""

    points = {}
    for body in collector["/v1/metrics"]:
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for metric in resource.scope_metrics[0].metrics:
                for point in metric.gauge.data_points:
                    points[metric.name, attributes(point).get("traindiff.severity")] = point.as_int, attributes(point)
    about = {"traindiff.command": "compare", "traindiff.recording": diverged.candidate}
    about["traindiff.baseline"] = diverged.baseline
    assert points["traindiff.verdict", None] == (1, {**about, "traindiff.verdict": "diverged"})
    assert points["traindiff.steps", None] == (4, about)
    assert points["traindiff.findings", "finding"][0] == len(diverged.findings)

    events = [
        one
        for body in collector["/v1/logs"]
        for resource in ExportLogsServiceRequest.FromString(body).resource_logs
        for one in resource.scope_logs[0].log_records
    ]
    first = diverged.first_divergence
    assert [one.event_name for one in events[:2]] == ["traindiff.verdict", "traindiff.finding"]
    assert events[0].body.string_value == str(diverged).partition("\n")[0]
    assert events[1].body.string_value == first.message
    named = attributes(events[1])
    assert (named["traindiff.step"], named["traindiff.rank"], named["traindiff.path"]) == (first.step, 2, "shard")


@pytest.mark.filterwarnings("ignore")
def test_that_no_collector_answers_is_said(diverged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="not installed (make test-scale)")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")

    assert raise_alert("otel", diverged) == "OpenTelemetry's exporter could not send it"


def test_tensorboard_shows_the_findings_at_their_steps(diverged: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (make test-browser)")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert raise_alert(f"tensorboard={tmp_path / 'events'}", diverged) == ""

    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    found = {tag: [(one.step, one.tensor_proto.string_val[0].decode()) for one in events.Tensors(tag)]
             for tag in events.Tags()["tensors"]}  # fmt: skip
    assert found["traindiff/verdict"] == [(3, str(diverged).partition("\n")[0])]
    step, text = found["traindiff/finding"][0]
    assert step == diverged.first_divergence.step
    assert diverged.first_divergence.message in text


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_gets_an_alert(diverged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (make test-browser)")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    assert raise_alert("wandb=training/run-7", diverged) == ""
    (path,) = (tmp_path / "wandb").glob("offline-run-*-run-7/*.wandb")
    (alert,) = [one.alert for one in map(Record.FromString, records(path)) if one.WhichOneof("record_type") == "alert"]
    assert (alert.title, alert.level) == ("traindiff: diverged", "ERROR")
    assert diverged.first_divergence.message in alert.text


@pytest.mark.parametrize(
    ("alert", "words"),
    [
        ("slack=x", '"slack" is not a tool'),
        ("tensorboard", "Write --alert tensorboard=DIRECTORY"),
        ("otel=here", "Write --alert otel"),
    ],
)
def test_alerts_that_cannot_be_raised_are_refused(alert: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_alert(alert)


def test_what_is_to_be_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOOLS, "otel", TOOLS["otel"]._replace(package="missing_package.otlp"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"pip install 'traindiff\[otel\]'"):
        check_alert("otel")


def test_a_tool_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no route to the collector")

    monkeypatch.setitem(TOOLS, "otel", TOOLS["otel"]._replace(tell=fails))  # type: ignore[arg-type]
    assert raise_alert("otel", check(record_ranks(tmp_path / "run"))) == "no route to the collector"
