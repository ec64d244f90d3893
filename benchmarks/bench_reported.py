"""The cases of ``tests/reported.py``, plain Dask against the hook: right or wrong, tasks, bytes, memory.

Everything is counted while it runs on one thread.  Tasks are those that run besides the inputs, which lie in memory.
Bytes are those of every result of a task that another task reads, once for each reader.  The peak is of results that
are held at a time, each as if it shared no memory with another, inputs not counted.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import dask
from dask.callbacks import Callback
from dask.sizeof import sizeof

from dask_eindecomp import EinDecomp, Topology
from tests.reported import GALLERY, Case, lacking, wrong

MACHINES = Topology(workers=4)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a computation took.

    >>> Counts(1, 8, 8) + Counts(2, 0, 16)
    Counts(tasks=3, nbytes=8, peak_nbytes=24)
    """

    tasks: int = 0
    """Tasks that ran."""
    nbytes: int = 0
    """Bytes over the edges between them."""
    peak_nbytes: int = 0
    """Bytes of results held at a time."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class Tried:
    """How a case came out."""

    problem: str
    """What is wrong; empty if nothing is."""
    counts: Counts
    """What it took; nothing if it raised."""


class Counter(Callback):
    """Counts what the tasks of a local scheduler give, keep and read."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = self.nbytes = self.peak_nbytes = self._held = 0
        self._sizes: dict[Any, int] = {}

    def _posttask(self, key: Any, result: Any, dsk: Any, state: Any, worker: Any) -> None:
        size = self._sizes[key] = sizeof(result)
        self.tasks += 1
        self.nbytes += size * len(state["dependents"][key])
        self._held += size
        self.peak_nbytes = max(self.peak_nbytes, self._held)
        # a key that is read by tasks alone is released after the last of them; inputs have no size here
        for read in state["dependencies"][key] & state["released"]:
            self._held -= self._sizes.pop(read, 0)


def counted(collections: tuple[Any, ...]) -> tuple[tuple[Any, ...], Counts]:
    """What collections hold, computed together, and what that took."""
    with Counter() as counter:
        results = dask.compute(*collections, scheduler="synchronous")
    return results, Counts(counter.tasks, counter.nbytes, counter.peak_nbytes)


def tried(name: str, hook: EinDecomp | None) -> tuple[Case, Tried]:
    """A case made and computed by the plans of a hook, or by plain Dask."""
    with dask.config.set({"eindecomp.strict": True} | ({} if hook is None else {"array_optimize": hook})):
        case = GALLERY[name]()
        try:
            results, counts = counted(case.collections)
        except Exception as error:
            as_expected = case.raises is not None and isinstance(error, case.raises)
            return case, Tried("" if as_expected else f"raises {type(error).__name__}", Counts())
        return case, Tried("nothing raised" if case.raises else wrong(case, results), counts)


def hook_for(case: Case, machines: Topology = MACHINES) -> EinDecomp:
    """The hook that applies every plan, told what the case asks for."""
    return EinDecomp(**{"topology": machines, "force": True, "planning_timeout": 60.0, **case.settings})


def line(title: str, right: tuple[Any, Any], counts: Iterable[Counts | None]) -> str:
    """Of the table: tasks, kB over edges and kB held, each by plain Dask, by the hook and written better."""
    cells = [
        "" if one is None else f"{getattr(one, item.name) / unit:,.{digits}f}"
        for item, unit, digits in zip(fields(Counts), (1, 1e3, 1e3), (0, 1, 1))
        for one in counts
    ]
    return " ".join([f"{title:30}", *(f"{one:>5}" for one in right), *(f"{cell:>9}" for cell in cells)])


def report(names: Sequence[str]) -> int:
    """Print the table; how many cases the hook has wrong or with more tasks or bytes than what is better."""
    print(f"{'':42} {'tasks':29} {'kB over edges':29} kB held at a time")
    print(f"{'':30} plain  hook", *[f"{column:>9}" for column in ("plain", "hook", "better")] * 3)
    rows, faults = [], []
    for name in names:
        if missing := lacking(name):
            print(f"{name:30} needs {', '.join(missing)}")
            continue
        case, plain = tried(name, None)
        planned = tried(name, hook_for(case))[1]
        better = counted(case.better)[1] if case.better else None
        rows.append((plain, planned, better))
        right = tuple("wrong" if one.problem else "right" for one in (plain, planned))
        print(line(name, right, (plain.counts, planned.counts, better)))
        if planned.problem:
            faults.append(f"{name}: {planned.problem}")
        if better and (planned.counts.tasks > better.tasks or planned.counts.nbytes > better.nbytes):
            faults.append(f"{name}: {planned.counts} is beyond {better}")
    barred = [row for row in rows if row[2]]
    for title, some in ((f"{len(barred)} with a better way", barred), (f"all {len(rows)}", rows)):
        right = tuple(sum(not row[column].problem for row in some) for column in (0, 1))
        sums = [sum((row[column].counts for row in some), Counts()) for column in (0, 1)]
        best = sum((row[2] for row in some), Counts()) if some is barred else None
        print(line(title, right, (*sums, best)))
    for fault in faults:
        print(fault, file=sys.stderr)
    return len(faults)


def main() -> None:
    """Print the table; the exit status is 1 if the hook is wrong or beyond what is better."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=GALLERY, default=[*GALLERY])
    warnings.simplefilter("ignore")
    sys.exit(report(parser.parse_args().cases) > 0)


if __name__ == "__main__":
    main()
