"""The machines, and what a step of a plan costs on them in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from dask_eindecomp.cost import Traffic

__all__ = ["Topology", "TopologyError"]

KERNEL_RATES = {"blas": 1.0, "loop": 0.08, "stream": 0.05}
"""Speed of a kernel as a share of the multiply-adds a second that BLAS reaches on large tiles.  ``einsum`` without
BLAS took 12 times as long as BLAS on a 4000 cubed product; elementwise kernels are bound by memory."""

SMALL_TILE = 1 << 19
"""Multiply-adds of a tile at which BLAS reaches half its speed."""


class TopologyError(ValueError):
    """Machines that cannot be."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The workers a plan is made for.

    >>> Topology(workers=4).slots
    4

    Raises
    ------
    TopologyError
        If there is no worker or thread, or a figure is not positive.
    """

    workers: int = 1
    """Worker processes."""
    threads: int = 1
    """Threads of each worker."""
    memory: int = 4 << 30
    """Bytes each worker may use."""
    bandwidth: float = 4e8
    """Bytes a second into one worker."""
    latency: float = 2e-3
    """Seconds before the first byte of a message."""
    flops: float = 8e9
    """Multiply-adds a second of one thread on large tiles in double precision."""
    task_overhead: float = 1e-3
    """Seconds a task costs its scheduler."""
    addresses: tuple[str, ...] = ()
    """Where the workers are, if they are known."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("threads", 1), ("memory", 1)):
            if getattr(self, name) < least:
                raise TopologyError(f"topology has {getattr(self, name)} {name}; expected at least {least}")
        for name in ("bandwidth", "flops"):
            if not getattr(self, name) > 0:
                raise TopologyError(f"topology has a {name} of {getattr(self, name)}; expected more than 0")
        for name in ("latency", "task_overhead"):
            if not getattr(self, name) >= 0:
                raise TopologyError(f"topology has a {name} of {getattr(self, name)}; expected 0 or more")

    @classmethod
    def of_threads(cls, threads: int) -> Topology:
        """One process with so many threads: nothing travels, tasks are cheap.

        >>> Topology.of_threads(8).workers
        1
        """
        return cls(workers=1, threads=max(threads, 1), bandwidth=5e9, latency=0.0, task_overhead=1.5e-4)

    @property
    def slots(self) -> int:
        """Tasks that run at one time."""
        return self.workers * self.threads

    def compute_seconds(self, flops: int, tiles: int, kernel: str, itemsize: int = 8) -> float:
        """Seconds of the busiest worker to compute ``tiles`` equal tiles of ``flops`` joins together."""
        if not flops:
            return 0.0
        each = flops / tiles
        rounds = -(-tiles // self.slots)
        rate = self.flops * KERNEL_RATES[kernel]
        if kernel == "blas":
            rate *= (each / (each + SMALL_TILE)) * (8 / max(min(itemsize, 16), 4))
        return rounds * each / rate

    def move_seconds(self, traffic: Traffic) -> float:
        """Seconds of the busiest worker to receive its share, and of the scheduler to run the tasks."""
        seconds = traffic.tasks * self.task_overhead
        if self.workers > 1:
            share = -(-traffic.messages // self.workers)
            seconds += traffic.nbytes / self.workers / self.bandwidth + share * self.latency
        return seconds
