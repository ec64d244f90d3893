"""The hook against plain Dask on a local cluster, alternating: seconds, ratio, tasks besides the inputs.

python -m benchmarks.bench_hook [--repeats 5] [--size 4000] [--workers 4]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import dask
import dask.array as da
import numpy as np
from dask.array.optimization import optimize as dask_optimize

from dask_eindecomp import EinDecomp

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Race:
    """A computation and what is asked of it."""

    name: str
    """What is printed."""
    inputs: Callable[[int], tuple[da.Array, ...]]
    """Lazy inputs for a size; they are persisted first."""
    expression: Callable[..., da.Array]
    """The array to persist."""
    ratio: float
    """How many times as fast as plain Dask it should be at full size."""
    tasks: int
    """Most tasks besides the inputs."""


def _square(size: int) -> tuple[da.Array, ...]:
    return tuple(da.random.default_rng(n).normal(size=(size, size), chunks=size // 4) for n in range(2))


def _tucker(size: int) -> tuple[da.Array, ...]:
    side, rank = max(size * 64 // 4000, 4), 12
    shapes = [(side,) * 3, *[(side, rank)] * 3]
    return tuple(
        da.random.default_rng(n).normal(size=shape, chunks=tuple(-(-extent // 4) for extent in shape))
        for n, shape in enumerate(shapes)
    )


RACES = (
    Race("ij,jk->ik", _square, lambda a, b: da.einsum("ij,jk->ik", a, b), ratio=6, tasks=40),
    Race(
        "ijk,ia,jb,kc->abc",
        _tucker,
        lambda x, a, b, c: da.einsum("ijk,ia,jb,kc->abc", x, a, b, c),
        ratio=15,
        tasks=130,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--size", type=int, default=4000, help="rows of the matrices (default: 4000)")
    parser.add_argument("--workers", type=int, default=4, help="processes of one thread (default: 4)")
    options = parser.parse_args()
    os.environ |= dict.fromkeys(ONE_THREAD, "1")  # before the workers start
    from distributed import Client, LocalCluster

    with (
        dask.config.set({"distributed.worker.memory.terminate": False}),
        LocalCluster(
            n_workers=options.workers, threads_per_worker=1, dashboard_address=":0", silence_logs=40
        ) as cluster,
        Client(cluster) as client,
    ):
        for race in RACES:
            run(race, client, options.size, options.repeats)


def run(race: Race, client: object, size: int, repeats: int) -> None:
    """Run one race and print what came of it; no future outlives the call."""
    from distributed import get_task_stream, wait

    inputs = dask.persist(*race.inputs(size))
    wait(inputs)
    optimizers = {"plain": dask_optimize, "hook": EinDecomp()}
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    tasks: dict[str, int] = {}
    results: dict[str, np.ndarray] = {}
    for turn in range(repeats + 1):
        for name in sorted(optimizers, reverse=bool(turn % 2)):
            with dask.config.set(array_optimize=optimizers[name]), get_task_stream(client) as stream:
                start = time.perf_counter()
                result = race.expression(*inputs).persist()
                wait(result)
                seconds[name].append(time.perf_counter() - start)
            tasks[name] = len(stream.data)
            if not turn:
                results[name] = result.compute()
            del result
            time.sleep(0.2)  # the scheduler forgets what was released
    np.testing.assert_allclose(results["hook"], results["plain"], rtol=1e-6, atol=1e-6 * size)
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    ratios = sorted(plain / hook for plain, hook in zip(seconds["plain"][1:], seconds["hook"][1:]))
    print(f"{race.name}: inputs {', '.join(str(array.shape) for array in inputs)}")
    for name in optimizers:
        spread = f"{min(seconds[name][1:]):.3f} to {max(seconds[name][1:]):.3f}"
        print(f"  {name:6} {medians[name]:8.3f} s ({spread}), {tasks[name]} tasks besides the inputs")
    print(
        f"  {medians['plain'] / medians['hook']:.1f} times as fast ({ratios[0]:.1f} to {ratios[-1]:.1f} pair by pair; "
        f"expected at full size: {race.ratio:g}), at most {race.tasks} tasks expected"
    )


if __name__ == "__main__":
    main()
