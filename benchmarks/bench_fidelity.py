"""Whether plans take as long as predicted: random plans, predicted against measured seconds, on worker processes.

Calibrates the cluster, draws plans at random (any candidate for every expression), and runs them in random order, the
planner's own among them, several passes.  Prints for every problem the rank correlation (Spearman) of predicted and
measured seconds, and how the planner's choice compares with the fastest of the random ones.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any

import dask
import dask.array as da
from distributed import Client, LocalCluster, wait
from scipy.stats import spearmanr

from benchmarks.inputs import ONE_THREAD, persisted
from benchmarks.problems import GALLERY, Problem
from dask_eindecomp import EinDecomp, Topology, calibrate
from dask_eindecomp.candidates import Budget, space_of, tile_counts, usual_cuts
from dask_eindecomp.estimate import price
from dask_eindecomp.graph import EinGraph
from dask_eindecomp.hook import apply
from dask_eindecomp.partition import Partition

PROBLEMS = ("chain_square", "chain_skewed", "attention", "mttkrp", "ffnn_step")
SIZES: Mapping[str, Mapping[str, Any]] = {
    "mttkrp": {"X": (448, 448, 448), "B": (448, 64), "C": (448, 64)},
}
"""Shapes of problems whose medium size takes less than half a second."""


def random_partitions(graph: EinGraph, topology: Topology, draw: random.Random) -> dict[str, Partition]:
    """Any candidate for every expression: first a number of tiles, then one of its partitions."""
    usual = usual_cuts(graph)
    chosen = {}
    for node in graph.nodes.values():
        count = draw.choice(tile_counts(topology.slots))
        space = space_of(graph, node, [count], topology, Budget(), usual, divide=False, with_came=False)
        chosen[node.name] = space.partition(draw.randrange(len(space)))
    return chosen


class Run:
    """One problem on a cluster, ready to run by any plan."""

    def __init__(self, client: Client, problem: Problem, topology: Topology) -> None:
        self.client = client
        self.inputs = persisted(client, problem, SIZES.get(problem.name) or problem.input_shapes("medium"))
        self.results = problem.expression(**self.inputs)
        hook = EinDecomp(force=True, topology=topology)
        self.dsk = dask.highlevelgraph.HighLevelGraph.merge(*(one.dask for one in self.results))
        self.keys = [one.__dask_keys__() for one in self.results]
        self.lifted, self.graph, self.plan = hook.plan(self.dsk, self.keys)

    def seconds(self, partitions: Mapping[str, Partition]) -> float:
        """Seconds until the results lie on the workers."""
        plan = price(self.graph, partitions, self.plan.topology)
        dsk = apply(self.dsk, self.keys, self.lifted, self.graph, plan)
        arrays = [da.Array(dsk, one.name, one.chunks, meta=one._meta) for one in self.results]
        started = time.perf_counter()
        held = dask.persist(*arrays, optimize_graph=False)
        wait(held)
        took = time.perf_counter() - started
        del held, arrays, dsk
        self.client.run(lambda: None)  # the release has reached every worker
        return took


def compare(client: Client, problem: Problem, topology: Topology, options: argparse.Namespace) -> None:
    """Run one problem by random plans and by the planner's, and print a line."""
    run = Run(client, problem, topology)
    draw = random.Random(options.seed)
    plans = [random_partitions(run.graph, topology, draw) for _ in range(options.plans)]
    mine = dict(run.plan.partitions)
    random_ones = len(plans)
    if mine not in plans:  # one plan is measured as one
        plans.append(mine)
    planner = plans.index(mine)
    predicted = [price(run.graph, one, topology).seconds for one in plans]
    measured: list[list[float]] = [[] for _ in plans]
    run.seconds(mine)
    for _ in range(options.passes):
        order = list(range(len(plans)))
        draw.shuffle(order)
        for number in order:
            measured[number].append(run.seconds(plans[number]))
    medians = list(map(statistics.median, measured))
    if options.verbose:
        for number in sorted(range(len(plans)), key=lambda n: medians[n]):
            spent = price(run.graph, plans[number], topology).traffic
            print(
                f"  {'planner' if number == planner else number:>8} predicted {predicted[number]:7.2f} "
                f"measured {medians[number]:7.2f}  {spent.tasks:6} tasks {spent.nbytes / 1e6:8.0f} MB"
            )
    rank = spearmanr(predicted[:random_ones], medians[:random_ones]).statistic
    fastest = min(medians[:random_ones])
    print(
        f"{problem.name:14} Spearman {rank:5.2f}  fastest of {options.plans} {fastest:6.2f} s  "
        f"planner {medians[planner]:6.2f} s, predicted {predicted[planner]:6.2f} s  ratio to the fastest "
        f"{medians[planner] / fastest:5.2f}  measured from {min(medians):.2f} to {max(medians):.2f} s",
        flush=True,
    )


def main() -> None:
    """Compare every problem asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=PROBLEMS)
    parser.add_argument("--plans", type=int, default=30)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--topology", help="file with calibrated figures; measured if there is none")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    with (
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=None, env=ONE_THREAD) as cluster,
        Client(cluster) as client,
    ):
        topology = Topology.load(options.topology) if options.topology else calibrate(client)
        print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
        for name in options.problems:
            compare(client, GALLERY[name], topology, options)


if __name__ == "__main__":
    main()
