"""What happened while a plan ran, expression by expression, beside what was predicted.

A plugin of the scheduler sees every task start and end; workers say what they fetched and how much memory they had.
Which expression a task is of is written on it::

    tasks ── join, aggregate ──▶ their expression
          ── repartition ──────▶ the expression that reads what was cut, or the delivery of results
          ── anything else ────▶ outside the plan
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from distributed import SchedulerPlugin

from dask_eindecomp.plan import PLANNED, Plan, readable_bytes, table

__all__ = ["Measured", "Spent", "measuring"]

DELIVERY, OUTSIDE = "delivery of results", "outside the plan"
PERIOD = 0.005
"""Seconds between looks at a worker's memory."""
DEPARTS = 1.25
"""Times as much, or as little, as predicted that is marked."""
FEW_BYTES, SHORT = 1 << 20, 0.05
"""Bytes and seconds of difference below which nothing is marked."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What one expression took, or was predicted to."""

    nbytes: int = 0
    """Shipped between workers."""
    messages: int = 0
    """Blocks and pieces shipped."""
    seconds: float = 0.0
    """The busiest worker fetched or computed for it."""
    tasks: int = 0
    """Run."""
    peak_nbytes: int = 0
    """Held by one worker at most meanwhile."""


@dataclass
class Measured:
    """A plan beside what happened; filled when the block of `measuring` is left.  ``print`` it for a table."""

    plan: Plan
    """What was predicted."""
    predicted: dict[str, Spent] = field(default_factory=dict)
    """By expression; those computed inside another's tasks are part of that."""
    happened: dict[str, Spent] = field(default_factory=dict)
    """By expression, and under the names of what is none."""
    seconds: float = 0.0
    """From the first task's start to the last one's end."""
    peak_nbytes: int = 0
    """Most that one worker held, above what it held as a process before."""
    titles: dict[str, str] = field(default_factory=dict)
    """The name a reader is shown, by expression."""

    @property
    def total(self) -> Spent:
        """All of it together."""
        spent = self.happened.values()
        return Spent(
            sum(one.nbytes for one in spent),
            sum(one.messages for one in spent),
            self.seconds,
            sum(one.tasks for one in spent),
            self.peak_nbytes,
        )

    @property
    def expected(self) -> Spent:
        """All that was predicted together; of a graph that is left to Dask as it came."""
        traffic, seconds = self.plan.traffic, self.plan.seconds
        if not self.applied and self.plan.baseline is not None and self.plan.baseline_seconds is not None:
            traffic, seconds = self.plan.baseline, self.plan.baseline_seconds
        return Spent(traffic.nbytes, traffic.messages, seconds, traffic.tasks, traffic.peak_nbytes)

    @property
    def applied(self) -> bool:
        """Whether the plan was to run."""
        return self.plan.verdict.startswith("applied")

    @property
    def summary(self) -> tuple[str, ...]:
        """The last line of the table, cell by cell."""
        return self._row("everything", self.total, self.expected)

    def __str__(self) -> str:
        """A table: measured of predicted, and where the two differ by more than a quarter."""
        names = list(dict.fromkeys([*self.predicted, *self.happened]))
        rows = [
            self._row(self.titles.get(name, name), self.happened.get(name), self.predicted.get(name))
            for name in names
        ]
        header = ("expression", "shipped", "messages", "seconds", "tasks", "peak", "departs")
        lines = table(header, [*rows, self._row("everything", self.total, self.expected)], {1, 2, 3, 4, 5})
        lines += ["", "measured / predicted"]
        if OUTSIDE in self.happened and len(self.happened) == 1:
            lines.append(f"no task of a plan ran; {self.plan.verdict or 'was the hook on?'}")
        return "\n".join(lines)

    def _row(self, title: str, found: Spent | None, predicted: Spent | None) -> tuple[str, ...]:
        found, known = found or Spent(), predicted is not None
        predicted = predicted or Spent()

        def pair(measured: str, expected: str) -> str:
            return f"{measured} / {expected if known else '-'}"

        return (
            title,
            pair(readable_bytes(found.nbytes), readable_bytes(predicted.nbytes)),
            pair(str(found.messages), str(predicted.messages)),
            pair(f"{found.seconds:.2f}", f"{predicted.seconds:.2f}"),
            pair(str(found.tasks), str(predicted.tasks)),
            pair(readable_bytes(found.peak_nbytes), readable_bytes(predicted.peak_nbytes)),
            ", ".join(_departures(found, predicted)) if known else "",
        )


def _departures(found: Spent, predicted: Spent) -> Iterator[str]:
    """Where the two differ by more than a quarter, and by how much.

    >>> list(_departures(Spent(nbytes=30 << 20, seconds=0.5), Spent(nbytes=10 << 20, seconds=0.49)))
    ['shipped x3.0']
    """
    for title, name, little in (
        ("shipped", "nbytes", FEW_BYTES),
        ("seconds", "seconds", SHORT),
        ("tasks", "tasks", 0),
        ("peak", "peak_nbytes", FEW_BYTES),
    ):
        measured, expected = getattr(found, name), getattr(predicted, name)
        if abs(measured - expected) > little:
            ratio = measured / expected if expected > 0 else float("inf")
            if not 1 / DEPARTS <= ratio <= DEPARTS:
                yield f"{title} x{ratio:.1f}"


@contextmanager
def measuring(client: Any, plan: Plan) -> Iterator[Measured]:
    """See what happens on a cluster until the block is left.

    Parameters
    ----------
    client
        A ``distributed.Client`` that waits for its results.
    plan
        What was predicted, as `explain` gives it.

    Raises
    ------
    TypeError
        If the client is asynchronous.
    """
    if client.asynchronous:
        raise TypeError("cannot measure through an asynchronous client; expected Client(asynchronous=False)")
    found = Measured(plan)
    name = f"eindecomp-measure-{uuid4().hex}"
    client.register_plugin(Recorder(), name=name)
    since = time.time()
    try:
        client.run(_begin, name)
        yield found
    finally:
        workers = client.run(_end, name, since)
        record = client.run_on_scheduler(_recorded, name)
        client.unregister_scheduler_plugin(name)
    _fill(found, record, workers)


# on the scheduler


@dataclass
class Record:
    """What a scheduler saw."""

    purposes: dict[Any, str] = field(default_factory=dict)
    """By key what a task does for a plan."""
    sources: dict[Any, tuple[Any, ...]] = field(default_factory=dict)
    """By key what a task reads."""
    runs: list[tuple[Any, str, tuple[Mapping[str, Any], ...]]] = field(default_factory=list)
    """Key, worker, and when it fetched and computed for it."""


class Recorder(SchedulerPlugin):  # type: ignore[misc]
    """Writes down which tasks there are and when they run."""

    def __init__(self) -> None:
        self.scheduler: Any = None
        self.record = Record()

    async def start(self, scheduler: Any) -> None:
        """Begin to watch a scheduler."""
        self.scheduler = scheduler

    def update_graph(self, scheduler: Any, **kwargs: Any) -> None:
        """Note what each new task does and reads."""
        for key in kwargs["tasks"]:
            task = scheduler.tasks[key]
            self.record.sources[key] = tuple(one.key for one in task.dependencies)
            if PLANNED in (task.annotations or ()):
                self.record.purposes[key] = task.annotations[PLANNED]

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Note a run."""
        if (start, finish) == ("processing", "memory") and kwargs.get("startstops"):
            self.record.runs.append((key, kwargs["worker"], tuple(kwargs["startstops"])))


def _recorded(name: str, dask_scheduler: Any) -> Record:
    """What a recorder of this name saw."""
    record: Record = dask_scheduler.plugins[name].record
    return record


# on a worker

SAMPLERS: dict[tuple[str, str], Sampler] = {}
"""Threads of this process by measurement and worker."""


class Sampler(threading.Thread):
    """Looks at the memory of this process again and again."""

    def __init__(self, ahead: float, idle: int) -> None:
        super().__init__(name="eindecomp-memory", daemon=True)
        self.remembered: int | None = None
        self.ahead, self.idle = ahead, idle
        """Seconds that the scheduler's clock is ahead, and bytes of the process without its data."""
        self.samples: list[tuple[float, int]] = []
        self.done = threading.Event()

    def run(self) -> None:
        """Until it is done."""
        from psutil import Process

        process = Process()
        while not self.done.wait(PERIOD):
            self.samples.append((time.time() + self.ahead, process.memory_info().rss))


@dataclass(frozen=True)
class Seen:
    """What one worker saw."""

    idle: int
    """Bytes of its process before, data not counted."""
    samples: list[tuple[float, int]]
    """When it had how many bytes."""
    fetched: list[dict[Any, int]]
    """What came from other workers, with its bytes."""


def _begin(name: str, dask_worker: Any) -> None:
    from psutil import Process

    _trim()
    held = sum(getattr(one, "nbytes", 0) for one in dask_worker.data.values())
    sampler = Sampler(dask_worker.scheduler_delay, Process().memory_info().rss - held)
    # Dask has workers remember so many transfers, or none; for now it is all of them
    sampler.remembered = dask_worker.transfer_incoming_log.maxlen
    dask_worker.transfer_incoming_log = deque(dask_worker.transfer_incoming_log)
    SAMPLERS[name, dask_worker.address] = sampler
    sampler.start()


def _end(name: str, since: float, dask_worker: Any) -> Seen | None:
    sampler = SAMPLERS.pop((name, dask_worker.address), None)
    if sampler is None:  # it came later
        return None
    sampler.done.set()
    sampler.join()
    every = dask_worker.transfer_incoming_log
    dask_worker.transfer_incoming_log = deque(every, sampler.remembered)
    fetched = [dict(one["keys"]) for one in every if one["stop"] >= since]
    return Seen(sampler.idle, sampler.samples, fetched)


def _trim() -> None:
    """Give freed memory back to the system, where that is glibc's to do."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


# put together


def _fill(found: Measured, record: Record, workers: Mapping[str, Seen | None]) -> None:
    """Share out what happened among the expressions."""
    inside = {choice.name: choice.inside for choice in found.plan.choices}
    root = {name: _root(name, inside) for name in inside}
    if found.applied:
        _predict(found, root)
    owners = _owners(record, root)
    tasks: dict[str, set[Any]] = defaultdict(set)
    spans: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for key, worker, steps in record.runs:
        owner = owners.get(key, OUTSIDE)
        tasks[owner].add(key)
        spans[owner][worker] += [(step["start"], step["stop"]) for step in steps]
    shipped = _shipped(record, owners, workers)
    every = [span for mine in spans.values() for several in mine.values() for span in several]
    if every:
        found.seconds = max(stop for _, stop in every) - min(start for start, _ in every)
    known = {worker: seen for worker, seen in workers.items() if seen is not None}
    found.peak_nbytes = max((_peak(seen) for seen in known.values()), default=0)
    for name in sorted(tasks.keys() | shipped.keys(), key=lambda one: (one not in root, one)):
        mine = spans[name]
        found.happened[name] = Spent(
            sum(shipped[name]),
            len(shipped[name]),
            max(map(_covered, mine.values()), default=0.0),
            len(tasks[name]),
            max((_peak(known[worker], when) for worker, when in mine.items() if worker in known), default=0),
        )


def _owners(record: Record, root: Mapping[str, str]) -> dict[Any, str]:
    """The expression that each task is for."""
    readers: dict[Any, list[Any]] = defaultdict(list)
    for key, sources in record.sources.items():
        for source in sources:
            readers[source].append(key)
    owners: dict[Any, str] = {}

    def owner(key: Any) -> str:
        if key not in owners:
            kind, _, name = record.purposes.get(key, "").partition(" ")
            if kind == "repartition":
                mine = [owner(one) for one in readers[key] if one in record.purposes]
                owners[key] = next((one for one in mine if one != OUTSIDE), DELIVERY)
            else:
                owners[key] = root.get(name, OUTSIDE)
        return owners[key]

    return {key: owner(key) for key in record.sources}


def _shipped(
    record: Record, owners: Mapping[Any, str], workers: Mapping[str, Seen | None]
) -> dict[str, list[int]]:
    """Bytes of every block and piece that was shipped, by the expression of the first task there that reads it."""
    ran: dict[Any, list[tuple[float, str]]] = defaultdict(list)
    for key, worker, steps in record.runs:
        for source in record.sources.get(key, ()):
            ran[source, worker].append((min(step["start"] for step in steps), owners.get(key, OUTSIDE)))
    found: dict[str, list[int]] = defaultdict(list)
    for worker, seen in workers.items():
        for keys in seen.fetched if seen else ():
            for key, nbytes in keys.items():
                _, owner = min(ran.get((key, worker), ()), default=(0.0, OUTSIDE))
                found[owner].append(nbytes)
    return found


def _root(name: str, inside: Mapping[str, str]) -> str:
    """The expression that has tasks of its own for one that may be computed inside others'."""
    while inside.get(name):
        name = inside[name]
    return name


def _predict(found: Measured, root: Mapping[str, str]) -> None:
    """What was predicted, those computed inside another's tasks added to it."""
    titles: dict[str, int] = defaultdict(int)
    for choice in found.plan.choices:
        name, traffic = root[choice.name], choice.traffic
        before = found.predicted.get(name, Spent())
        titles[name] += 1
        found.predicted[name] = Spent(
            before.nbytes + traffic.nbytes,
            before.messages + traffic.messages,
            before.seconds + choice.seconds,
            before.tasks + traffic.tasks,
            max(before.peak_nbytes, traffic.peak_nbytes),
        )
        if choice.name == name:
            found.titles[name] = choice.title or name
    for name, count in titles.items():
        if count > 1:
            found.titles[name] += f" and {count - 1} inside"
    if found.plan.delivery.tasks:
        delivery = found.plan.delivery
        found.predicted[DELIVERY] = Spent(
            delivery.nbytes,
            delivery.messages,
            found.plan.delivery_seconds,
            delivery.tasks,
            delivery.peak_nbytes,
        )


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of some spans goes on.

    >>> _covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


def _peak(seen: Seen, when: Iterable[tuple[float, float]] | None = None) -> int:
    """Most bytes that a worker held above idle, within spans of time if any are given."""
    spans = None if when is None else [*when]
    return max(
        (
            rss - seen.idle
            for at, rss in seen.samples
            if spans is None or any(start <= at <= stop for start, stop in spans)
        ),
        default=0,
    )
