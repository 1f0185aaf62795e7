"""What processes of tests have imported and built before they are forked; see `pytest_collection_finish` in conftest.

A rank starts from a server that has imported torch. What it does first, importing traindiff and building the kernel,
takes a second in each of them; a server that has imported this module spares them that.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module

os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a thread that importing pyarrow would start

_IMPORTED = (
    "torch",
    "torch._dynamo",
    "numpy.ma",
    "numpy.typing",
    "pyarrow.ipc",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch.profiler._cupti_monitor",
    "torch.utils._sympy.functions",
    "torch.utils.checkpoint",
    "traindiff.analyse.compare",
    "traindiff.cli.commands",
    "traindiff.core.kernels.cpu.summarize",
    "traindiff.observe.torch.session.record",
    "traindiff.run.lockstep",
    "traindiff.run.processes.rank_process",
    "traindiff.run.script.follower",
    "traindiff.run.script.run",
    "traindiff.run.verify",
)
_BUILT = ("float32", "float64", "bfloat16", "int64", "uint8")

for _name in _IMPORTED:
    with suppress(ImportError):  # of another version of torch
        import_module(_name)
with suppress(ImportError):  # llvmlite is not installed
    from traindiff.core.kernels.cpu.module import add, frame

    frame()
    for _name in _BUILT:
        add(_name)
