"""Squared distances of many points: memory, time against plain Dask's broadcasting, and accuracy far from the origin.

Prints what a worker holds at most above idle beside one and a half times the inputs and its share of the result, then
seconds at the largest size that broadcasting finishes, alternating, then the largest relative error near and far.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask.array.optimization import optimize as dask_optimize
from distributed import Client, LocalCluster, futures_of, wait

from benchmarks.bench_memory import peak, start_of_peak, trim
from dask_eindecomp import eindecomp, einsum, register


def points(count: int, depth: int, seed: int, offset: float = 0) -> np.ndarray:
    """Normally distributed points in single precision, moved away from the origin."""
    return (np.random.default_rng(seed).normal(size=(count, depth)) + offset).astype(np.float32)


def lazy(count: int, depth: int, pieces: int, seed: int, offset: float = 0) -> Any:
    """The same as a Dask array on the workers."""
    array = da.from_array(points(count, depth, seed, offset), chunks=(-(-count // pieces), depth)).persist()
    wait(array)
    return array


def broadcast(x: Any, y: Any) -> Any:
    """What a user writes without ``einsum``."""
    return ((x[:, None] - y[None]) ** 2).sum(axis=-1)


def distances(x: Any, y: Any) -> Any:
    """The same as one expression."""
    return einsum("ik,jk->ij", x, y, join="squared_difference")


def seconds(make: Any, x: Any, y: Any, hook: Any) -> float:
    """Wall time of one computation whose result stays on the workers."""
    with dask.config.set(array_optimize=hook):
        started = time.perf_counter()
        result = make(x, y).persist()
        wait(result)
        took = time.perf_counter() - started
    return took if all(future.status == "finished" for future in futures_of(result)) else float("inf")


def main() -> None:
    """Measure memory, time and error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--against", type=int, default=12_000, help="points where broadcasting is timed")
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--pieces", type=int, default=8, help="chunks of each set of points")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    blas = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, env=blas) as cluster,
        Client(cluster) as client,
    ):
        register(client)  # planned and plain runs have keys in common
        small = lazy(200, options.depth, 2, 3)
        seconds(distances, small, small, eindecomp)  # imports
        client.run(trim)
        idle = client.run(start_of_peak)
        x, y = (lazy(options.points, options.depth, options.pieces, seed) for seed in (1, 2))
        took = seconds(distances, x, y, eindecomp)
        peaks = client.run(peak)
        most = max(peaks[address] - idle[address] for address in idle)
        share = options.points**2 * 4 // 2
        allowed = 1.5 * (x.nbytes + y.nbytes + share)
        print(
            f"{options.points:,} x {options.points:,} x {options.depth} in {took:.1f} s: "
            f"{most / 1e6:.0f} MB above idle on a worker, {1.5 * most / allowed:.2f} of inputs and its share of the "
            f"result together ({allowed / 1.5e6:.0f} MB)"
        )
        x, y = (lazy(options.against, options.depth, options.pieces, seed) for seed in (4, 5))
        ways = [(broadcast, dask_optimize), (distances, eindecomp), (distances, dask_optimize)]
        took_each: list[list[float]] = [[], [], []]
        for turn in range(options.repeats):
            for number in range(3):  # another one goes first each time: it finds the memory of the last
                way = (turn + number) % 3
                took_each[way].append(seconds(ways[way][0], x, y, ways[way][1]))
        base, ours, without = map(statistics.median, took_each)
        print(
            f"{options.against:,} x {options.against:,} x {options.depth}: broadcasting {base:.2f} s, planned "
            f"{ours:.2f} s ({base / ours:.1f} times as fast), without a plan {without:.2f} s ({base / without:.1f} times)"
        )
        for offset in (0, 1e4):
            x, y = (lazy(2000, options.depth, options.pieces, seed, offset) for seed in (6, 7))
            found = distances(x, y).compute()
            a, b = (points(2000, options.depth, seed, offset).astype(float) for seed in (6, 7))
            exact = ((a[:, None] - b[None]) ** 2).sum(axis=-1)
            print(f"offset {offset:g}: largest relative error {(abs(found - exact) / exact).max():.1e}")


if __name__ == "__main__":
    main()
