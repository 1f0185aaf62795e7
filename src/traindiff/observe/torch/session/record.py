"""`traindiff.record`: attach the taps to a training and write what they see."""

from __future__ import annotations

import os
from typing import Unpack

from traindiff.core.settings import (
    SETTINGS,
    RecordOptions,
    RecordSettings,
    check_names,
    checked_first_step,
    record_settings,
    recording_path,
    takes_settings,
)
from traindiff.observe.torch.hooks.out_of_sight import out_of_sight
from traindiff.observe.torch.perturb import make_replica
from traindiff.observe.torch.session.recorder import Recorder
from traindiff.observe.torch.session.targets import Models, Optimizers, Targets, find_targets
from traindiff.storage.location import of_this_start


@takes_settings(RecordOptions)
def record(
    path: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers = None,
    *,
    overwrite: bool = False,
    first_step: int = 0,
    **settings: Unpack[RecordOptions],
) -> Recorder:
    """Record a training's numbers, without disturbing it.

    ```python
    with traindiff.record("runs/base", model, optimizer) as run:
        for inputs, labels in batches:
            ...  # forward, backward, optimizer.step(), as ever
    ```

    The training computes the same bits with and without it. Each step is on disk when
    `optimizer.step()` returns, unless the file system is slow or a GPU is still computing summaries: then a run that
    is killed may lose its last three steps. At a URL, it may lose those of its last second. An error inside traindiff
    disables the part in which it happened, is written into the recording, warns once, and the training goes on.

    Args:
        path: Directory to write: a local path or any fsspec URL. After torchrun has restarted the ranks,
            `PATH-restart-1` is written, so the recording of the first start is kept.
        model: The root module that the training loop calls, wrapped (DDP, `torch.compile`) or not; of a pipeline,
            the module of this rank's stage, or a list of them where it has several. Several models that are trained
            together, by name: `{"generator": ..., "discriminator": ...}`; paths begin with these names.
        optimizer: Whose calls are the steps: one, several, or several by name. With several, each
            counts its own steps, and the first also those of forward and backward passes. None
            finds the optimizers that hold parameters of `model` when they first step; one that is made later, for
            parameters of one that has stepped, takes its place.
        overwrite: Replace a recording that is already at `path`. One that is being recorded at the moment is refused;
            on file systems without locks, as most URLs, the earlier one ends with a warning instead.
        first_step: Number of the first step, for a training that continues from a checkpoint: after N steps, write
            `first_step=N`. Each optimizer counts on from it. Left out, `traindiff.compare` finds the step of the
            baseline by the parameters with which the recording begins.
        observe: Some of `batch`, `forward`, `loss`, `backward`, `grad`, `optimizer`, `update`,
            `param`, `samples`, `replay`, `grad.micro`, `grad.stages`, and what else `traindiff explain observe` lists.
            Default: all up to `replay`. `update` is the difference of two `param` observations and makes sure that
            these are recorded. `grad` is what the optimizer sees; `grad.micro` adds each micro-batch's share of it, and
            `grad.stages` what it was before a loss scaler unscaled it and before it was clipped, in trainings that do
            so. `replay` computes in float64 what the optimizer should do with up to 16,384 elements of
            each parameter, in the first three recorded steps and then in one of a hundred. In such a step it holds
            at most 64 MiB more, and takes as long as summarizing four tensors of these elements. See
            `traindiff explain replay`.
        select: Globs over canonical paths of modules and parameters, e.g. `"transformer.h.3.*"`.
        detail: What is kept of a tensor, one or several of `summary` (always; 1.1 kilobytes),
            `exponents` (a histogram of binary exponents; 2.5 kilobytes), `signs` (one bit per element, and
            one more where there are zeros or NaN), `md5` (of the elements' bytes) and `tensors` (everything). Choose
            steps with the last three: they write a file per tensor.
        bounds: Ascending numbers, e.g. `[-1, 0, 1]`: count how many elements of each gradient of a parameter lie in the
            intervals between them, each with its upper bound. NaN is counted apart. See
            `traindiff explain gradient-monitor`.
        steps: Steps to record, e.g. `"0-9,20,30-"` or `range(10)` (of which the end is left out). Default: all.
        ranks: Ranks to record. Default: all.
        every: Record only every n-th step, counted from 0.
        batch_axis: Where the batch axis is, if it is not axis 0: one axis for all, or by glob over
            paths, None for tensors without one. See `traindiff explain batch-axis`.
        sample_order: Which samples of the global batch data-parallel ranks have, so that a recording of one process
            has them in the same places: `"blocks"` (the first ones on rank 0, the next on rank 1, ...) or
            `"interleaved"` (one each in turn, as `torch.utils.data.DistributedSampler` gives them).
        shards: Which part of a larger tensor plain ones hold on each rank, as `traindiff.shard` says it, where the
            engine does not tell: tensor parallelism by hand, attention on local heads, context parallelism. See
            `traindiff explain parallel`.
        operators: Globs over canonical paths of modules, e.g. `"transformer.h.3"`: every operator that runs inside
            these, and inside what they hold, is recorded in the steps that are, forward and backward: what it is given,
            what it returns, and the line of the source that called it. That slows these modules down many times over:
            choose `steps`, too. See `traindiff explain operators`.
        evaluation: Record forward passes without gradients too.
        strict: Raise errors of traindiff's own instead of going on without the part that failed.
        run_on_cpu: Copy tensors of other devices to the CPU, in parts of 4 MiB to 8 MiB, and summarize them there: for
            devices that no kernel computes on, and where there is no memory left on them. Each copy waits for the
            device.
        compact: Merge the ranks of a local recording, beside the training: True, or a number n to keep every n-th step
            rank by rank. The lowest recorded rank starts a process for it, which replaces the recording by its compact
            form when all ranks have closed it. See `traindiff explain scale`.
        per_node: Write one file for all ranks of a node, in place of a directory for each rank: for file systems to
            which many small files are a burden. A process of the node writes it. See `traindiff explain scale`.
        replica: Perturb the training within rounding, **on purpose**, so that comparing it with the
            training as it is measures how far apart correct runs are: `"ulp:SEED"` (every output of a
            module, its gradient and every parameter's gradient randomly rounded by one unit in the last
            place), `"reorder:SEED"` (sums added up in another order),
            `"channel:SEED"` (statistics of batches off by what one sum after the other is off) or
            `"float64"` (everything computed in it). The same seed makes the same replica.
            See `traindiff explain noise`.

    Returns:
        The running recording: a context manager with `log`, `close` and `step`.

    Raises:
        ConfigError: A setting is wrong, `select` matches nothing, `path` is taken or cannot be written, or a replica of
            a compiled model is asked for. Nothing was attached and nothing was written.
    """
    check_names(settings, known=("optimizer", "overwrite", "first_step", *SETTINGS))
    directory = recording_path(path)
    checked = record_settings(**settings)
    begins = checked_first_step(first_step)
    with out_of_sight():
        targets = find_targets(
            model, optimizer, select=checked.select, shards=checked.shards, operators=checked.operators
        )
    return recorder_of(directory, targets, checked, overwrite=overwrite, first_step=begins)


def recorder_of(
    directory: str, targets: Targets, settings: RecordSettings, *, overwrite: bool, first_step: int = 0
) -> Recorder:
    """Record targets that were looked up before, as `record` does.

    Args:
        directory: Directory to write.
        targets: What is observed.
        settings: What is recorded in which steps.
        overwrite: Replace a recording that is already there.
        first_step: Number of the first step, for a training that continues from a checkpoint.

    Raises:
        ConfigError: `directory` is taken, or a replica of a compiled model is asked for.
    """
    with out_of_sight():
        perturbed = None if settings.replica is None else make_replica(settings.replica, targets.root, targets.names)
    return Recorder(
        of_this_start(directory), targets, settings, overwrite=overwrite, replica=perturbed, first_step=first_step
    )  # fmt: skip
