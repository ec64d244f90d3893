"""The hook against plain Dask on worker processes, from a user's chunks: seconds, CPU seconds, tasks and bytes.

Inputs lie in the workers' memory.  Both ways run in turn, each problem several times; a line gives the medians of both,
and how many times as fast, as cheap in CPU seconds, tasks and bytes the planned way is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import dask
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


def run(client: Client, name: str, chunks: int, hook: EinDecomp | None) -> tuple[Spent, int]:
    """One run, and its tasks besides the inputs."""
    arrays = persisted(client, GALLERY[name], SHAPES[name], chunks_a_side=chunks)
    results = GALLERY[name].expression(**arrays)
    given = {key for one in arrays.values() for key in flatten(one.__dask_keys__())}
    with optimiser(hook):
        optimised = dask.optimize(*results)
        tasks = len({key for one in optimised for key in dict(one.__dask_graph__())} - given)
        del optimised
        nbytes, cpu = sent(client), sum(client.run(_cpu).values())
        started = time.perf_counter()
        held = dask.persist(*results)
        wait(held)
        took = time.perf_counter() - started
    spent = Spent(took, sum(client.run(_cpu).values()) - cpu, sent(client) - nbytes)
    del held, results, arrays
    client.run(lambda: None)  # the release has reached every worker
    return spent, tasks


def main() -> None:
    """Print a line for every problem and number of chunks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--chunks", nargs="+", type=int, default=[4], help="of each side")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with (
        LocalCluster(
            n_workers=options.workers, threads_per_worker=1, dashboard_address=None, env=ONE_THREAD
        ) as cluster,
        Client(cluster) as client,
    ):
        register(client)
        hook = EinDecomp(topology=calibrate(client))
        print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, {options.workers} workers")
        print(f"{'':16} {'':6} {'planned':^31} {'plain Dask':^31} times as fast")
        columns = f"{'seconds':>7} {'CPU s':>7} {'tasks':>7} {'MB':>7}"
        print(f"{'problem':16} chunks {columns} {columns} {'wall':>6} {'CPU':>6}")
        for name in options.problems:
            for chunks in options.chunks:
                found: dict[bool, list[Spent]] = {True: [], False: []}
                tasks = {}
                for _ in range(options.repeats):
                    for planned in (False, True):
                        spent, tasks[planned] = run(client, name, chunks, hook if planned else None)
                        found[planned].append(spent)
                wall, cpu, moved = (
                    {way: statistics.median(getattr(one, field) for one in found[way]) for way in found}
                    for field in ("seconds", "cpu", "nbytes")
                )
                cells = " ".join(
                    f"{wall[way]:7.2f} {cpu[way]:7.2f} {tasks[way]:7} {moved[way] / 1e6:7.1f}"
                    for way in (True, False)
                )
                print(
                    f"{name:16} {chunks:6} {cells} {wall[False] / wall[True]:6.2f} {cpu[False] / cpu[True]:6.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
