"""`traindiff report`, `view` and `export`, and `--html` of `compare` and `check`."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cli.conftest import GOLDEN, Traindiff
from tests.made_up import record


def data_of(page: Path) -> dict[str, object]:
    """What the script of a page reads."""
    text = page.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return dict(json.loads(found))


def test_two_recordings_have_a_report_whatever_the_verdict(traindiff: Traindiff, tmp_path: Path) -> None:
    result = traindiff("report", "baseline", "candidate", "-o", str(tmp_path / "report.html"))

    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"traindiff: wrote {tmp_path}/report.html: diverged\n"
    assert data_of(tmp_path / "report.html")["kind"] == "comparison"


def test_one_recording_has_a_report_of_its_check(traindiff: Traindiff, tmp_path: Path) -> None:
    result = traindiff("report", "baseline", "-o", str(tmp_path / "report.html"))

    assert result.exit_code == 0
    assert data_of(tmp_path / "report.html")["kind"] == "check"


def test_a_recording_whose_path_is_no_text_has_a_report(traindiff: Traindiff, tmp_path: Path) -> None:
    recording = tmp_path / os.fsdecode(b"od\xffd")
    record(recording)

    result = traindiff("report", str(recording), "-o", str(tmp_path / "report.html"))

    assert result.exit_code == 0
    assert "od?d" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_only_the_steps_that_are_wanted_are_shown(traindiff: Traindiff, tmp_path: Path) -> None:
    traindiff("report", "baseline", "candidate", "--steps", "0-1", "-o", str(tmp_path / "report.html"))

    assert data_of(tmp_path / "report.html")["columns"] == [[0, 0], [1, 1]]


@pytest.mark.parametrize(("command", "code"), [(("compare", "baseline", "candidate"), 1), (("check", "baseline"), 0)])
def test_a_verdict_and_its_page_come_together(
    traindiff: Traindiff, tmp_path: Path, command: tuple[str, ...], code: int
) -> None:
    plain = traindiff(*command, "--json")
    result = traindiff(*command, "--json", "--html", str(tmp_path / "page.html"))

    assert result.exit_code == plain.exit_code == code
    assert json.loads(result.stdout) == json.loads(plain.stdout)
    assert data_of(tmp_path / "page.html")["rows"]


@pytest.mark.parametrize("form", ["markdown", "junit"])
def test_summaries_are_printed(traindiff: Traindiff, form: str) -> None:
    result = traindiff("compare", "baseline", "candidate", "--format", form)

    assert result.exit_code == 1
    assert "fc.weight grad" in result.stdout


def test_a_file_that_cannot_be_written_is_said(traindiff: Traindiff) -> None:
    result = traindiff("report", "baseline", "-o", "nowhere/report.html")

    assert result.exit_code == 2
    assert "cannot be written: No such file or directory." in result.stderr


def test_a_link_to_a_file_that_is_not_there_yet_is_followed(traindiff: Traindiff, tmp_path: Path) -> None:
    link, target = tmp_path / "report.html", tmp_path / "target.html"
    link.symlink_to(target)
    unusable = traindiff("report", "nothing", "-o", str(link))

    assert (unusable.exit_code, link.is_symlink(), target.exists()) == (2, True, False)
    assert traindiff("report", "baseline", "-o", str(link)).exit_code == 0
    assert (link.is_symlink(), target.is_symlink(), target.stat().st_size > 10_000) == (True, False, True)


@pytest.mark.parametrize("option", ["--html", "--junit"])
def test_a_report_into_a_pipe_is_refused(traindiff: Traindiff, tmp_path: Path, option: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = traindiff("check", "baseline", option, str(tmp_path / "pipe"))

    assert (result.exit_code, result.stdout) == (2, "")
    assert "is no regular file." in result.stderr


def test_recordings_are_served_until_interrupted() -> None:
    command = [sys.executable, "-m", "traindiff", "view", str(GOLDEN), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = urlsplit(process.stderr.readline().split()[1])
        connection = http.client.HTTPConnection(address.netloc, timeout=60)
        connection.request("GET", "/")
        listed = connection.getresponse().read().decode()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()

    assert 'href="/run/baseline"' in listed
    assert (process.returncode, rest) == (0, "traindiff: stopped\n")


def test_a_directory_that_is_none_cannot_be_served(traindiff: Traindiff) -> None:
    result = traindiff("view", "nowhere")

    assert result.exit_code == 2
    assert "nowhere\n    does not exist." in result.stderr


def test_scalars_are_exported_to_a_tool_that_is_known(traindiff: Traindiff) -> None:
    result = traindiff("export", "tensorbaord", "baseline")

    assert result.exit_code == 2
    assert 'Did you mean "tensorboard"? Known: msprobe, tensorboard, wandb.' in result.stderr
