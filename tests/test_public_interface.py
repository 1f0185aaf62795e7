"""What `import traindiff` offers: all of it is listed, there, and documented as the house style asks."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import pydoc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import traindiff
from traindiff import storage as recording
from traindiff.errors import Problem

OBJECTS = {name: getattr(traindiff, name) for name in traindiff.__all__ if not name.startswith("_")}
FUNCTIONS = {name: one for name, one in OBJECTS.items() if inspect.isfunction(one)}
CLASSES = {name: one for name, one in OBJECTS.items() if inspect.isclass(one)}

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields")


def sections(documented: object) -> dict[str, str]:
    """The sections of a docstring; the text before them is ''."""
    doc = inspect.getdoc(documented) or ""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", doc, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def entries(section: str) -> list[str]:
    """The names that a section explains."""
    return re.findall(r"^    \*{0,2}(\w+): \S", section, re.MULTILINE)


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def methods() -> Iterator[tuple[str, Any]]:
    for name, kind in CLASSES.items():
        for method, one in vars(kind).items():
            if not method.startswith("_"):
                yield f"{name}.{method}", one


METHODS = {name: one for name, one in methods() if inspect.isfunction(one)}
PROPERTIES = {name: one for name, one in methods() if isinstance(one, property)}


def test_the_names_are_sorted_and_listed_once() -> None:
    assert traindiff.__all__ == sorted(set(traindiff.__all__))


def test_what_is_made_at_once_and_what_is_made_when_asked_for_are_all_of_the_names() -> None:
    eager = {
        name
        for name, value in vars(traindiff).items()
        if getattr(value, "__module__", "").startswith("traindiff.") and not name.startswith("_")
    }
    assert eager | set(traindiff._LAZY) | {"__version__"} == set(traindiff.__all__)


@pytest.mark.parametrize("name", traindiff.__all__)
def test_every_name_is_there_and_in_the_docstring_of_the_package(name: str) -> None:
    assert getattr(traindiff, name) is not None
    assert name in dir(traindiff)
    assert re.search(rf"\b{name}\b", traindiff.__doc__ or "")


def test_the_docstring_of_the_package_names_nothing_else() -> None:
    listed = re.findall(r"^    +(\w+)(?:$|  +[A-Z])", traindiff.__doc__ or "", re.MULTILINE)
    assert len(listed) > 15
    assert set(listed) <= set(traindiff.__all__)


def test_help_shows_every_function_and_class_with_its_docstring() -> None:
    text = pydoc.plain(pydoc.render_doc(traindiff))
    for name, one in {**FUNCTIONS, **CLASSES}.items():
        summary = (inspect.getdoc(one) or "").partition("\n")[0]
        assert re.search(rf"^    (class )?{name}\(.*\n(.*\n){{0,40}}?.*{re.escape(summary)}", text, re.MULTILINE), name


@pytest.mark.parametrize("name", {**FUNCTIONS, **METHODS})
def test_the_docstring_of_a_function_explains_every_parameter_in_order(name: str) -> None:
    function = {**FUNCTIONS, **METHODS}[name]

    assert entries(sections(function).get("Args", "")) == parameters(function)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_docstring_of_a_function_says_what_it_returns_and_what_it_raises(name: str) -> None:
    said = sections(FUNCTIONS[name])

    assert said[""].partition("\n")[0].endswith(".")
    assert said["Returns"].strip()
    if name not in ("inspect", "shard"):  # which raise nothing
        assert entries(said["Raises"])


@pytest.mark.parametrize("name", {**FUNCTIONS, **METHODS})
def test_what_a_function_is_said_to_raise_is_public_or_pythons_own(name: str) -> None:
    raised = entries(sections({**FUNCTIONS, **METHODS}[name]).get("Raises", ""))

    assert [error for error in raised if error not in traindiff.__all__ and not hasattr(builtins, error)] == []


@pytest.mark.parametrize("name", PROPERTIES)
def test_every_property_says_what_it_is(name: str) -> None:
    assert (inspect.getdoc(PROPERTIES[name]) or "").partition("\n")[0].endswith(".")


@pytest.mark.parametrize(
    "kind", [*CLASSES.values(), Problem, recording.reader.RankStatus], ids=lambda kind: kind.__name__
)
def test_the_docstring_of_a_class_explains_every_attribute(kind: type) -> None:
    said = sections(kind)
    public = [name for name in getattr(kind, "__dataclass_fields__", {}) if not name.startswith("_")]

    assert said[""].partition("\n")[0].endswith(".")
    if dataclasses.is_dataclass(kind):
        assert entries(said["Attributes"]) == public
    elif "__init__" in vars(kind) and parameters(kind) and not getattr(kind, "_is_protocol", False):
        assert entries(said["Args"]) == parameters(kind)


def test_a_name_that_is_not_there_is_an_attribute_error_that_knows_where_to_look_for_the_nearest() -> None:
    with pytest.raises(AttributeError, match="module 'traindiff' has no attribute 'recrod'") as caught:
        _ = traindiff.recrod

    assert (caught.value.name, caught.value.obj) == ("recrod", traindiff)
