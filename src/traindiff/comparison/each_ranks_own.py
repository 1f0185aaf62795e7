"""Modules that compute something else on several ranks than in one process, and rightly so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from traindiff.findings import Finding

_STATISTICS = re.compile(r"BatchNorm[123]d|LazyBatchNorm[123]d")
_RANDOM = re.compile(r"(Alpha|FeatureAlpha)?Dropout([123]d)?|RReLU")


def with_each_ranks_own(finding: Finding, modules: Mapping[str, str], sizes: tuple[int, int]) -> Finding:
    """The finding, which says so if its module takes what it computes from each rank's own samples.

    Args:
        finding: The first one.
        modules: Class name of each module by path, in the run that divides the batch over more ranks.
        sizes: Over how many ranks the batch is divided in each run.
    """
    if sizes[0] == sizes[1] or finding.phase != "forward":
        return finding
    name = modules.get(finding.path, "")
    if _STATISTICS.fullmatch(name):
        says = f" {name} takes the statistics of each rank's own samples; SyncBatchNorm takes those of the whole batch."
    elif _RANDOM.fullmatch(name):
        says = f" {name} draws other numbers where the batch is divided over ranks: compare with it turned off."
    else:
        return finding
    return replace(finding, says=finding.says + says)
