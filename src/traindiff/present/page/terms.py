"""The words that a page explains where they stand, from the glossary."""

from __future__ import annotations

from collections.abc import Iterable

from traindiff.present.glossary import glossary

TERMS = (
    "baseline", "candidate", "step", "micro-step", "phase", "site", "rank", "relative L2 difference", "noise floor",
    "ratio", "uncalibrated", "calibrated", "finding", "kind", "first divergence", "first difference in bits", "within",
    "follows", "above", "not judged", "representation", "identical", "equivalent", "diverged", "misaligned",
    "incomplete", "healthy", "unhealthy", "rule", "warning", "unobserved", "product", "profile",
)  # fmt: skip
"""Terms of the glossary that stand on pages."""


def explanations(kinds: Iterable[str] = ()) -> dict[str, str]:
    """What a page says of its words, by term, and of these kinds of finding, by kind."""
    terms, all_kinds = glossary()
    found = {entry.name: _plain(entry.text) for entry in terms if entry.name in TERMS}
    wanted = set(kinds)
    for kind in all_kinds:
        for name in kind.names:
            if name in wanted:
                evidence = f" Recognized by: {kind.evidence}." if kind.evidence else ""
                found[name] = _plain(f"{name}: {kind.text}.{evidence}")
    return found


def _plain(text: str) -> str:
    return text.replace("`", "")
