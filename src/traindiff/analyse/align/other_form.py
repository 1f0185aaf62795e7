"""The same samples in another form: padded further, trimmed, in another order, or with other axes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from traindiff.analyse.align.exact import check_batch, draws, has_same_order, is_reshaped
from traindiff.analyse.align.padding import padding_of
from traindiff.analyse.align.side import Tables
from traindiff.analyse.merge.distance import Pair, equal_bits
from traindiff.analyse.merge.recorded_calls import Samples, samples_of
from traindiff.analyse.merge.site import StepTable
from traindiff.core.observation import ITSELF

_OVER_SAMPLES = re.compile("BatchNorm")

_OVER_POSITIONS = re.compile("(Batch|Instance|Group)Norm")


def has_other_form(tables: Tables, classes: Iterable[str]) -> bool:
    """True if the runs are given the same samples, and their form must not change any loss or gradient.

    Then rows have no counterparts, and everything else is compared. Random masks fall on other samples where the order
    differs, statistics over positions count what is padded, and those of micro-batches depend on which samples share
    one. With any of these, the difference of the batch may explain whatever differs later.

    Args:
        tables: The step in both runs.
        classes: Class names of the modules of both runs.
    """
    batches = [
        Pair(baseline=entry, candidate=other)
        for key, entry in tables[0].items()
        if key[:2] == ("batch", "") and key.path not in ("rng", ITSELF) and (other := tables[1].get(key)) is not None
    ]
    if any(one.unobserved for pair in batches for one in (pair.baseline, pair.candidate)) or any(map(draws, tables)):
        return False
    samples = samples_of(tables[0]), samples_of(tables[1])
    found = [check_batch(pair, step=0, samples=samples) for pair in batches]
    differing = [finding.evidence for finding in found if finding is not None]
    same = any(evidence["permuted"] for evidence in differing)
    if not same or not all(evidence["permuted"] or evidence["reshaped"] for evidence in differing):
        return False
    if not _are_same_samples(batches, samples):
        return False
    padded = any(evidence["reshaped"] for evidence in differing)
    sensitive = _OVER_POSITIONS if padded else _OVER_SAMPLES
    if not any(map(sensitive.search, classes)):
        return True
    return not padded and not any(map(_is_divided, tables))


def _are_same_samples(batches: Sequence[Pair], samples: tuple[Samples, Samples]) -> bool:
    """True if the inputs that belong to a sample belong together in both runs, in whatever order the samples are.

    Fingerprints of samples leave out zeros at their end. Where another value was padded, they tell no order.
    """
    columns: tuple[list[list[int]], list[list[int]]] = ([], [])
    are_padded = False
    for pair in batches:
        if is_reshaped(pair) and has_same_order(pair):
            continue
        if not (pair.baseline.batched or pair.candidate.batched):
            if pair.baseline.shape == pair.candidate.shape and not equal_bits(pair):
                return False
            continue  # else it has no samples, such as a mask or positions
        site = pair.baseline.key.path, pair.baseline.key.slot
        own, other = ([one.fingerprint for one in side.get(site, ())] for side in samples)
        if Counter(own) != Counter(other) or not own:
            if not padding_of(pair):
                return False
            are_padded = True
        else:
            columns[0].append(own)
            columns[1].append(other)
    if columns[0] == columns[1]:
        return True
    own_rows, other_rows = (Counter(zip(*side, strict=False)) for side in columns)
    return not are_padded and len({len(column) for column in columns[0]}) == 1 and own_rows == other_rows


def _is_divided(table: StepTable) -> bool:
    """True if the samples of a step are divided among micro-batches or ranks."""
    return any(len(entry.parts) > 1 for key, entry in table.items() if key[:2] == ("batch", "") and key.path != "rng")
