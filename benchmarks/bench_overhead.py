"""What the hook costs a graph it has nothing to do with: CPU time of the optimise step, paired and alternating."""

from __future__ import annotations

import gc
import statistics
import time

import dask.array as da
import numpy as np
from dask.array.optimization import optimize

from dask_eindecomp import eindecomp


def increment(block: np.ndarray) -> np.ndarray:
    """Work that is not looked into."""
    return block + 1


def main() -> None:
    """Print the extra share of CPU time of each graph."""
    chain = da.ones((1000,), chunks=1)
    for _ in range(10):
        chain = chain.map_blocks(increment, dtype=float)
    square = da.ones((400, 400), chunks=20)
    graphs = {
        "map_blocks chain of 10,000 tasks": chain,
        "overlap": square.map_overlap(increment, depth=1, boundary="none", dtype=float),
        "cumsum": square.cumsum(axis=0),
        "FFT": da.fft.fft(square.rechunk((20, 400))),
    }
    for name, array in graphs.items():
        keys = array.__dask_keys__()
        shares = []
        for turn in range(41):
            took = {}
            for function in (eindecomp, optimize) if turn % 2 else (optimize, eindecomp):
                gc.collect()  # the garbage of one is not to be paid by the other
                started = time.process_time()
                function(array.dask, keys)
                took[function] = time.process_time() - started
            shares.append(took[eindecomp] / took[optimize] - 1)
        spread = statistics.quantiles(shares[1:], n=4)
        print(
            f"{name}: {statistics.median(shares[1:]):+.1%} (quartiles {spread[0]:+.1%} to {spread[2]:+.1%})"
        )


if __name__ == "__main__":
    main()
