"""What a step did to each parameter: it follows from the parameters before and after it."""

from __future__ import annotations

from typing import Any

from traindiff.merging.step_table import Entry, Key
from traindiff.summary import add


class Updates:
    """Derives what each step did to each parameter, from the parameters before and after it.

    An update is the difference of two tensors, so its sketch is the difference of two sketches; in
    float64 that leaves about ten digits of an update a millionth the size of its parameter.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, Entry] = {}
        self._ended: dict[str, int] = {}  # by path: the step at whose end a parameter was last seen

    def derive(self, table: dict[Key, Entry], *, step: int) -> tuple[list[Entry], dict[str, Entry]]:
        """Entries of phase `update`, and the parameters as this step found them, by path."""
        for key, entry in table.items():
            if key.phase == "param" and key.stage == "before" and key.slot == "value":
                self._parameters[key.path] = entry.without_parts()
                self._ended.pop(key.path, None)
        # What some ranks have not recorded is unknown, and so is what becomes of it.
        before = {path: entry for path, entry in self._parameters.items() if not entry.unobserved}
        found: list[Entry] = []
        for key, entry in table.items():
            if key.phase != "param" or key.stage or key.slot != "value":
                continue
            old = before.get(key.path)
            if (
                old is not None
                and not entry.unobserved
                and old.shape == entry.shape
                and self._ended.get(key.path, step - 1) == step - 1
            ):
                found.append(_update(key, old, entry))
            self._parameters[key.path] = entry.without_parts()
            self._ended[key.path] = step
        return found, before


def _update(key: Key, before: Entry, after: Entry) -> Entry:
    same = before.exact and after.exact and before.summary["fingerprint"] == after.summary["fingerprint"]
    summary: Any = add([after.summary, before.summary], [1.0, -1.0])
    if same:
        summary = add([after.summary], [0.0])
    return Entry(
        key=Key("update", "", key.path, "update", 0, 0),
        order=after.order,
        dtype=after.dtype,
        shape=after.shape,
        summary=summary,
        exact=False,
    )
