"""`help` of what users are given says what they may call, and not how traindiff makes it."""

from __future__ import annotations

import inspect
import pydoc

import pytest

import traindiff

MADE = (traindiff.Recorder, traindiff.Watcher)


@pytest.mark.parametrize("made", MADE)
def test_help_shows_no_internals(made: type) -> None:
    shown = pydoc.plain(pydoc.render_doc(made))

    assert list(inspect.signature(made).parameters) == []
    assert "targets" not in shown.lower().partition("methods")[0]
    assert "__init__(self, /)" in shown
    assert "Made by `traindiff." in shown
    assert "Attributes:" in shown


@pytest.mark.parametrize("made", MADE)
def test_the_source_still_documents_the_arguments(made: type) -> None:
    assert "    Args:\n" in inspect.getsource(made)
