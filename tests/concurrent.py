"""Many graphs planned and computed by two threads of a process at once.

``python -m tests.concurrent COUNT`` prints, for each of two threads, a digest of every graph's keys and plan; it fails
where a result is not NumPy's.  Two processes print the same.
"""

from __future__ import annotations

import hashlib
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier

import dask
import dask.array as da
import numpy as np

from dask_eindecomp import EinDecomp, Topology, explain

HOOK = EinDecomp(force=True, strict=True, topology=Topology(workers=4), planning_timeout=60.0)


def program(seed: int) -> tuple[da.Array, np.ndarray]:
    """A chain of products, sums and elementwise code over whole numbers, and its value."""
    draw = random.Random(seed)
    extents = [draw.randint(1, 12) for _ in range(draw.randint(3, 6))]
    values, arrays = [], []
    for rows, columns in pairwise(extents):
        numbers = [draw.randint(-3, 3) for _ in range(rows * columns)]
        values.append(np.array(numbers).reshape(rows, columns))
        arrays.append(da.from_array(values[-1], chunks=(draw.randint(1, rows), draw.randint(1, columns))))
    lazy, value = arrays[0], values[0]
    for array, matrix in zip(arrays[1:], values[1:]):
        step = draw.randrange(4)
        if step == 0:
            lazy, value = lazy @ array, value @ matrix
        elif step == 1:
            lazy, value = da.einsum("ij,jk->ki", lazy, array).T, value @ matrix
        elif step == 2:
            lazy, value = (lazy + lazy.max(axis=0)) @ array, (value + value.max(axis=0)) @ matrix
        else:
            lazy, value = da.tensordot(lazy, array * 2, axes=1) - 1, value @ matrix * 2 - 1
    return lazy, value


def digest(seed: int) -> str:
    """Of the keys and the plan of one graph, which is computed meanwhile."""
    lazy, value = program(seed)
    (optimized,) = dask.optimize(lazy)
    np.testing.assert_array_equal(lazy.compute(scheduler="synchronous"), value)
    keys = sorted(map(str, dict(optimized.__dask_graph__())))
    return hashlib.sha256("\n".join([*keys, explain(lazy, hook=HOOK).to_json()]).encode()).hexdigest()


def main(count: int) -> None:
    """Two threads go through the same graphs side by side."""
    start = Barrier(2)

    def run(_: int) -> list[str]:
        start.wait()
        return [digest(seed) for seed in range(count)]

    with dask.config.set(array_optimize=HOOK), ThreadPoolExecutor(2) as pool:
        for found in pool.map(run, range(2)):
            print(*found)


if __name__ == "__main__":
    main(int(sys.argv[1]))
