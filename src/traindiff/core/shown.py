"""Results that a notebook shows, and that become tables and pictures: the layer `present` does it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def _notebook() -> Any:
    """The module that shows results. It is above the layers of the results, so it is imported when it is needed."""
    return import_module("traindiff.present.notebook")


class Shown:
    """The methods by which a result is shown outside a terminal."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(_notebook().short(self))

    def _repr_html_(self) -> str:
        return str(_notebook().summary(self))

    def to_html(self) -> str:
        """The whole report as one page of HTML, as `traindiff report` writes it.

        Raises:
            ConfigError: The result does not hold the numbers of every step: it was made without `history=True`.
        """
        return str(_notebook().page(self))

    def to_arrow(self) -> Any:
        """The result as a `pyarrow.Table`.

        A comparison or verification has a row for each site, a check one for each finding or warning, a recording one
        for each observation, with the columns of `traindiff show --format csv`.
        """
        return _notebook().table(self)

    def to_pandas(self) -> Any:
        """The same as a `pandas.DataFrame`.

        Raises:
            ModuleNotFoundError: pandas is not installed; the message says how to install it.
        """
        return _notebook().pandas_table(self)

    def to_polars(self) -> Any:
        """The same as a `polars.DataFrame`.

        Raises:
            ModuleNotFoundError: polars is not installed; the message says how to install it.
        """
        return _notebook().polars_table(self)

    def plot(self, site: str) -> Any:
        """A `matplotlib` figure of one site over the steps: sizes, and for a comparison the difference and its floor.

        Args:
            site: Its path, or path and slot, e.g. `"lm_head.weight grad"`. If it names several sites, each has a line.

        Raises:
            ConfigError: There is no such site, the result was made without `history=True`, or matplotlib is missing.
        """
        return _notebook().figure(self, site)
