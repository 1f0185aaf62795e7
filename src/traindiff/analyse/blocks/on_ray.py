"""Tasks of a Ray cluster: the one that Ray's own settings name, or one on this machine."""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from traindiff.errors import ConfigError, Problem, WorkerError

MOST_RETRIES = 3

_TIMEOUT = 10.0
"""Seconds that a cluster has to accept a connection. Ray itself would try for minutes, and say nothing."""


class RayTasks:
    """Runs functions as tasks of Ray. To be used in a `with` statement.

    A cluster that the process is connected to is used. Otherwise `ray.init()` finds one: that of the variable
    `RAY_ADDRESS`, one that runs on this machine, or a new one, which ends with the `with` statement.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self) -> None:
        try:
            import ray
        except ImportError:
            fix = "Run pip install 'traindiff[ray]' where traindiff is installed."
            problem = Problem(where='workers="ray"', what="needs Ray, which is not installed.", fix=fix)
            raise ConfigError("workers", [problem], consequence="nothing was read") from None
        self._ray: Any = ray

    @property
    def size(self) -> int:
        """Number of tasks that run at a time: of CPUs of the cluster."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def __enter__(self) -> RayTasks:
        self._began = not self._ray.is_initialized()
        if self._began:
            try:
                _find_cluster(os.environ.get("RAY_ADDRESS", ""))
                self._ray.init(log_to_driver=False, logging_level=logging.WARNING)
            except (OSError, RuntimeError, ValueError) as error:
                fix = "See that RAY_ADDRESS names a cluster that runs, or unset it to use this machine."
                what = f"reaches no cluster ({' '.join(str(error).split())[:300]})."
                problem = Problem(where='workers="ray"', what=what, fix=fix)
                raise ConfigError("workers", [problem], consequence="nothing was read") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._began:
            self._ray.shutdown()

    def ordered(
        self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, task_bytes: int
    ) -> Iterator[Any]:
        """See `traindiff.analyse.blocks.tasks.Tasks`."""
        task = self._ray.remote(num_cpus=1, memory=task_bytes, max_retries=MOST_RETRIES)(function)
        waiting: deque[Any] = deque()
        remaining, most = iter(calls), self.size
        while True:
            while len(waiting) <= most and (call := next(remaining, None)) is not None:
                waiting.append(task.remote(*call))
            if not waiting:
                return
            result = self._result(waiting.popleft())
            yield result
            del result

    def _result(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            message = " ".join(str(error).split())[:300]
            raise WorkerError(f"A task of Ray failed {MOST_RETRIES + 1} times: {message}") from None


def _find_cluster(address: str) -> None:
    """Connect to a cluster for a moment, if its address names a host and a port.

    Args:
        address: As Ray takes it: `HOST:PORT`, `ray://HOST:PORT`, `auto`, `local`, or another kind of cluster.

    Raises:
        OSError: Nothing answers there.
        ValueError: The port is no number.
    """
    scheme, _, rest = address.rpartition("://")
    place = urlsplit(f"//{rest}")
    if scheme in ("", "ray") and place.hostname and place.port:
        socket.create_connection((place.hostname, place.port), timeout=_TIMEOUT).close()
