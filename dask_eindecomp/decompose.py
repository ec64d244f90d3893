"""The least-cost partition of every expression.

One variable an expression, its values the candidate partitions; a cost for each value and, for every edge, a cost for
each pair of grids it may connect.  ``elimination`` finds the least sum exactly, on any DAG.  Limits on the whole plan,
its peak memory and its number of tasks, are met by making what breaks them dearer and solving again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
from dask_eindecomp.estimate import price, received
from dask_eindecomp.graph import EinGraph, Node
from dask_eindecomp.partition import Chunks
from dask_eindecomp.plan import Plan
from dask_eindecomp.pricing import OBJECTIVES, Pricing
from dask_eindecomp.topology import Topology

__all__ = ["BudgetError", "DecomposeError", "PlanningTimeout", "decompose"]

ROUNDS = 12
"""Most times a plan that breaks a limit is made anew."""

FINER = 4
"""Most times that twice as many tiles are tried where no plan fits a worker's memory."""


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
            tables, best = self.less_memory(pricing, tables, best, limit)
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

    @property
    def free(self) -> bool:
        """Whether any number of tiles will do."""
        return self.objective == "seconds" and self.tiles is None

    def candidates(self, pricing: Pricing, finer: int = 0) -> dict[str, Space]:
        """Candidate partitions; expressions of one kind share one space, and so every table made of it.

        Their numbers of tiles are doubled ``finer`` times beyond the usual ones.
        """
        seconds, graph, topology = self.objective == "seconds", self.graph, self.topology
        counts = tile_counts(topology.slots) if self.free else [self.tiles or topology.slots]
        counts += [counts[-1] << more for more in range(1, finer + 1)]
        usual = usual_cuts(graph) if seconds else {}
        known: dict[int, Space] = {}
        alike: dict[object, Space] = {}
        for node in graph.nodes.values():
            kind = graph.kinds[node.name]
            if kind in known:
                continue
            if self.late():
                raise Late
            space = space_of(
                graph, node, counts, topology, self.budget, usual, self.objective == "paper", self.free,
                self.late,
            )  # fmt: skip
            if self.free and not finer and len(space) > MANY:
                space = worth_trying(space, pricing.node_costs(node, space), topology.slots)
            # how tensors are held may leave some candidates out, but where it does not the space is one and the same
            known[kind] = alike.setdefault((pricing.form(node), space.cuts, space.index.tobytes()), space)
        return {name: known[graph.kinds[name]] for name in graph.nodes}

    def tables(self, pricing: Pricing) -> _Tables:
        """A cost for every candidate and, for every edge, one for every pair of grids."""
        graph, spaces = self.graph, self.spaces
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
            space = spaces[node.name]
            mine = (pricing.form(node), id(space))
            terms = [once(("alone", mine), pricing.node_costs, node, space)]
            for labels, source in zip(node.expression.operands, node.inputs):
                given = graph.inputs.get(source)
                if given is None:
                    producer = graph.nodes[source]
                    theirs = (pricing.form(producer), id(spaces[source]))
                    key: object = (theirs, mine, labels, graph.may_inline(source, node.name))
                    factor = once(key, pricing.edge, producer, spaces[source], node, space, labels)
                    factors.append(Factor((source, node.name), factor.table, factor.classes))
                elif given.chunks is not None and pricing.objective != "paper":
                    read = ("given", graph.lies(source), mine, labels)
                    terms.append(once(read, pricing.reading, source, node, space, labels))
            for chunks in promised.get(node.name, ()):
                terms.append(once(("promised", mine, chunks), pricing.delivery, node, space, chunks))
            # equal sums are one array, so that the elimination knows them for equal
            alone[node.name] = once(("sum", *map(id, terms)), sum, terms)
        return _Tables(alone, factors)

    # limits on the whole plan

    def less_memory(
        self, pricing: Pricing, tables: _Tables, first: _Solution, limit: int
    ) -> tuple[_Tables, _Solution]:
        """A plan whose peak is within the limit, and the tables it was found in: more tiles are tried if need be."""
        best = self.lightened(pricing, tables, first, limit)
        for finer in range(1, FINER + 1):
            if not self.free or best.plan.traffic.peak_nbytes <= limit:
                break
            try:
                self.spaces = self.candidates(pricing, finer)
                tables = self.tables(pricing)
            except Late:
                break
            best = self.lightened(pricing, tables, self.solve(tables), limit)
        if best.plan.traffic.peak_nbytes <= limit:
            return tables, best
        peak = max(best.plan.choices, key=lambda choice: choice.join.peak_nbytes)
        needed = peak.join.peak_nbytes
        raise BudgetError(
            f"{peak.title} ({peak.einsum}) needs {needed:,} bytes on each of {self.topology.workers} workers, all "
            f"that is held beside it included, but may have {limit:,}; a memory limit of {needed:,} bytes or more "
            "workers would do"
        )

    def lightened(self, pricing: Pricing, tables: _Tables, first: _Solution, limit: int) -> _Solution:
        """The first plan whose peak is within the limit as bytes held at the peak are made dearer, else the lightest."""
        alone, factors, weight = dict(tables.alone), list(tables.factors), first.plan.cost / limit
        least = solution = first
        for _ in range(ROUNDS):
            if solution.plan.traffic.peak_nbytes <= limit or self.late():
                break
            held, passed = self.held_at_peak(pricing, solution)
            for name, nbytes in held.items():
                alone[name] = alone[name] + weight * nbytes
            factors += [replace(one, table=weight * one.table) for one in passed]
            solution = self.solve(_Tables(alone, factors))
            if solution.plan.traffic.peak_nbytes < least.plan.traffic.peak_nbytes:
                least = solution
        return least

    def held_at_peak(self, pricing: Pricing, solution: _Solution) -> tuple[dict[str, Table], list[Factor]]:
        """Bytes that candidates hold of what is there at the peak of a plan.

        Of what may be passed on tile by tile that depends on the candidate of its reader too.
        """
        graph, spaces, topology = self.graph, self.spaces, self.topology
        highest, at = -1, ""
        there: dict[str, int] = {}
        partitions = solution.plan.partitions
        arrived = received(graph, partitions, topology)
        for name, total, here in memory.timeline(graph, partitions, topology, arrived):
            if total > highest:
                highest, at, there = total, name, dict(here)
        alone: dict[str, Table] = {}
        factors = []
        for name, space in spaces.items():
            node = graph.nodes[name]
            step = memory.held(graph, node, space.parts, topology)
            nbytes = np.zeros(len(space))
            if name == at:
                nbytes = nbytes + step.partials
            if there.get(name) and graph.may_pass_on(name):
                factors.append(self._passed_on(pricing, node, step))
            elif there.get(name):
                nbytes = nbytes + step.result
            for source, needed in zip(node.inputs, step.operands):
                if there.get(source) and not (source in graph.nodes and graph.may_pass_on(source)):
                    nbytes = nbytes + needed
            if nbytes.any():
                alone[name] = nbytes
        return alone, factors

    def _passed_on(self, pricing: Pricing, node: Node, step: memory.Held) -> Factor:
        """Bytes held of a tensor with one reader, for every pair of candidates."""
        ((reader, operand),) = self.graph.readers[node.name]
        theirs, mine = self.spaces[node.name], self.spaces[reader]
        taking = self.graph.nodes[reader]
        passed = pricing.passed_on(node, theirs, taking, mine, taking.expression.operands[operand])
        whole, running = np.zeros((2, len(passed.table)))
        whole[passed.classes[0]], running[passed.classes[0]] = step.result, step.running
        return replace(passed, table=np.where(passed.table, running[:, None], whole[:, None]))

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
