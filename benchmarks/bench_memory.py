"""Whether workers hold as much memory as predicted, and whether a limit is kept.

Sums of exponentials of a product of thin matrices, which is large, on worker processes: plans without a limit, measures
the peak of every worker above idle, then plans again with half of the predicted peak as the limit and measures that.
With ``--against-dask`` two large problems of the gallery instead, planned and by plain Dask, inputs included.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import dask
import dask.array as da
from distributed import Client, LocalCluster, wait

from benchmarks.bench_wall import SHAPES, optimiser
from benchmarks.inputs import persisted
from benchmarks.problems import GALLERY
from dask_eindecomp import EinDecomp, calibrate, explain, register
from dask_eindecomp.plan import Plan


def start_of_peak() -> int:
    """Resident bytes of this worker now; its peak counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Most resident bytes of this worker since the start."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def trim() -> None:
    """Give freed memory back to the system."""
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)


def measured(client: Client, rows: int, hook: EinDecomp) -> tuple[Plan, Mapping[str, int]]:
    """The plan, and the peak of every worker above idle while it runs."""
    client.run(trim)
    idle = client.run(start_of_peak)
    draw = da.random.default_rng(0)
    a, b = dask.persist(
        draw.random((rows, 8), chunks=(rows // 4, 8)), draw.random((8, rows), chunks=(8, rows // 4))
    )
    wait([a, b])
    result = da.exp(a @ b).sum(axis=1)
    plan = explain(result, hook=hook)
    with dask.config.set(array_optimize=hook):
        done = result.persist()
        wait(done)
    peaks = client.run(peak)
    del done, result, a, b
    client.run(lambda: None)
    return plan, {address: peaks[address] - idle[address] for address in peaks}


LARGE: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "chain_square": {name: (3200, 3200) for name in "ABCDE"},
    "attention": {**SHAPES["attention"], "x": (2048, 1024)},
}


def against_dask(client: Client, name: str, hook: EinDecomp) -> None:
    """A line for a problem: predicted, planned and plain Dask's peak on the worker that held most."""
    peaks: dict[bool, int] = {}
    for planned in (True, False):
        client.run(trim)
        idle = client.run(start_of_peak)
        arrays = persisted(client, GALLERY[name], LARGE[name])
        results = GALLERY[name].expression(**arrays)
        plan = explain(*results, hook=hook)
        with optimiser(hook if planned else None):
            done = dask.persist(*results)
            wait(done)
        found = client.run(peak)
        peaks[planned] = max(found[address] - idle[address] for address in found)
        del done, results, arrays
        client.run(lambda: None)
    print(
        f"{name:14} predicted {plan.traffic.peak_nbytes / 1e6:6.0f} MB  planned {peaks[True] / 1e6:6.0f} MB"
        f"  plain Dask {peaks[False] / 1e6:6.0f} MB",
        flush=True,
    )


def report(title: str, plan: Plan, peaks: Mapping[str, int]) -> None:
    """One line: predicted, measured on the worker that held most, and the ratio."""
    predicted, most = plan.traffic.peak_nbytes, max(peaks.values())
    tiles = ", ".join(str(choice.tiles) for choice in plan.choices)
    print(
        f"{title:14} predicted {predicted / 1e6:6.0f} MB  measured {most / 1e6:6.0f} MB  ratio {most / predicted:4.2f}"
        f"  tiles {tiles}  {plan.verdict}",
        flush=True,
    )


def main() -> None:
    """Measure without and with the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=11_500)
    parser.add_argument("--against-dask", action="store_true", help="chain_square and attention instead")
    options = parser.parse_args()
    blas = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with (
        LocalCluster(
            n_workers=4, threads_per_worker=1, memory_limit="4GiB", dashboard_address=None, env=blas
        ) as cluster,
        Client(cluster) as client,
    ):
        if options.against_dask:
            register(client)
            hook = EinDecomp(topology=calibrate(client))
            for name in LARGE:
                against_dask(client, name, hook)
            return
        measured(client, 400, EinDecomp(force=True))  # what is imported once is part of idle
        free = EinDecomp(force=True)
        plan, peaks = measured(client, options.rows, free)
        report("no limit", plan, peaks)
        half = plan.traffic.peak_nbytes // 2
        tight, peaks = measured(client, options.rows, EinDecomp(force=True, memory_limit=half))
        report("half of that", tight, peaks)
        print(
            f"limit {half / 1e6:.0f} MB, kept: {max(peaks.values()) <= half}, plan changed: {tight != plan}"
        )


if __name__ == "__main__":
    main()
