"""Tell masks, which hold -inf on purpose, from numbers that have overflowed."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from traindiff.watching.reading import Reading, is_additive_mask, only_masks


class Masks:
    """What is declared to be a mask, or recognised as one.

    Args:
        declared: Globs over sites, `PATH SLOT`: `"*.attention input.mask"`, `"mask_maker output"`.
    """

    def __init__(self, declared: Sequence[str]) -> None:
        self._declared = tuple(pattern.replace("[", "[[]") for pattern in declared)

    def excuse(self, site: str, reading: Reading, tensor: Tensor | None) -> bool:
        """Whether what is not finite of a tensor is nothing but a mask's -inf.

        A tensor without gradient that holds only 0 and -inf (or the least number of its dtype) is a mask wherever it
        is.

        Args:
            site: Path and slot.
            reading: Of the tensor.
            tensor: The tensor, while it is there. Without it, -inf alone in what has no gradient will do.
        """
        if not self.may_mask(reading, tensor):
            return False
        if any(fnmatchcase(site, pattern) for pattern in self._declared):
            return True
        return not reading.has_gradient and (tensor is None or is_additive_mask(tensor))

    @staticmethod
    def may_mask(reading: Reading, tensor: Tensor | None) -> bool:
        """Whether -inf is all that is not finite of a tensor."""
        if reading.is_nan:
            return False
        if reading.masks is None:
            reading.masks = tensor is not None and only_masks(tensor)
        return reading.masks
