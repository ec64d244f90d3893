"""What it takes to hand a graph of 100,000 tasks to a scheduler of 64 workers: seconds and bytes, planned and plain.

The workers are paused, so nothing is computed.  The client's bytes are those of the message with the graph; its seconds
run until that is sent, the scheduler's until all tasks are known there: graph unpacked, planned, lowered and ordered.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import nullcontext

import dask
import dask.array as da
from dask.base import collections_to_expr
from distributed import Client, LocalCluster
from distributed.core import Status
from distributed.protocol.pickle import dumps

from dask_eindecomp import EinDecomp, register


def graph_nbytes(array: da.Array) -> int:
    """Of the message that takes an array's graph and its optimiser to the scheduler."""
    return len(dumps(collections_to_expr([array])))


def submitted(client: Client, cluster: LocalCluster, array: da.Array) -> tuple[float, float, int]:
    """Seconds of the client, then of the scheduler, and the tasks that it has to run."""
    scheduler = cluster.scheduler
    started = time.perf_counter()
    future = client.compute(array)
    sent = time.perf_counter() - started
    while future.key not in scheduler.tasks or scheduler._active_graph_updates:
        time.sleep(0.005)
    took, tasks = time.perf_counter() - started - sent, len(scheduler.tasks)
    future.release()
    while scheduler.tasks:
        time.sleep(0.01)
    return sent, took, tasks


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument(
        "--blocks", type=int, default=45, help="of each side; a product has their cube of tiles"
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    watching = {
        f"distributed.worker.memory.{what}": False for what in ("target", "spill", "pause", "terminate")
    }
    with (
        dask.config.set(watching),  # else a worker's memory decides whether it is paused
        LocalCluster(
            n_workers=options.workers,
            threads_per_worker=1,
            processes=False,
            memory_limit="8GiB",
            dashboard_address=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        register(client)
        for worker in cluster.workers.values():
            worker.status = Status.paused
        while cluster.scheduler.running:
            time.sleep(0.01)
        n = 1000 * options.blocks
        x, y = (da.random.default_rng(seed).random((n, n), chunks=1000) for seed in range(2))
        result = (x @ y).sum(axis=0)
        found: dict[bool, list[tuple[float, float, int]]] = {True: [], False: []}
        nbytes = {}
        for _ in range(options.repeats):
            for planned in (True, False):
                with dask.config.set(array_optimize=EinDecomp()) if planned else nullcontext():
                    nbytes[planned] = graph_nbytes(result)
                    found[planned].append(submitted(client, cluster, result))
        print(f"{'':12} {'client s':>9} {'scheduler s':>12} {'tasks':>8} {'message kB':>11}")
        for planned, title in ((True, "planned"), (False, "plain Dask")):
            client_seconds, seconds, tasks = map(statistics.median, zip(*found[planned]))
            print(
                f"{title:12} {client_seconds:9.3f} {seconds:12.2f} {tasks:8.0f} {nbytes[planned] / 1e3:11.1f}"
            )
        print(f"load after: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
