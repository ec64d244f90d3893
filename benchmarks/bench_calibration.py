"""Whether two calibrations agree, how long one takes, and whether it predicts a product of large matrices.

Prints every figure of two calibrations in a row and by how much they differ, then the planner's own plan for a product
of two matrices, persisted in a user's chunks, predicted and measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

from distributed import Client, LocalCluster

from benchmarks.bench_fidelity import Run
from benchmarks.problems import Problem, gram_reference
from dask_eindecomp.calibration import calibration

FIGURES = (
    "bandwidth", "latency", "flops", "task_overhead", "memory_bandwidth", "contention", "small_tile",
)  # fmt: skip


def product(A, B):
    """A product of two matrices."""
    return (A @ B,)


def main() -> None:
    """Calibrate twice, then compare a prediction with the clock."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4000, help="extent of the square product")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    blas = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with (
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=None, env=blas) as cluster,
        Client(cluster) as client,
    ):
        print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
        found = []
        for _ in range(2):
            started = time.perf_counter()
            found.append(calibration(client).topology)
            print(f"calibrated in {time.perf_counter() - started:.1f} s")
        one, two = found
        for name in FIGURES:
            first, second = getattr(one, name), getattr(two, name)
            print(f"{name:18} {first:12.4g} {second:12.4g}  differ by {abs(first / second - 1):4.0%}")
        shapes = {name: (options.size, options.size) for name in "AB"}
        run = Run(client, Problem("product", {"medium": shapes}, product, gram_reference), two)
        run.seconds(run.plan.partitions)
        took = [run.seconds(run.plan.partitions) for _ in range(options.repeats)]
        measured, predicted = statistics.median(took), run.plan.seconds
        print(
            f"{options.size} cubed, {run.plan.choices[-1].partition}: predicted {predicted:.2f} s, measured "
            f"{measured:.2f} s (from {min(took):.2f} to {max(took):.2f}), {predicted / measured - 1:+.0%}"
        )


if __name__ == "__main__":
    main()
