"""Whether the bytes that a plan predicts are those that move, and how near they come to the least possible.

For every problem of the gallery and several numbers of worker processes: inputs persisted with known owners, the
scheduler's plugin registered, the bytes predicted and measured, plain Dask's, and for problems small enough for it the
least that any grid and any even placement of one tile a worker could do, found by trying all of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import dask
from distributed import Client, LocalCluster, wait

from benchmarks.inputs import ONE_THREAD, persisted, sent
from benchmarks.problems import GALLERY, Problem
from dask_eindecomp import EinDecomp, explain, register
from dask_eindecomp.graph import EinGraph
from tests.oracle import least_bytes

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "chain_square": {name: (480, 480) for name in "ABCDE"},
    "chain_skewed": {"A": (480, 48), "B": (48, 480), "C": (480, 48), "D": (48, 4800), "E": (4800, 480)},
    "square_product": {"A": (480, 480), "B": (480, 480)},
    "tall_product": {"A": (9600, 96), "B": (96, 96)},
    "batched_product": {"A": (32, 96, 96), "B": (32, 96, 96)},
    "gram": {"X": (9600, 96)},
    "attention": {
        "x": (256, 256), "query": (256, 8, 32), "key": (256, 8, 32), "value": (256, 8, 32), "output": (8, 32, 256),
    },
    "mttkrp": {"X": (96, 96, 96), "B": (96, 16), "C": (96, 16)},
    "ttm_chain": {"X": (96, 96, 96), "A": (96, 12), "B": (96, 12), "C": (96, 12)},
    "ffnn_step": {"X": (768, 480), "Y": (768, 96), "W1": (480, 480), "W2": (480, 96)},
    "abcd": {"A": (480, 480), "B": (480, 480), "C": (480, 480)},
    "distances": {"X": (192, 96), "Y": (192, 96)},
}  # fmt: skip
"""Large enough that a block is no small change, small enough for eight workers on two cores."""
PROBLEMS = (*SHAPES, *(["minilm"] if "minilm" in GALLERY else []))
"""MiniLM at its medium size, six layers for 64 sentences, where the model is installed."""
TRIED = ("square_product", "tall_product", "batched_product", "mttkrp", "ttm_chain")
"""Problems for which every grid and placement is tried, on up to four workers."""
CLOSE = 0.05
"""Share by which predicted and measured bytes may differ, or a million bytes."""


def moved(client: Client, problem: Problem, hook: EinDecomp | None) -> tuple[int, int, EinGraph | None]:
    """Bytes that were sent, and those predicted, with the graph that was planned."""
    arrays = persisted(client, problem, SHAPES.get(problem.name) or problem.input_shapes("medium"))
    results = problem.expression(**arrays)
    predicted, graph = 0, None
    if hook is not None:
        predicted = explain(*results, hook=hook).traffic.nbytes
        graph = hook.plan(
            dask.highlevelgraph.HighLevelGraph.merge(*(one.dask for one in results)),
            [one.__dask_keys__() for one in results],
        )[1]
    before = sent(client)
    with dask.config.set(array_optimize=hook) if hook is not None else dask.config.set():
        done = dask.persist(*results)
    wait(done)
    total = sent(client) - before
    del done, results, arrays
    client.run(lambda: None)
    return total, predicted, graph


def main() -> None:
    """Print a line for every problem and number of workers; the exit status says whether all are close."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=PROBLEMS)
    parser.add_argument("--workers", nargs="+", type=int, default=(2, 4, 6, 8))
    parser.add_argument("--objective", default="seconds", choices=("seconds", "bytes"))
    parser.add_argument("--no-plain", action="store_true", help="leave plain Dask out")
    options = parser.parse_args()
    # in time whatever else runs: a plan that came too late is another one
    hook = EinDecomp(force=True, objective=options.objective, planning_timeout=60.0)
    far = 0
    print(
        f"{'problem':16} workers  predicted MB  measured MB  measured/predicted  least MB  measured/least  plain MB"
    )
    for workers in options.workers:
        with (
            LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=None, env=ONE_THREAD
            ) as cluster,
            Client(cluster) as client,
        ):
            register(client)
            for name in options.problems:
                problem = GALLERY[name]
                total, predicted, graph = moved(client, problem, hook)
                close = abs(total - predicted) <= max(CLOSE * predicted, 1e6)
                far += not close
                least = ratio = ""
                if name in TRIED and workers <= 4 and graph is not None:
                    fewest = least_bytes(graph, workers)
                    least = f"{fewest / 1e6:.2f}"
                    ratio = f"{total / fewest:.2f}" if fewest else "0 to 0" if not total else "inf"
                plain = "" if options.no_plain else f"{moved(client, problem, None)[0] / 1e6:.2f}"
                print(
                    f"{name:16} {workers:7}  {predicted / 1e6:12.2f}  {total / 1e6:11.2f}  "
                    f"{total / predicted if predicted else float(total > 0):18.3f}  {least:>8}  {ratio:>14}  {plain:>8}"
                    f"{'' if close else '  FAR'}",
                    flush=True,
                )
    sys.exit(far > 0)


if __name__ == "__main__":
    main()
