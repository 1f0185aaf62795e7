"""Where a tensor lives: canonical paths, patterns, labels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traindiff.core.site import PHASES, WRAPPERS, canonical_path, canonical_paths, enclosing, label, matches, printable

names = st.sampled_from(["a", "b", "0", "module", "_orig_mod", "_fsdp_wrapped_module", "weight"])
paths = st.lists(names, max_size=4).map(".".join)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", ""),
        ("encoder.0.weight", "encoder.0.weight"),
        ("module.encoder.0.weight", "encoder.0.weight"),
        ("module._orig_mod.encoder", "encoder"),
        ("_fsdp_wrapped_module.layers.3._fsdp_wrapped_module.fc.weight", "layers.3.fc.weight"),
        ("layers.0._checkpoint_wrapped_module.fc", "layers.0.fc"),
        ("_torch_module._original_module.head", "head"),
        ("_forward_module.module.head", "head"),
        ("module", ""),
        ("modules.0", "modules.0"),
        ("my_module.x", "my_module.x"),
    ],
)
def test_components_that_wrappers_insert_are_left_out(path: str, expected: str) -> None:
    assert canonical_path(path) == expected


@given(paths)
def test_a_canonical_path_is_its_own_canonical_path(path: str) -> None:
    assert canonical_path(canonical_path(path)) == canonical_path(path)
    assert not WRAPPERS & set(canonical_path(path).split("."))


def test_of_a_wrapper_and_what_it_wraps_the_innermost_is_observed() -> None:
    wrapped = ["", "module", "module.encoder", "module.encoder._orig_mod", "module.encoder._orig_mod.fc"]

    assert canonical_paths(wrapped) == {
        "module": "",
        "module.encoder._orig_mod": "encoder",
        "module.encoder._orig_mod.fc": "encoder.fc",
    }


def test_wrapped_and_plain_models_have_the_same_paths() -> None:
    plain = ["", "encoder", "encoder.0", "head"]
    wrapped = ["", "module", *(f"module.{path}" for path in plain[1:])]

    assert list(canonical_paths(wrapped).values()) == list(canonical_paths(plain).values()) == plain


def test_a_model_that_a_wrapper_holds_twice_has_each_path_once() -> None:
    model, layer, engine, wrapper = object(), object(), object(), object()
    wrapped = {
        "": wrapper, "_forward_module": engine, "_forward_module.module": model, "_forward_module.module.fc": layer,
        "_original_module": model, "_original_module.fc": layer,
    }  # fmt: skip

    assert canonical_paths(wrapped) == {"_forward_module.module": "", "_forward_module.module.fc": "fc"}


def test_two_models_in_a_wrapper_keep_their_own_paths() -> None:
    wrapped = {"_forward_module.fc": object(), "_original_module.fc": object()}

    assert canonical_paths(wrapped) == {path: path for path in wrapped}


def test_a_layer_that_is_really_called_module_keeps_its_name_where_another_would_share_it() -> None:
    ambiguous = ["blocks.module.fc", "blocks.fc"]

    assert canonical_paths(ambiguous) == {path: path for path in ambiguous}


@given(st.lists(paths, unique=True))
def test_no_two_paths_share_a_canonical_path(some: list[str]) -> None:
    found = canonical_paths(some)

    assert len(set(found.values())) == len(found)
    assert [path for path in some if path in found] == list(found)


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*", "", True),
        ("*", "encoder.0", True),
        ("(root)", "", True),
        ("(root)", "encoder", False),
        ("encoder.*", "encoder.0.fc", True),
        ("encoder.*", "encoder", False),
        ("encoder*", "", False),
        ("h.[0-3].*", "h.2.mlp", True),
        ("h.?", "h.2", True),
        ("Encoder", "encoder", False),
        ("*.weight", "weight", False),
    ],
)
def test_patterns_match_canonical_paths(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


def test_a_site_is_labeled_as_people_read_it() -> None:
    assert label("encoder.0", "output[0]") == "encoder.0 output[0]"
    assert label("", "output[0]") == "(root) output[0]"
    assert label("encoder", "") == "encoder"


def test_phases_are_in_dataflow_order() -> None:
    assert PHASES == ("batch", "forward", "loss", "backward", "grad", "optimizer", "update", "param")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("encoder.0.größe`|\\n 名", "encoder.0.größe`|\\n 名"),
        ("", ""),
        ("a\nb\x1b[31mc\x00", r"a\nb\x1b[31mc\x00"),
        ("\u202egpj.größe\xa0", r"\u202egpj.größe\xa0"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_is_not_printable_is_escaped_and_nothing_else(text: str, expected: str) -> None:
    assert printable(text) == expected
    assert printable(expected) == expected


def test_canonical_paths_are_printable_and_patterns_match_what_a_module_is_really_called() -> None:
    assert canonical_path("module.a\x1bb.weight") == r"a\x1bb.weight"
    assert matches("a\x1bb.*", r"a\x1bb.weight")
    assert matches(r"a\x1bb.*", r"a\x1bb.weight")


@pytest.mark.parametrize(
    ("path", "around"), [("", [""]), ("head", ["head", ""]), ("h.0.attn", ["h.0.attn", "h.0", "h", ""])]
)
def test_what_encloses_a_path_ends_with_the_root(path: str, around: list[str]) -> None:
    assert enclosing(path) == around
