"""What the hook costs where there is nothing to plan: extra CPU time of the optimise step.

Each graph is built anew and optimised by Dask's own optimiser and by the hook, in turn; printed are the median of
each, and of the extra share pair by pair, with its quartiles.

    python -m benchmarks.bench_overhead [--repeats 20]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import dask.array as da
from dask.array.optimization import optimize as dask_optimize

from dask_eindecomp import EinDecomp


def _increment(block: Any) -> Any:
    return block + 1


def _chain() -> da.Array:
    """100 blocks, 100 functions: 10,000 tasks."""
    array = da.ones((100, 100), chunks=10)
    for _ in range(100):
        array = array.map_blocks(_increment, dtype=array.dtype)
    return array


GRAPHS: dict[str, Callable[[], da.Array]] = {
    "map_blocks chain of 10,000 tasks": _chain,
    "overlap": lambda: da.overlap.overlap(da.ones((400, 400), chunks=20), depth=2, boundary="reflect"),
    "cumsum": lambda: da.cumsum(da.ones((2000, 400), chunks=(20, 20)), axis=0),
    "FFT": lambda: da.fft.fft(da.ones((4000, 64), chunks=(4, 64))),
}


def cpu_seconds(optimizer: Callable[..., Any], build: Callable[[], da.Array]) -> float:
    """CPU time of one optimise step on a graph nobody has looked at."""
    array = build()
    keys = [array.__dask_keys__()]
    gc.collect()
    start = time.process_time()
    optimizer(array.dask, keys)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="pairs (default: 20)")
    repeats = parser.parse_args().repeats
    hook = EinDecomp()
    print(f"{'graph':34}{'Dask, ms':>10}{'hook, ms':>10}{'extra':>9}   quartiles")
    gc.disable()
    for name, build in GRAPHS.items():
        pairs = []
        for turn in range(repeats + 1):
            both = [dask_optimize, hook] if turn % 2 else [hook, dask_optimize]
            found = {optimizer: cpu_seconds(optimizer, build) for optimizer in both}
            pairs.append((found[dask_optimize], found[hook]))
        pairs = pairs[1:]  # the first pair imports and warms up
        plain, planned = (statistics.median(column) for column in zip(*pairs))
        low, extra, high = statistics.quantiles([mine / theirs - 1 for theirs, mine in pairs], n=4)
        print(f"{name:34}{plain * 1e3:10.1f}{planned * 1e3:10.1f}{extra:9.1%}   {low:.1%} to {high:.1%}")


if __name__ == "__main__":
    main()
