"""The machines, and what a step of a plan costs on them in seconds.

What counts is the busiest worker: tiles that do not divide by the workers wait for the one that has one more, and
bytes arrive at no more workers than there are tiles to receive them.  Threads of one process share their memory, so
nothing travels between their tasks, but what is copied takes memory bandwidth.  Several hosts are two levels: a byte
from the same host comes over the inner link, any other over the outer one.

The formulas take arrays of candidates as well as single figures.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from dask_eindecomp.cost import Traffic

__all__ = ["Topology", "TopologyError", "host_of"]

KERNEL_RATES = {"blas": 1.0, "loop": 0.08, "stream": 0.2}
"""Joins a second as a share of the multiply-adds a second of BLAS, memory traffic not counted.  ``einsum`` without
BLAS took 12 times as long as BLAS on a 4000 cubed product."""

PASSES = 3
"""Times that a byte which a tile handles goes through memory.  What is new is zeroed by the system, written, and read
again to be sent or used.  Over 155 random plans of five problems a pass for each byte was far too little, three fitted."""

SPEEDS = (("complex128", 0.25), ("complex64", 0.5), ("float16", 1.0), ("float32", 2.0), ("float64", 1.0))
"""Multiply-adds a second of BLAS by element type, double precision being 1."""


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
        If there is no worker or thread, there are more hosts than workers, or a figure is not positive.
    """

    workers: int = 1
    """Worker processes."""
    threads: int = 1
    """Threads of each worker."""
    memory: int = 4 << 30
    """Bytes each worker may use."""
    bandwidth: float = 4e8
    """Bytes a second into one worker, all of them receiving; from another host if there are several."""
    latency: float = 2e-3
    """Seconds that a message takes besides its bytes; from another host if there are several."""
    flops: float = 8e9
    """Multiply-adds a second of one thread alone, on large tiles in double precision."""
    task_overhead: float = 1e-3
    """Seconds a task costs its scheduler."""
    turn: float = 4e-3
    """Seconds until tasks begin that read what others have just made: once for each round of tiles."""
    addresses: tuple[str, ...] = ()
    """Where the workers are, if they are known."""
    shares: tuple[int, ...] = ()
    """Threads of each worker where they differ; `threads` is then their mean."""
    hosts: int = 1
    """Machines that the workers are spread over evenly."""
    local_bandwidth: float | None = None
    """Bytes a second into one worker from its own host, where there are several; None for `bandwidth`."""
    local_latency: float | None = None
    """Seconds that a message from the same host takes besides its bytes; None for `latency`."""
    memory_bandwidth: float = 8e9
    """Bytes a second that one thread alone reads and writes."""
    contention: float = 1.0
    """How many times as long a thread takes when all threads of all workers are busy."""
    small_tile: int = 1 << 19
    """Multiply-adds of a tile at which BLAS reaches half its speed."""
    speeds: tuple[tuple[str, float], ...] = SPEEDS
    """Multiply-adds a second of BLAS by element type, double precision being 1."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("threads", 1), ("memory", 1), ("hosts", 1), ("small_tile", 0)):
            if not getattr(self, name) >= least:
                raise TopologyError(f"topology has {getattr(self, name)} {name}; expected at least {least}")
        if self.shares and (len(self.shares) != self.workers or min(self.shares) < 1):
            raise TopologyError(
                f"topology has shares {self.shares} for {self.workers} workers; expected a positive number for each"
            )
        if self.hosts > self.workers:
            raise TopologyError(
                f"topology has {self.hosts} hosts for {self.workers} workers; expected no more hosts than workers"
            )
        for name in ("bandwidth", "flops", "memory_bandwidth", "local_bandwidth"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise TopologyError(f"topology has a {name} of {value}; expected more than 0")
        for name in ("latency", "task_overhead", "turn", "local_latency"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise TopologyError(f"topology has a {name} of {value}; expected 0 or more")
        if not self.contention >= 1:
            raise TopologyError(f"topology has a contention of {self.contention}; expected 1 or more")
        for dtype, speed in self.speeds:
            if not speed > 0:
                raise TopologyError(f"topology has a speed of {speed} for {dtype}; expected more than 0")

    @classmethod
    def of_threads(cls, threads: int) -> Topology:
        """One process with so many threads: nothing travels, tasks are cheap.

        >>> Topology.of_threads(8).workers
        1
        """
        return cls(
            workers=1,
            threads=max(threads, 1),
            bandwidth=5e9,
            latency=0.0,
            task_overhead=1.5e-4,
            turn=2e-4,
        )

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """The topology that `to_json` wrote.

        Raises
        ------
        TopologyError
            If the text is no JSON object, names a figure that a topology has not, or gives one of another type.
        """
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise TopologyError(f"no JSON: {error}; expected what Topology.to_json writes") from error
        if not isinstance(record, dict):
            raise TopologyError(f"a topology is no {type(record).__name__}; expected a JSON object")
        known = {item.name: getattr(cls(), item.name) for item in fields(cls)}
        for name, value in record.items():
            if name not in known:
                raise TopologyError(
                    f"unknown figure {name!r} of a topology; expected one of {', '.join(known)}"
                )
            if not _is_like(value, known[name]):
                raise TopologyError(
                    f"topology has {value!r} for {name}; expected something like {known[name]!r}"
                )
        if "speeds" in record:
            record["speeds"] = tuple(sorted(record["speeds"].items()))
        for name in ("addresses", "shares"):
            if name in record:
                record[name] = tuple(record[name])
        return cls(**record)

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """The topology of a file that holds what `to_json` writes.

        Raises
        ------
        TopologyError
            If there is no such file, or it holds something else; the path is named.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except (OSError, TopologyError) as error:
            raise TopologyError(f"cannot read a topology from {path}: {error}") from error

    def to_json(self) -> str:
        """All figures as JSON text."""
        record = {item.name: getattr(self, item.name) for item in fields(self)}
        return json.dumps(record | {"speeds": dict(self.speeds)}, indent=2)

    @property
    def slots(self) -> int:
        """Tasks that run at one time."""
        return sum(self.shares) or self.workers * self.threads

    @property
    def per_host(self) -> int:
        """Workers of the fullest host."""
        return -(-self.workers // self.hosts)

    def speed(self, dtype: str) -> float:
        """Multiply-adds a second of BLAS in this type, double precision being 1; other types as doubles."""
        return dict(self.speeds).get(dtype, 1.0)

    def slowdown(self, tiles: Any) -> Any:
        """How many times as long a thread takes while so many tiles are computed at once.

        >>> busy = Topology(workers=4, contention=2.0)
        >>> float(busy.slowdown(4)), float(busy.slowdown(1))
        (2.0, 1.0)
        """
        return np.maximum(np.minimum(tiles, self.slots) * (self.contention / self.slots), 1.0)

    def compute_seconds(
        self, flops: Any, nbytes: Any, tiles: Any, kernel: str, dtype: str = "float64"
    ) -> Any:
        """Seconds of the busiest worker to compute ``tiles`` equal tiles.

        Parameters
        ----------
        flops
            Joins of all tiles together.
        nbytes
            Bytes that all tiles together read and write.
        tiles
            How many there are.
        kernel
            ``"blas"``, ``"loop"`` or ``"stream"``.
        dtype
            Element type of the result.
        """
        rate = self.flops * KERNEL_RATES[kernel] * (self.speed(dtype) if kernel == "blas" else 1.0)
        started = self.small_tile if kernel == "blas" else 0
        each = (flops / tiles + started) / rate + PASSES * nbytes / tiles / self.memory_bandwidth
        rounds = -(-tiles // self.slots)
        return rounds * each * self.slowdown(tiles)

    def turn_seconds(self, tiles: Any) -> Any:
        """Seconds that ``tiles`` tiles wait for what they read to be announced, a round at a time.

        >>> Topology(workers=4, turn=0.5).turn_seconds(5)
        1.0
        """
        return -(-tiles // self.slots) * self.turn

    def copy_seconds(self, nbytes: Any, tiles: Any) -> Any:
        """Seconds to read and write ``nbytes`` bytes, shared by the workers of ``tiles`` tiles."""
        at_once = np.minimum(tiles, self.slots)
        return 2 * PASSES * nbytes / at_once / self.memory_bandwidth * self.slowdown(tiles)

    def move_seconds(self, traffic: Traffic, receivers: Any = None, senders: Any = None) -> Any:
        """Seconds of the busiest worker to receive its share, and of the scheduler to run the tasks.

        ``receivers`` is how many tiles wait for the bytes; no more than so many workers share them.  The first message
        of each is part of its task.  ``senders`` is from how many blocks they come; as many as receivers by default.
        """
        seconds = traffic.tasks * self.task_overhead
        if self.workers == 1:
            return seconds
        sharing = self.workers if receivers is None else np.minimum(receivers, self.workers)
        sharing = sharing if senders is None else np.minimum(sharing, senders)
        # bandwidth is what one gets while all receive; where threads share cores, fewer get more
        crowd = self.slowdown(sharing * self.threads) / self.contention
        inner = (self.bandwidth if self.local_bandwidth is None else self.local_bandwidth) / crowd
        bandwidth, latency = self.bandwidth / crowd, self.latency
        if self.hosts == 1:
            seconds = seconds + traffic.nbytes / sharing / bandwidth
        else:
            seconds = seconds + (traffic.nbytes - traffic.crossing) / sharing / inner
            seconds = seconds + traffic.crossing / sharing / bandwidth
            if self.local_latency is not None:
                outside = traffic.crossing / np.maximum(traffic.nbytes, 1)
                latency = self.latency * outside + self.local_latency * (1 - outside)
        # what one worker has for a task comes in one message, and the first is measured as part of the task's overhead
        tiles = sharing if receivers is None else receivers
        further = np.maximum(np.minimum(traffic.messages, tiles * (self.workers - 1)) - tiles, 0)
        return seconds + np.ceil(further / sharing) * latency


def host_of(address: str) -> str:
    """The machine of a worker's address.

    >>> host_of("tcp://10.0.0.7:40331"), host_of("tls://[fe80::1]:8786"), host_of("inproc://10.0.0.7/4242/1")
    ('10.0.0.7', 'fe80::1', '10.0.0.7')
    """
    place = address.rpartition("://")[2].partition("/")[0]
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.partition(":")[0]


def _is_like(value: Any, example: Any) -> bool:
    """Whether a value read from JSON is of the type of a figure's default."""
    if isinstance(example, tuple):
        return isinstance(value, dict if example and isinstance(example[0], tuple) else list)
    if isinstance(value, bool):
        return False
    if example is None:
        return value is None or isinstance(value, (int, float))
    return isinstance(value, int if isinstance(example, int) else (int, float))
