"""BLAS's own threads where several tasks run in one process.

BLAS cuts a product among all cores it finds.  Tasks beside each other would each do so: twice the threads that there are
cores for, waiting for each other in the middle of every product::

    one task  ──▶ BLAS takes every core        several tasks ──▶ each has its share of them
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Beside"]


class _Cores:
    """What BLAS may use of them, for as long as tasks run that share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._libraries: Any = None
        self._limits: Any = None

    @contextmanager
    def among(self, tasks: int) -> Iterator[None]:
        """BLAS takes its share for one of so many tasks, from however many threads this is entered."""
        with self._lock:
            if not self._running:
                _elsewhere(self._limit, tasks)
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running and self._limits is not None:
                    _elsewhere(self._limits.restore_original_limits)

    def _limit(self, tasks: int) -> None:
        """Give BLAS fewer threads, if threadpoolctl is installed."""
        try:
            from threadpoolctl import ThreadpoolController
        except ImportError:
            return
        if self._libraries is None:  # looked for once: that takes milliseconds
            self._libraries = ThreadpoolController().select(user_api="blas")
        most = max((library.num_threads for library in self._libraries.lib_controllers), default=1)
        self._limits = self._libraries.limit(limits=max(1, most // tasks))


def _elsewhere(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a thread that then ends.

    Threadpoolctl lets one thread alone set limits for as long as it lives, but tasks come from any.  Where that is one of
    the user's, nothing is changed.
    """
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


CORES = _Cores()


@dataclass(frozen=True, slots=True)
class Beside:
    """A kernel whose tiles run beside each other in one process, so many at once.

    >>> Beside(max, 2)([1, 3])
    3
    """

    kernel: Callable[..., Any]
    """What computes a tile."""
    tasks: int
    """How many run at once."""

    def __call__(self, *blocks: Any) -> Any:
        """Compute a tile with its share of the cores."""
        with CORES.among(self.tasks):
            return self.kernel(*blocks)
