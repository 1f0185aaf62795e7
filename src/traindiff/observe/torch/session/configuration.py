"""The settings of modules, e.g. the eps of a norm, as text for `rank.json`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from traindiff.core.site import path_in_whole
from traindiff.observe.torch.plain_settings import settings_of


class Configuration:
    """The settings of each module as they were when it was first described."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, str]] = {}

    def of(self, modules: Mapping[str, nn.Module]) -> dict[str, dict[str, str]]:
        """Settings by path."""
        for path, module in modules.items():
            where = path_in_whole(path)
            if where not in self._known:
                self._known[where] = settings_of(module)
        return self._known
