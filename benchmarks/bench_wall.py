"""The hook against plain Dask from a user's chunks, on worker processes or on threads: seconds, CPU seconds, tasks, bytes.

Inputs lie in the workers' memory.  Both ways run in turn, each problem several times; a line gives the medians of both,
and how many times as fast, as cheap in CPU seconds, tasks and bytes the planned way is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import dask
import numpy as np
from dask.array.core import PerformanceWarning
from dask.core import flatten
from distributed import Client, LocalCluster, wait

from benchmarks.inputs import ONE_THREAD, persisted, sent
from benchmarks.problems import GALLERY
from dask_eindecomp import EinDecomp, calibrate, register

SHAPES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "square_product": {"A": (4000, 4000), "B": (4000, 4000)},
    "chain_square": {name: (1600, 1600) for name in "ABCDE"},
    "chain_skewed": {"A": (1600, 160), "B": (160, 1600), "C": (1600, 160), "D": (160, 16000), "E": (16000, 1600)},
    "ffnn_step": {"X": (2048, 1536), "Y": (2048, 384), "W1": (1536, 1536), "W2": (1536, 384)},
    "attention": {
        "x": (1024, 1024), "query": (1024, 16, 64), "key": (1024, 16, 64), "value": (1024, 16, 64),
        "output": (16, 64, 1024),
    },
    "mttkrp": {"X": (256, 256, 256), "B": (256, 32), "C": (256, 32)},
    "ttm_chain": {"X": (256, 256, 256), "A": (256, 32), "B": (256, 32), "C": (256, 32)},
    "abcd": {name: (1600, 1600) for name in "ABC"},
}  # fmt: skip
"""Of the problems that are run if none is named; others have their medium size."""


@dataclass(frozen=True)
class Spent:
    """What one run took."""

    seconds: float
    cpu: float
    """Seconds of all workers' processors."""
    nbytes: int
    """Sent between workers."""


def optimiser(hook: EinDecomp | None) -> AbstractContextManager[Any]:
    """Dask with the hook; without one its own optimiser."""
    return nullcontext() if hook is None else dask.config.set(array_optimize=hook)


def _cpu() -> float:
    return time.process_time()


def shapes(name: str) -> Mapping[str, tuple[int, ...]]:
    """Of the inputs of a problem."""
    return SHAPES[name] if name in SHAPES else GALLERY[name].input_shapes("medium")


def run(client: Client | None, name: str, chunks: int, hook: EinDecomp | None) -> tuple[Spent, int]:
    """One run, and its tasks besides the inputs."""
    problem = GALLERY[name]
    if client is None:
        lazy = problem.dask_inputs(arrays_of(name), chunks)
        arrays = dict(zip(lazy, dask.persist(*lazy.values())))
    else:
        arrays = persisted(client, problem, shapes(name), chunks_a_side=chunks)
    results = problem.expression(**arrays)
    given = {key for one in arrays.values() for key in flatten(one.__dask_keys__())}
    with optimiser(hook):
        optimised = dask.optimize(*results)
        tasks = len({key for one in optimised for key in dict(one.__dask_graph__())} - given)
        del optimised
        nbytes, cpu = meters(client)
        started = time.perf_counter()
        held = dask.persist(*results)
        if client is not None:
            wait(held)
        took = time.perf_counter() - started
    after = meters(client)
    del held, results, arrays
    if client is not None:
        client.run(lambda: None)  # the release has reached every worker
    return Spent(took, after[1] - cpu, after[0] - nbytes), tasks


@cache
def arrays_of(name: str) -> dict[str, Any]:
    """Inputs for the threads of this process."""
    random = np.random.default_rng(0)
    weights = GALLERY[name].weights
    return {
        one: random.normal(scale=shape[0] ** -0.5 if one in weights else 1, size=shape)
        for one, shape in shapes(name).items()
    }


def meters(client: Client | None) -> tuple[int, float]:
    """Bytes sent between workers and their CPU seconds so far."""
    if client is None:
        return 0, _cpu()
    return sent(client), sum(client.run(_cpu).values())


@contextmanager
def machines(workers: int, threads: int) -> Iterator[tuple[Client | None, EinDecomp]]:
    """A cluster of processes and the hook as it was measured for them, or threads of this process and the hook as it is."""
    if threads:
        with dask.config.set(scheduler="threads", num_workers=threads):
            yield None, EinDecomp()
        return
    options: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": None, "env": ONE_THREAD}
    with LocalCluster(n_workers=workers, **options) as cluster, Client(cluster) as client:
        register(client)
        yield client, EinDecomp(topology=calibrate(client))


def main() -> None:
    """Print a line for every problem and number of chunks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", choices=tuple(GALLERY), default=tuple(SHAPES))
    parser.add_argument("--chunks", nargs="+", type=int, default=[4], help="of each side")
    parser.add_argument("--workers", nargs="+", type=int, default=[4], help="processes of one thread")
    parser.add_argument("--threads", type=int, default=0, help="of this process, instead of workers")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Increasing number of chunks", PerformanceWarning)
    print(f"{'':19} {'':6} {'planned':^31} {'plain Dask':^31} times as fast")
    columns = f"{'seconds':>7} {'CPU s':>7} {'tasks':>7} {'MB':>7}"
    print(f"on {'problem':16} chunks {columns} {columns} {'wall':>6} {'CPU':>6}")
    for workers in options.workers:
        with machines(workers, options.threads) as (client, hook):
            for name in options.problems:
                for chunks in options.chunks:
                    found = compared(client, hook, name, chunks, options.repeats)
                    print(f"{options.threads or workers:2} {name:16} {chunks:6} {found}", flush=True)
    print(f"load after: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")


def compared(client: Client | None, hook: EinDecomp, name: str, chunks: int, repeats: int) -> str:
    """The medians of both ways, and how many times as fast the planned one is."""
    found: dict[bool, list[Spent]] = {True: [], False: []}
    tasks = {}
    for _ in range(repeats):
        for planned in (False, True):
            spent, tasks[planned] = run(client, name, chunks, hook if planned else None)
            found[planned].append(spent)
    wall, cpu, moved = (
        {way: statistics.median(getattr(one, field) for one in found[way]) for way in found}
        for field in ("seconds", "cpu", "nbytes")
    )
    cells = " ".join(
        f"{wall[way]:7.2f} {cpu[way]:7.2f} {tasks[way]:7} {moved[way] / 1e6:7.1f}" for way in (True, False)
    )
    return f"{cells} {wall[False] / wall[True]:6.2f} {cpu[False] / cpu[True]:6.2f}"


if __name__ == "__main__":
    main()
