"""The least-cost partition of every expression.

One variable an expression, its values the candidate partitions; a cost for each value and, for every edge, a cost for
each pair of values.  ``elimination`` finds the least sum exactly, on any DAG.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from dask_eindecomp import cost
from dask_eindecomp.cost import Traffic
from dask_eindecomp.elimination import Table, minimise
from dask_eindecomp.expression import Labels
from dask_eindecomp.graph import EinGraph, Node
from dask_eindecomp.partition import Chunks, Cut, Partition, cut, viable
from dask_eindecomp.plan import Choice, Plan
from dask_eindecomp.topology import Topology

__all__ = ["OBJECTIVES", "DecomposeError", "decompose", "price"]

OBJECTIVES = ("paper", "bytes", "seconds")
CANDIDATE_CAP = 600


class DecomposeError(ValueError):
    """A planning request that makes no sense."""


def decompose(
    graph: EinGraph,
    *,
    tiles: int | None = None,
    objective: str | None = None,
    topology: Topology | None = None,
    memory_limit: int | None = None,
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
        Bytes that one worker's tiles may need.  Default: 0.6 of the topology's memory; for the objective
        ``"seconds"`` only.

    Raises
    ------
    DecomposeError
        If the objective is unknown, ``tiles`` is not positive, or neither tiles nor a topology is given.
    """
    objective = objective or "seconds"
    if objective not in OBJECTIVES:
        raise DecomposeError(f"unknown objective {objective!r}; expected one of {', '.join(OBJECTIVES)}")
    if tiles is not None and tiles < 1:
        raise DecomposeError(f"cannot plan for {tiles} tiles; expected at least 1")
    if topology is None:
        if tiles is None:
            raise DecomposeError("neither tiles nor a topology was given; expected one of them")
        topology = Topology(workers=tiles)
    limit = int(0.6 * topology.memory) if memory_limit is None else memory_limit
    pricing = _Pricing(graph, objective, topology)
    spaces = _spaces(pricing, tiles, limit)
    indices, value, gap = minimise(*_tables(pricing, spaces))
    partitions = {name: space.partition(indices[name]) for name, space in spaces.items()}
    plan = price(graph, partitions, topology)
    return replace(plan, cost=value, objective=objective, gap=gap)


def price(graph: EinGraph, partitions: Mapping[str, Partition], topology: Topology) -> Plan:
    """The plan that uses these partitions: what it moves and how long it takes.

    Its cost is in seconds, the sum of what its choices and its delivery take.
    """
    pricing = _Pricing(graph, "seconds", topology)
    choices = []
    for node in graph.nodes.values():
        mine = partitions[node.name]
        joined, combined = pricing.node_traffic(node, mine.parts)
        moved = Traffic()
        seconds = pricing.node_seconds(node, mine.parts)
        for position, source in enumerate(node.inputs):
            wanted = mine.grid(node.expression.operands[position])
            step = pricing.edge_traffic(source, partitions, wanted)
            saved = pricing.saved_tasks(source, partitions, node, mine, wanted)
            moved += step
            joined = replace(joined, tasks=joined.tasks - saved)
            seconds += topology.move_seconds(step) - saved * topology.task_overhead
        held = _working_set(graph, node, mine.parts, topology)
        joined = replace(joined, peak_nbytes=held)
        reason = _reason(graph, node, mine, topology)
        title = node.title or node.name
        choices.append(
            Choice(node.name, str(node.expression), mine, joined, combined, moved, seconds, reason, title)
        )
    deliveries = [
        pricing.edge_traffic(output.source, partitions, output.chunks)
        for output in graph.outputs
        if output.chunks is not None
    ]
    # messages are shared out anew for each result, so seconds are added, not derived from the sum
    delivered = sum(map(topology.move_seconds, deliveries))
    total = sum(choice.seconds for choice in choices) + delivered
    return Plan(
        tuple(choices),
        total,
        "seconds",
        topology,
        delivery=sum(deliveries, Traffic()),
        delivery_seconds=delivered,
        left_alone=graph.left_alone,
    )


def _reason(graph: EinGraph, node: Node, mine: Partition, topology: Topology) -> str:
    """Why this partition, in a few words."""
    cut_labels = [label for label, parts in mine.parts.items() if parts > 1]
    if mine.tiles == 1:
        return "too small to share" if topology.slots > 1 else "one worker"
    if mine.cuts == node.came:
        return "as it came"
    if all(label in node.expression.contracted for label in cut_labels):
        return "partial results are small"
    if any(label in node.expression.contracted for label in cut_labels):
        return "balances inputs against partial results"
    return "no partial results"


def _working_set(graph: EinGraph, node: Node, parts: Mapping[str, int], topology: Topology) -> int:
    """Bytes that the tiles one worker computes at a time read and write."""
    extents = dict(node.extents)

    def tile(labels: Labels) -> int:
        return prod(-(-extents[label] // parts[label]) for label in dict.fromkeys(labels))

    read = sum(
        tile(labels) * graph.itemsize(source) for labels, source in zip(node.expression.operands, node.inputs)
    )
    each = read + tile(node.expression.output) * np.dtype(node.dtype).itemsize
    at_once = min(topology.threads, -(-prod(parts.values()) // topology.workers))
    return int(each * at_once)


@dataclass(frozen=True)
class _Pricing:
    """Costs of one partition and of one edge, for one objective."""

    graph: EinGraph
    objective: str
    topology: Topology

    def node_traffic(self, node: Node, parts: Mapping[str, int]) -> tuple[Traffic, Traffic]:
        """Join and aggregate of one expression."""
        extents = dict(node.extents)
        itemsizes = tuple(self.graph.itemsize(source) for source in node.inputs)
        workers = self.topology.workers
        joined = cost.join_traffic(node.expression, extents, parts, itemsizes, workers)
        itemsize = np.dtype(node.dtype).itemsize
        combined = cost.aggregate_traffic(node.expression, extents, parts, itemsize, workers)
        return joined, combined

    def node_seconds(self, node: Node, parts: Mapping[str, int]) -> float:
        """Seconds of one expression, edges not counted."""
        joined, combined = self.node_traffic(node, parts)
        itemsize = np.dtype(node.dtype).itemsize
        topology = self.topology
        tiles = prod(parts.values())
        results = prod(parts[label] for label in node.expression.output)
        return (
            topology.compute_seconds(joined.flops, tiles, node.kernel, itemsize)
            + topology.compute_seconds(combined.flops, results, "stream", itemsize)
            + topology.move_seconds(joined)
            + topology.move_seconds(combined)
        )

    def node_cost(self, node: Node, parts: Mapping[str, int]) -> float:
        """Cost of one expression under the objective."""
        if self.objective == "paper":
            extents = dict(node.extents)
            return float(
                cost.paper_join(node.expression, extents, parts)
                + cost.paper_aggregate(node.expression, extents, parts)
            )
        if self.objective == "bytes":
            joined, combined = self.node_traffic(node, parts)
            return float(joined.nbytes + combined.nbytes)
        return self.node_seconds(node, parts)

    def edge_traffic(self, source: str, partitions: Mapping[str, Partition], wanted: Chunks) -> Traffic:
        """What it takes to read ``source`` in the chunks ``wanted``."""
        itemsize, workers = self.graph.itemsize(source), self.topology.workers
        given = self.graph.inputs.get(source)
        if given is None:
            node = self.graph.nodes[source]
            return cost.repartition_traffic(
                partitions[source].grid(node.expression.output), wanted, itemsize, workers
            )
        if given.chunks is None:
            return Traffic()
        return cost.given_traffic(given.chunks, given.owners, wanted, itemsize, workers)

    def given_cost(self, source: str, wanted: Chunks) -> float:
        """Cost of reading a given tensor in the chunks ``wanted``."""
        if self.objective == "paper":
            return 0.0
        step = self.edge_traffic(source, {}, wanted)
        return float(step.nbytes) if self.objective == "bytes" else self.topology.move_seconds(step)

    def saved_tasks(
        self, source: str, partitions: Mapping[str, Partition], reader: Node, mine: Partition, wanted: Chunks
    ) -> int:
        """Tasks of ``source`` that run inside those of its reader."""
        if not self.graph.may_inline(source, reader.name):
            return 0
        theirs = partitions[source]
        grid = theirs.grid(self.graph.nodes[source].expression.output)
        blocks = prod(map(len, grid))
        return blocks if grid == wanted and blocks == theirs.tiles == mine.tiles else 0


@dataclass(frozen=True)
class _Space:
    """The candidate partitions of one expression as indices into the cuts of each label."""

    labels: Labels
    cuts: tuple[tuple[Cut, ...], ...]
    """For each label the distinct cuts that occur."""
    index: npt.NDArray[np.int64]
    """Candidates by labels: which cut."""

    @classmethod
    def of(cls, labels: Labels, candidates: list[tuple[Cut, ...]]) -> _Space:
        columns = [list(dict.fromkeys(column)) for column in zip(*candidates)] if labels else []
        index = np.array(
            [[column.index(one) for column, one in zip(columns, candidate)] for candidate in candidates],
            dtype=np.int64,
        ).reshape(len(candidates), len(labels))
        return cls(labels, tuple(map(tuple, columns)), index)

    def __len__(self) -> int:
        return len(self.index)

    def partition(self, candidate: int) -> Partition:
        """One candidate."""
        chosen = self.index[candidate]
        return Partition(tuple((label, self.cuts[n][chosen[n]]) for n, label in enumerate(self.labels)))

    def project(self, labels: Labels) -> tuple[list[Chunks], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Distinct grids of a tensor with these labels, their cut indices, and which one each candidate has."""
        columns = [self.labels.index(label) for label in labels]
        if not columns:
            return [()], np.zeros((1, 0), dtype=np.int64), np.zeros(len(self), dtype=np.int64)
        rows, inverse = np.unique(self.index[:, columns], axis=0, return_inverse=True)
        grids = [tuple(self.cuts[c][i] for c, i in zip(columns, row)) for row in rows]
        return grids, rows, inverse.reshape(-1)


def _spaces(pricing: _Pricing, tiles: int | None, limit: int) -> dict[str, _Space]:
    """Candidate partitions of every expression."""
    graph, topology = pricing.graph, pricing.topology
    if tiles is not None or pricing.objective != "seconds":
        counts = [tiles or topology.slots]
    else:
        slots = topology.slots
        fewer = [slots >> shift for shift in range(slots.bit_length())]
        counts = sorted({1, *fewer, slots, 2 * slots, 4 * slots})
    usual = _usual_cuts(graph) if pricing.objective == "seconds" else {}
    known: dict[object, _Space] = {}
    spaces = {}
    for node in graph.nodes.values():
        # equal expressions, the repeated layers of a model, share one space and so every table made of it
        key = (_signature(graph, node), node.came)
        if key not in known:
            found: dict[tuple[int, ...], None] = {}
            for count in counts:
                for parts in viable(dict(node.extents), count, divide=pricing.objective == "paper"):
                    found.setdefault(tuple(parts[label] for label, _ in node.extents))
            candidates = _candidates(pricing, node, list(found), usual, tiles is None, limit)
            known[key] = _Space.of(tuple(label for label, _ in node.extents), candidates)
        spaces[node.name] = known[key]
    return spaces


def _signature(graph: EinGraph, node: Node) -> object:
    """What the costs of an expression by itself depend on."""
    return (
        node.expression,
        node.extents,
        node.dtype,
        node.kernel,
        tuple(graph.dtype(one) for one in node.inputs),
    )


def _candidates(
    pricing: _Pricing,
    node: Node,
    proposals: list[tuple[int, ...]],
    usual: Mapping[tuple[int, int], Cut],
    with_came: bool,
    limit: int,
) -> list[tuple[Cut, ...]]:
    """The cuts of every proposed number of parts, and those the graph came with."""
    labels = [label for label, _ in node.extents]
    if len(proposals) > CANDIDATE_CAP:
        costs = [pricing.node_cost(node, dict(zip(labels, parts))) for parts in proposals]
        proposals = [proposals[n] for n in np.argsort(costs, kind="stable")[:CANDIDATE_CAP]]
    candidates = [
        tuple(usual.get((extent, n)) or cut(extent, n) for n, (_, extent) in zip(parts, node.extents))
        for parts in proposals
    ]
    if pricing.objective != "seconds":
        return candidates
    if node.came and with_came:
        candidates.append(tuple(chunks for _, chunks in node.came))
    return _that_fit(pricing.graph, node, list(dict.fromkeys(candidates)), pricing.topology, limit)


def _usual_cuts(graph: EinGraph) -> dict[tuple[int, int], Cut]:
    """The cut that arrays of the graph already have, by extent and number of parts: lining up with it costs nothing."""
    seen: dict[tuple[int, int], Counter[Cut]] = {}
    layouts = [chunks for tensor in graph.inputs.values() if (chunks := tensor.chunks)]
    layouts += [output.chunks for output in graph.outputs if output.chunks]
    for chunks in (*layouts, *(tuple(axis for _, axis in node.came) for node in graph.nodes.values())):
        for axis in chunks:
            seen.setdefault((sum(axis), len(axis)), Counter())[axis] += 1
    return {key: max(counts, key=lambda axis: (counts[axis], axis)) for key, counts in seen.items()}


def _that_fit(
    graph: EinGraph, node: Node, candidates: list[tuple[Cut, ...]], topology: Topology, limit: int
) -> list[tuple[Cut, ...]]:
    """Candidates whose working set is within the limit; the one that needs least if none is."""
    labels = [label for label, _ in node.extents]
    sizes = [
        _working_set(graph, node, dict(zip(labels, map(len, candidate))), topology)
        for candidate in candidates
    ]
    fit = [candidate for candidate, size in zip(candidates, sizes) if size <= limit]
    return fit or [candidates[int(np.argmin(sizes))]]


def _tables(
    pricing: _Pricing, spaces: Mapping[str, _Space]
) -> tuple[dict[str, Table], dict[tuple[str, str], Table]]:
    """A cost for every candidate and, for every edge, one for every pair."""
    graph = pricing.graph
    alone: dict[str, Table] = {}
    pairs: dict[tuple[str, str], Table] = {}
    memo: dict[object, Table] = {}
    for node in graph.nodes.values():
        space = spaces[node.name]
        key: object = (id(space), _signature(graph, node))
        if key not in memo:
            memo[key] = np.array(
                [pricing.node_cost(node, space.partition(n).parts) for n in range(len(space))]
            )
        alone[node.name] = memo[key].copy()
    for node in graph.nodes.values():
        space = spaces[node.name]
        for labels, source in zip(node.expression.operands, node.inputs):
            grids, _, which = space.project(labels)
            if source in graph.inputs:
                alone[node.name] += np.array([pricing.given_cost(source, grid) for grid in grids])[which]
                continue
            producer = graph.nodes[source]
            inline = pricing.objective == "seconds" and graph.may_inline(source, node.name)
            key = (id(spaces[source]), producer.expression.output, producer.dtype, id(space), labels, inline)
            if key not in memo:
                memo[key] = _edge(pricing, producer, spaces[source], space, labels, inline)
            table = memo[key]
            pair = (source, node.name)
            pairs[pair] = pairs[pair] + table if pair in pairs else table
    if pricing.objective != "paper":
        for output in graph.outputs:
            if output.chunks is not None and output.source in graph.nodes:
                producer = graph.nodes[output.source]
                grids, rows, which = spaces[output.source].project(producer.expression.output)
                target = _Space.of(tuple(map(str, range(len(output.chunks)))), [output.chunks])
                _, wanted, _ = target.project(target.labels)
                table = _between(
                    pricing, producer, spaces[output.source], rows, target, target.labels, wanted
                )
                alone[output.source] += table[which, 0]
    return alone, pairs


def _edge(
    pricing: _Pricing, producer: Node, theirs: _Space, mine: _Space, labels: Labels, inline: bool
) -> Table:
    """Repartition cost for every pair of candidates of a producer and its reader."""
    grids, rows, which = theirs.project(producer.expression.output)
    wanted, columns, mine_which = mine.project(labels)
    table = _between(pricing, producer, theirs, rows, mine, labels, columns)[which][:, mine_which]
    if inline:
        blocks = np.array([prod(map(len, grid)) for grid in grids])[which]
        their_tiles, my_tiles = _tile_counts(theirs), _tile_counts(mine)
        aligned = np.array([[grid == other for other in wanted] for grid in grids])[which][:, mine_which]
        inlined = aligned & (blocks == their_tiles)[:, None] & (blocks[:, None] == my_tiles[None, :])
        table = table - inlined * blocks[:, None] * pricing.topology.task_overhead
    return table


def _tile_counts(space: _Space) -> npt.NDArray[np.int64]:
    """Number of tiles of every candidate."""
    counts = np.ones(len(space), dtype=np.int64)
    for column, cuts in enumerate(space.cuts):
        counts *= np.array([len(one) for one in cuts])[space.index[:, column]]
    return counts


def _between(
    pricing: _Pricing,
    producer: Node,
    theirs: _Space,
    rows: npt.NDArray[np.int64],
    mine: _Space,
    labels: Labels,
    columns: npt.NDArray[np.int64],
) -> Table:
    """Cost between distinct grids: ``cost.repartition_traffic`` and its kin, over whole tables at once."""
    shape = (len(rows), len(columns))
    meeting, finer, coarser = np.ones(shape), np.ones(shape), np.ones(shape)
    pieces, whole, equal = np.ones(shape), np.ones(shape), np.ones(shape, dtype=bool)
    some, other = np.ones(len(rows)), np.ones(len(columns))
    for axis, label in enumerate(producer.expression.output):
        produced = theirs.cuts[theirs.labels.index(label)]
        consumed = mine.cuts[mine.labels.index(labels[axis])]
        i, j = rows[:, axis], columns[:, axis]
        counts = np.array([[_axis_counts(p, c) for c in consumed] for p in produced], dtype=np.float64)
        picked = counts[i][:, j]
        p, c = picked[..., 0], picked[..., 1]
        meeting *= picked[..., 2]
        pieces *= picked[..., 3]
        whole *= picked[..., 4]
        equal &= picked[..., 5] > 0
        finer *= np.maximum(p / c, 1)
        coarser *= np.maximum(c / p, 1)
        some *= np.array([len(one) for one in produced])[i]
        other *= np.array([len(one) for one in consumed])[j]
    size = float(prod(producer.shape))
    itemsize = np.dtype(producer.dtype).itemsize
    if pricing.objective == "paper":
        if not size:
            return np.zeros(shape)
        parts = size / np.maximum(finer * other[None, :], 1)  # elements where the two grids meet
        moved = size * (size / some)[:, None] / parts + size * ((size / other)[None, :] / parts - 1)
        return np.asarray(np.where(equal, 0.0, moved))
    workers = pricing.topology.workers
    few, many = np.minimum(some, workers), np.minimum(other, workers)
    grown = np.minimum((some / few)[:, None], finer) * np.minimum((other / many)[None, :], coarser)
    # the tolerance keeps the floor equal to that of exact fractions
    held = np.minimum(np.floor(np.minimum(few[:, None], many[None, :]) * meeting * grown + 1e-6), size)
    nbytes = np.where(equal | (workers == 1), 0.0, size - held) * itemsize
    if pricing.objective == "bytes":
        return np.asarray(nbytes)
    tasks = np.where(equal, 0.0, np.maximum(pieces - whole, 0))
    seconds = tasks * pricing.topology.task_overhead
    if workers > 1:
        messages = np.where(nbytes > 0, tasks, 0)
        seconds = seconds + nbytes / workers / pricing.topology.bandwidth
        seconds = seconds + np.ceil(messages / workers) * pricing.topology.latency
    return np.asarray(seconds)


def _axis_counts(produced: Cut, consumed: Cut) -> tuple[int, int, int, int, int, bool]:
    """Of one axis: parts of both, largest overlap, pieces, whole pieces, whether equal."""
    pieces, whole = cost.axis_pieces(produced, consumed)
    return (
        len(produced),
        len(consumed),
        cost.largest_overlap(produced, consumed),
        pieces,
        whole,
        produced == consumed,
    )
