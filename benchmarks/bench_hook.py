"""The hook against plain Dask on worker processes: seconds and tasks, alternating in one run.

Prints one line a problem: medians with their least and most, the ratio, and the tasks besides the inputs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import dask
import dask.array as da
from distributed import Client, LocalCluster, wait

from dask_eindecomp import EinDecomp


def optimiser(hook: EinDecomp | None) -> AbstractContextManager[Any]:
    """Dask with the hook; without one its own optimiser (None in the config would turn that off)."""
    return nullcontext() if hook is None else dask.config.set(array_optimize=hook)


def tasks(array: da.Array, hook: EinDecomp | None) -> int:
    """Tasks of the optimised graph besides those of persisted inputs."""
    with optimiser(hook):
        (optimised,) = dask.optimize(array)
    graph = dict(optimised.__dask_graph__())
    inputs = {key for key in graph if str(key[0]).startswith("random_sample")}
    return len(graph) - len(inputs)


def seconds(client: Client, build: Callable[[], da.Array], hook: EinDecomp | None) -> float:
    """Seconds to persist a result, which is released before the next run."""
    with optimiser(hook):
        array = build()
        started = time.perf_counter()
        result = array.persist()
        wait(result)
        took = time.perf_counter() - started
    del result, array
    client.run(lambda: None)  # the release has reached every worker
    return took


def main() -> None:
    """Run both problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--size", type=int, default=4000, help="extent of the square product")
    options = parser.parse_args()
    blas = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with (
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=None, env=blas) as cluster,
        Client(cluster) as client,
    ):
        n = options.size
        a, b = (da.random.random((n, n), chunks=n // 4).persist() for _ in range(2))
        x = da.random.random((64, 64, 64), chunks=16).persist()
        factors = [da.random.random((64, 12), chunks=(16, 3)).persist() for _ in range(3)]
        wait([a, b, x, *factors])
        problems: dict[str, Callable[[], da.Array]] = {
            f"einsum ij,jk->ik, {n} squared": lambda: da.einsum("ij,jk->ik", a, b),
            "einsum ijk,ia,jb,kc->abc, n=64, R=12": lambda: da.einsum("ijk,ia,jb,kc->abc", x, *factors),
        }
        for name, build in problems.items():
            runs: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(options.repeats):
                for planned in (True, False):
                    runs[planned].append(seconds(client, build, EinDecomp() if planned else None))
            ours, plain = (statistics.median(runs[planned]) for planned in (True, False))
            spread = ", ".join(f"{min(r):.2f} to {max(r):.2f}" for r in (runs[True], runs[False]))
            print(
                f"{name}: planned {ours:.2f} s, plain {plain:.2f} s ({spread}), ratio {plain / ours:.1f}; "
                f"tasks besides inputs: planned {tasks(build(), EinDecomp())}, plain {tasks(build(), None)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
