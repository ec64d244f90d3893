"""The least-cost partition of every expression.

One variable an expression, its values the candidate partitions; a cost for each value and, for every edge, a cost for
each pair of grids it may connect.  ``elimination`` finds the least sum exactly, on any DAG.  Limits on the whole plan,
its peak memory and its number of tasks, are met by making what breaks them dearer and solving again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dask_eindecomp import memory
from dask_eindecomp.candidates import (
    MANY,
    Budget,
    BudgetError,
    Space,
    space_of,
    tile_counts,
    usual_cuts,
    worth_trying,
)
from dask_eindecomp.elimination import Factor, Late, Table, gap_of, minimise
from dask_eindecomp.graph import EinGraph
from dask_eindecomp.partition import Chunks
from dask_eindecomp.plan import Plan
from dask_eindecomp.pricing import OBJECTIVES, Pricing, price, received
from dask_eindecomp.topology import Topology

__all__ = ["BudgetError", "DecomposeError", "PlanningTimeout", "decompose"]

ROUNDS = 12
"""Most times a plan that breaks a limit is made anew."""


class DecomposeError(ValueError):
    """A planning request that makes no sense."""


class PlanningTimeout(RuntimeError):
    """Not even a first plan was found in the time given."""


def decompose(
    graph: EinGraph,
    *,
    tiles: int | None = None,
    objective: str | None = None,
    topology: Topology | None = None,
    memory_limit: int | None = None,
    max_block_bytes: int | None = None,
    max_tasks: int | None = None,
    timeout: float | None = None,
) -> Plan:
    """Choose a partition for every expression so that the whole graph costs least.

    Parameters
    ----------
    graph
        What is to be computed.
    tiles
        Kernel calls an expression.  Default: multiples of the topology's slots, and fewer where that is cheaper
        (objective ``"seconds"`` only).
    objective
        ``"paper"`` (floats moved, the published model), ``"bytes"`` (bytes that Dask moves) or ``"seconds"``.
        Default: seconds.
    topology
        The machines.  Default: as many single-threaded workers as ``tiles``.
    memory_limit
        Bytes that one worker may hold at a time.  Default: 0.6 of the topology's memory for the objective
        ``"seconds"``, any for the others.
    max_block_bytes
        Bytes of the largest block of a planned array.  Default: any.
    max_tasks
        Dask tasks of the whole plan.  Default: any.
    timeout
        Seconds after which the best plan so far has to do.  Default: as long as it takes.

    Returns
    -------
    Plan
        Its ``gap`` is 0.0 if no assignment of candidates costs less.

    Raises
    ------
    DecomposeError
        If the objective is unknown, ``tiles`` or a limit is not positive, or neither tiles nor a topology is given.
    BudgetError
        If no plan was found that keeps within the limits; the message says which expression needs how much.
    PlanningTimeout
        If the time is over before there is any plan.
    """
    objective = objective or "seconds"
    if objective not in OBJECTIVES:
        raise DecomposeError(f"unknown objective {objective!r}; expected one of {', '.join(OBJECTIVES)}")
    if tiles is not None and tiles < 1:
        raise DecomposeError(f"cannot plan for {tiles} tiles; expected at least 1")
    limits = {
        "memory_limit": memory_limit, "max_block_bytes": max_block_bytes, "max_tasks": max_tasks,
        "timeout": timeout,
    }  # fmt: skip
    for name, limit in limits.items():
        if limit is not None and not limit > 0:
            raise DecomposeError(f"{name} is {limit}; expected more than 0")
    if topology is None:
        if tiles is None:
            raise DecomposeError("neither tiles nor a topology was given; expected one of them")
        topology = Topology(workers=tiles)
    if memory_limit is None and objective == "seconds":
        memory_limit = int(0.6 * topology.memory)
    deadline = None if timeout is None else time.monotonic() + timeout
    planner = _Planner(graph, objective, topology, tiles, Budget(memory_limit, max_block_bytes), deadline)
    return planner.within(max_tasks)


@dataclass(frozen=True)
class _Solution:
    """One candidate for every expression."""

    indices: Mapping[str, int]
    """Which one."""
    plan: Plan
    """Priced."""


@dataclass(frozen=True)
class _Tables:
    """What the candidates cost."""

    alone: Mapping[str, Table]
    """Every candidate by itself."""
    factors: Sequence[Factor]
    """Two expressions that an edge connects."""

    def value(self, indices: Mapping[str, int]) -> float:
        """What one assignment costs."""
        total = sum(float(costs[indices[name]]) for name, costs in self.alone.items())
        for factor in self.factors:
            at = tuple(classes[indices[name]] for name, classes in zip(factor.scope, factor.classes))
            total += float(factor.table[at])
        return total

    @property
    def bound(self) -> float:
        """What every assignment costs at least: the least of each table."""
        least = sum(float(costs.min()) for costs in self.alone.values())
        return least + sum(float(factor.table.min()) for factor in self.factors)


@dataclass
class _Planner:
    """One request, and the candidates of every expression once they are known."""

    graph: EinGraph
    objective: str
    topology: Topology
    tiles: int | None
    budget: Budget
    deadline: float | None
    spaces: Mapping[str, Space] = field(default_factory=dict)

    def within(self, max_tasks: int | None) -> Plan:
        """The best plan found that keeps within every limit."""
        pricing = Pricing(self.graph, self.objective, self.topology)
        try:
            self.spaces = self.candidates(pricing)
            tables = self.tables(pricing)
        except Late:
            raise PlanningTimeout("the time for planning was over before there was any plan") from None
        best = first = self.solve(tables)
        limit = self.budget.memory
        if limit is not None and best.plan.traffic.peak_nbytes > limit:
            best = self.less_memory(tables, best, limit)
        if max_tasks is not None and best.plan.traffic.tasks > max_tasks:
            best = self.fewer_tasks(best, max_tasks)
        if best is first:
            return first.plan
        # nothing that keeps within the limits costs less than the best without them
        cost, least = tables.value(best.indices), first.plan.cost / (1 + first.plan.gap)
        return replace(best.plan, cost=cost, gap=gap_of(cost, least))

    def solve(self, tables: _Tables) -> _Solution:
        """The assignment of least cost; after the deadline the best that a single pass finds."""
        try:
            indices, value, gap = minimise(tables.alone, tables.factors, self.deadline)
        except Late:
            indices = _one_by_one(tables)
            value = tables.value(indices)
            gap = gap_of(value, tables.bound)
        partitions = {name: space.partition(indices[name]) for name, space in self.spaces.items()}
        plan = price(self.graph, partitions, self.topology)
        return _Solution(indices, replace(plan, cost=value, objective=self.objective, gap=gap))

    def late(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() > self.deadline

    # candidates and tables

    def candidates(self, pricing: Pricing) -> dict[str, Space]:
        """Candidate partitions; expressions of one kind share one space, and so every table made of it."""
        seconds, graph, topology = self.objective == "seconds", self.graph, self.topology
        free = seconds and self.tiles is None
        counts = tile_counts(topology.slots) if free else [self.tiles or topology.slots]
        usual = usual_cuts(graph) if seconds else {}
        known: dict[int, Space] = {}
        for node in graph.nodes.values():
            kind = graph.kinds[node.name]
            if kind in known:
                continue
            if self.late():
                raise Late
            space = space_of(
                graph, node, counts, topology, self.budget, usual, self.objective == "paper", free
            )
            if free and len(space) > MANY:
                space = worth_trying(space, pricing.node_costs(node, space), topology.slots)
            known[kind] = space
        return {name: known[graph.kinds[name]] for name in graph.nodes}

    def tables(self, pricing: Pricing) -> _Tables:
        """A cost for every candidate and, for every edge, one for every pair of grids."""
        graph, spaces = self.graph, self.spaces
        kinds = graph.kinds
        memo: dict[object, Any] = {}

        def once(key: object, make: Callable[..., Any], *arguments: Any) -> Any:
            if key not in memo:
                if self.late():
                    raise Late
                memo[key] = make(*arguments)
            return memo[key]

        promised: dict[str, list[Chunks]] = {}
        for output in graph.outputs:
            if output.chunks is not None and pricing.objective != "paper":
                promised.setdefault(output.source, []).append(output.chunks)
        alone: dict[str, Table] = {}
        factors: list[Factor] = []
        for node in graph.nodes.values():
            space, kind = spaces[node.name], kinds[node.name]
            terms = [once(("alone", kind), pricing.node_costs, node, space)]
            for labels, source in zip(node.expression.operands, node.inputs):
                given = graph.inputs.get(source)
                if given is None:
                    producer = graph.nodes[source]
                    key: object = (kinds[source], kind, labels, graph.may_inline(source, node.name))
                    factor = once(key, pricing.edge, producer, spaces[source], node, space, labels)
                    factors.append(Factor((source, node.name), factor.table, factor.classes))
                elif given.chunks is not None and pricing.objective != "paper":
                    key = ("given", given.chunks, given.owners, given.dtype, kind, labels)
                    terms.append(once(key, pricing.reading, source, space, labels))
            for chunks in promised.get(node.name, ()):
                terms.append(once(("promised", kind, chunks), pricing.delivery, node, space, chunks))
            # equal sums are one array, so that the elimination knows them for equal
            alone[node.name] = once(("sum", *map(id, terms)), sum, terms)
        return _Tables(alone, factors)

    # limits on the whole plan

    def less_memory(self, tables: _Tables, first: _Solution, limit: int) -> _Solution:
        """A plan whose peak is within the limit: bytes held at the peak are made dearer until it is."""
        alone, weight = dict(tables.alone), first.plan.cost / limit
        least = solution = first
        for _ in range(ROUNDS):
            if self.late():
                break
            for name, nbytes in self.held_at_peak(solution):
                alone[name] = alone[name] + weight * nbytes
            solution = self.solve(_Tables(alone, tables.factors))
            if solution.plan.traffic.peak_nbytes < least.plan.traffic.peak_nbytes:
                least = solution
            if solution.plan.traffic.peak_nbytes <= limit:
                return solution
        peak = max(least.plan.choices, key=lambda choice: choice.join.peak_nbytes)
        needed = peak.join.peak_nbytes
        raise BudgetError(
            f"{peak.title} ({peak.einsum}) needs {needed:,} bytes on each of {self.topology.workers} workers, all "
            f"that is held beside it included, but may have {limit:,}; a memory limit of {needed:,} bytes or more "
            "workers would do"
        )

    def held_at_peak(self, solution: _Solution) -> Iterator[tuple[str, Table]]:
        """For each expression that holds something at the peak of a plan the bytes that each candidate holds."""
        highest, at = -1, ""
        there: dict[str, int] = {}
        partitions = solution.plan.partitions
        arrived = received(self.graph, partitions, self.topology)
        for name, total, here in memory.timeline(self.graph, partitions, self.topology, arrived):
            if total > highest:
                highest, at, there = total, name, dict(here)
        for name, space in self.spaces.items():
            node = self.graph.nodes[name]
            step = memory.held(self.graph, node, space.parts, self.topology)
            nbytes = np.zeros(len(space))
            if name == at:
                nbytes = nbytes + step.partials
            if there.get(name):
                passed = len(readers := self.graph.readers[name]) == 1 and self.graph.passes_on(
                    name, readers[0][0], partitions
                )
                nbytes = nbytes + (step.running if passed else step.result)
            for source, needed in zip(node.inputs, step.operands):
                if there.get(source):
                    nbytes = nbytes + needed
            if nbytes.any():
                yield name, nbytes

    def fewer_tasks(self, first: _Solution, limit: int) -> _Solution:
        """A plan of no more tasks than the limit: tasks are made dearer until it is."""
        least, best = first, None
        cheap, dear = 0.0, max(self.topology.task_overhead, 1e-4)
        for _ in range(ROUNDS):
            if self.late():
                break
            dearer = replace(self.topology, task_overhead=dear)
            solution = self.solve(self.tables(Pricing(self.graph, "seconds", dearer)))
            if solution.plan.traffic.tasks < least.plan.traffic.tasks:
                least = solution
            fits = self.budget.memory is None or solution.plan.traffic.peak_nbytes <= self.budget.memory
            if solution.plan.traffic.tasks <= limit and fits:
                # no dearer than it has to be
                best, dear = solution, (cheap + dear) / 2
            elif best is None:
                cheap, dear = dear, 4 * dear
            else:
                break
        if best is None:
            needed = least.plan.traffic.tasks
            raise BudgetError(
                f"the plan of fewest tasks found has {needed:,}, but max-tasks is {limit:,}; expected {needed:,} or more"
            )
        return best


def _one_by_one(tables: _Tables) -> dict[str, int]:
    """An assignment in one pass: each expression as is best after those it reads."""
    reading: dict[str, list[Factor]] = {}
    for factor in tables.factors:
        reading.setdefault(factor.scope[1], []).append(factor)
    chosen: dict[str, int] = {}
    for name, costs in tables.alone.items():
        total = costs
        for factor in reading.get(name, ()):
            row = factor.table[factor.classes[0][chosen[factor.scope[0]]]]
            total = total + row[factor.classes[1]]
        chosen[name] = int(total.argmin())
    return chosen
