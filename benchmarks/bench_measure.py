"""What `measure` sees of every problem of the gallery, beside what was predicted.

A line a problem: shipped bytes, messages, seconds, tasks and the peak of a worker, measured / predicted, then where the
two differ by more than a quarter.  ``--tables`` prints every expression.
"""

from __future__ import annotations

import argparse
import os
import warnings

import dask
from dask.array.core import PerformanceWarning
from distributed import wait

from benchmarks.bench_wall import SHAPES, machines, optimiser, shapes
from benchmarks.inputs import persisted
from benchmarks.problems import GALLERY
from dask_eindecomp import explain, measure
from dask_eindecomp.plan import table

HEADER = ("problem", "shipped", "messages", "seconds", "tasks", "peak", "departs")


def main() -> None:
    """Measure each problem once after one run that is not counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--problems", nargs="+", choices=tuple(GALLERY), default=[n for n in GALLERY if n != "minilm"]
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=4, help="of each side")
    parser.add_argument("--tables", action="store_true", help="a line for every expression")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Increasing number of chunks", PerformanceWarning)
    rows = []
    with machines(options.workers, 0) as (client, hook):
        assert client is not None
        for name in options.problems:
            for warm in (False, True):
                arrays = persisted(client, GALLERY[name], shapes(name), chunks_a_side=options.chunks)
                results = GALLERY[name].expression(**arrays)
                plan = explain(*results, hook=hook)
                with optimiser(hook), measure(client, plan) as measured:
                    held = dask.persist(*results)
                    wait(held)
                del held, results, arrays
                if warm:
                    rows.append((name, *measured.summary[1:]))
                    if options.tables:
                        print(f"{name}\n{measured}\n", flush=True)
    print(*table(HEADER, rows, {1, 2, 3, 4, 5}), sep="\n")
    print(f"measured / predicted; {', '.join(SHAPES)} in the sizes of bench_wall, others in their medium one")
    print(f"load after: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
