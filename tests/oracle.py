"""Slow and obvious versions of what the package does fast, written from the formulas alone.

``brute_force`` adds up every assignment of candidates; ``evaluate`` runs a graph in plain NumPy, whole arrays at a
time.  Nothing here looks at ``cost`` or ``kernels``, so that an error there cannot hide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, reduce
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np

from dask_eindecomp.estimate import price
from dask_eindecomp.expression import Expression
from dask_eindecomp.graph import EinGraph, Node, Output
from dask_eindecomp.partition import Chunks, Cut, Partition
from dask_eindecomp.topology import Topology

JOINS = {
    "multiply": lambda *values: reduce(np.multiply, values),
    "add": lambda *values: reduce(np.add, values),
    "subtract": np.subtract,
    "divide": np.divide,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "squared_difference": lambda x, y: (x - y) ** 2,
    "absolute_difference": lambda x, y: abs(x - y),
    "exp_difference": lambda x, y: np.exp(x - y),
    "equal": lambda x, y: x == y,
    "less": lambda x, y: x < y,
    "logical_and": lambda *values: reduce(np.logical_and, values),
    "logical_or": lambda *values: reduce(np.logical_or, values),
    "power": lambda x, y: x**y,
    "hypot": np.hypot,
}
AGGREGATES = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "any": np.logical_or,
    "all": np.logical_and,
    "logsumexp": np.logaddexp,
    "mean": np.add,
    "count": np.add,
}


# What a graph computes


def evaluate(graph: EinGraph, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor of a graph by name, from its expressions alone."""
    values = {name: np.asarray(arrays[name]) for name in graph.inputs}
    for node in graph.nodes.values():
        operands = [values[source] for source in node.inputs]
        result = evaluate_expression(node.expression, operands, dict(node.extents))
        values[node.name] = np.asarray(result).astype(node.dtype)
    return values


def evaluate_expression(
    expression: Expression, operands: Sequence[np.ndarray], extents: Mapping[str, int]
) -> np.ndarray:
    """One expression: every operand spread over all labels, joined, and combined along what the output lacks."""
    numbers = {label: number for number, label in enumerate(expression.labels)}
    order = [numbers[label] for label in expression.output]
    known = {label for labels in expression.operands for label in labels}
    if (expression.join, expression.aggregate) == ("multiply", "sum") and known >= set(expression.output):
        pairs: list[Any] = []
        for operand, labels in zip(operands, expression.operands):
            pairs += [operand, [numbers[label] for label in labels]]
        return np.asarray(np.einsum(*pairs, order))
    every = (*expression.output, *expression.contracted)
    spread = []
    for operand, labels in zip(operands, expression.operands):
        distinct = sorted(set(labels), key=every.index)
        taken = np.einsum(operand, [numbers[one] for one in labels], [numbers[one] for one in distinct])
        axes = tuple(axis for axis, label in enumerate(every) if label not in distinct)
        spread.append(np.broadcast_to(np.expand_dims(taken, axes), [extents[label] for label in every]))
    joined = spread[0] if len(spread) == 1 else JOINS[expression.join](*spread)
    if not expression.contracted:
        return np.asarray(joined)
    if isinstance(expression.aggregate, str):
        axes = tuple(range(len(expression.output), len(every)))
        if expression.aggregate == "mean":
            return np.asarray(joined.mean(axis=axes))
        if expression.aggregate == "count":
            return np.asarray(np.count_nonzero(joined, axis=axes))
        return np.asarray(AGGREGATES[expression.aggregate].reduce(joined, axis=axes))
    rows = joined.reshape(*joined.shape[: len(expression.output)], -1)
    result = reduce(expression.aggregate.combine, np.moveaxis(rows, -1, 0))
    return np.asarray(expression.aggregate.finalize(result) if expression.aggregate.finalize else result)


# What may be chosen


def balanced(extent: int, parts: int) -> Cut:
    """``parts`` lengths that differ by at most one, the longer ones first."""
    lengths = [0] * parts
    for position in range(extent):
        lengths[position % parts] += 1
    return tuple(lengths)


def viable(extents: Mapping[str, int], tiles: int, divide: bool) -> list[dict[str, int]]:
    """Every vector of ``tiles`` tiles, or of the largest number below it that has any, out of all vectors."""
    vectors: list[dict[str, int]] = [{}]
    for label, extent in extents.items():
        vectors = [
            {**vector, label: parts}
            for vector in vectors
            for parts in range(1, max(extent, 1) + 1)
            if prod(vector.values()) * parts <= tiles and (not divide or extent % parts == 0)
        ]
    numbers = {prod(vector.values()) for vector in vectors}
    if divide and tiles & (tiles - 1) == 0:
        numbers = {number for number in numbers if number & (number - 1) == 0}
    return [vector for vector in vectors if prod(vector.values()) == max(numbers)]


def candidates(graph: EinGraph, tiles: Sequence[int], objective: str) -> dict[str, list[Partition]]:
    """Every partition that a planner of this objective may choose, for each of these numbers of tiles."""
    seen: dict[tuple[int, int], Counter[Cut]] = {}
    layouts = [one.chunks for one in graph.inputs.values() if one.chunks]
    layouts += [one.chunks for one in graph.outputs if one.chunks]
    for axis in (axis for chunks in layouts for axis in chunks if objective == "seconds"):
        seen.setdefault((sum(axis), len(axis)), Counter())[axis] += 1
    there = {key: max(counts, key=lambda axis: (counts[axis], axis)) for key, counts in seen.items()}
    found: dict[str, list[Partition]] = {}
    for node in graph.nodes.values():
        vectors = [
            vector
            for number in tiles
            for vector in viable(dict(node.extents), number, divide=objective == "paper")
        ]
        cuts = [
            tuple(
                (label, there.get((extent, vector[label])) or balanced(extent, vector[label]))
                for label, extent in node.extents
            )
            for vector in vectors
        ]
        found[node.name] = [Partition(one) for one in dict.fromkeys(cuts)]
    return found


# What a choice costs


def node_cost(graph: EinGraph, node: Node, parts: Mapping[str, int], objective: str) -> float:
    """Join and aggregate: floats in the worst case (paper), or bytes beyond one copy of everything (bytes)."""
    extents, total = dict(node.extents), 0
    for labels, source in zip(node.expression.operands, node.inputs):
        copies = prod(parts[label] for label in extents if label not in labels)
        if objective == "paper":
            total += prod(graph.shape(source)) * copies
        else:  # of a tensor read along its diagonal, the diagonal
            size = prod(extents[label] for label in set(labels))
            total += size * (copies - 1) * np.dtype(graph.dtype(source)).itemsize
    partials = prod(parts[label] for label in extents if label not in node.expression.output)
    combined = prod(node.shape) * (partials - 1)
    return total + combined * (1 if objective == "paper" else np.dtype(node.dtype).itemsize)


def intervals(chunks: Cut) -> list[tuple[int, int]]:
    """Where each chunk begins and ends."""
    return [(sum(chunks[:n]), sum(chunks[: n + 1])) for n in range(len(chunks))]


@cache
def shared(produced: Cut, consumed: Cut) -> tuple[tuple[int, ...], ...]:
    """Elements that each chunk of one cut has in common with each of another."""
    return tuple(
        tuple(max(0, min(stop, until) - max(start, since)) for since, until in intervals(consumed))
        for start, stop in intervals(produced)
    )


def edge_cost(
    shape: tuple[int, ...], produced: Chunks, consumed: Chunks, objective: str, copies: int = 1
) -> float:
    """Repartition in elements: the published figure, or what is missing at the best overlap, one tile a worker.

    Each of the workers that want a copy has in place what it holds of it.
    """
    size = prod(shape)
    if produced == consumed or not size:
        return 0
    some, other = prod(map(len, produced)), prod(map(len, consumed))
    if objective == "paper":
        meeting = size / prod(max(len(p), len(c)) for p, c in zip(produced, consumed))
        return size * (size / some) / meeting + size * ((size / other) / meeting - 1)
    meeting = prod(max(map(max, shared(p, c))) for p, c in zip(produced, consumed))
    return size - min(min(some, other * copies) * meeting, size)


def delivery_cost(produced: Chunks, consumed: Chunks) -> int:
    """Elements shipped where each block that leaves is put together where its largest piece lies."""
    missing = 0
    for block in product(*(range(len(axis)) for axis in consumed)):
        pieces = [
            prod(shared(p, c)[i][j] for p, c, i, j in zip(produced, consumed, tile, block))
            for tile in product(*(range(len(axis)) for axis in produced))
        ]
        missing += sum(pieces) - max(pieces)
    return missing


@cache
def given_cost(
    chunks: Chunks, owners: tuple[int, ...] | None, consumed: Chunks, workers: int, copies: int
) -> int:
    """Elements shipped from blocks that have owners, one copy of everything aside for each copy but one.

    Each copy of a tile is where most of it lies, dealt out evenly.
    """
    blocks = list(product(*(range(len(axis)) for axis in chunks)))
    tiles = list(product(*(range(len(axis)) for axis in consumed)))
    if owners is None:
        owners = tuple(number * workers // len(blocks) for number in range(len(blocks)))
    held = {(worker, number): 0 for worker in range(workers) for number in range(len(tiles))}
    for owner, block in zip(owners, blocks):
        for number, tile in enumerate(tiles):
            held[owner, number] += prod(
                shared(p, c)[i][j] for p, c, i, j in zip(chunks, consumed, block, tile)
            )
    load, had, stays = Counter[int](), Counter[int](), 0
    most = -(-len(tiles) * copies // workers)
    for worker, number in sorted(held, key=lambda pair: -held[pair]):
        if had[number] < copies and load[worker] < most:
            had[number] += 1
            load[worker] += 1
            stays += held[worker, number]
    return max(sum(prod(axis[n] for axis, n in zip(consumed, tile)) for tile in tiles) - stays, 0)


def plan_cost(
    graph: EinGraph, partitions: Mapping[str, Partition], objective: str, topology: Topology
) -> float:
    """What one assignment costs, expression by expression and edge by edge."""
    if objective == "seconds":
        return price(graph, partitions, topology).cost
    alone = sum(
        node_cost(graph, node, partitions[node.name].parts, objective) for node in graph.nodes.values()
    )
    read = sum(
        _read(graph, source, partitions.get(source), partitions[reader], labels, objective, topology)
        for source, reader, labels in _edges(graph)
    )
    return (
        alone
        + read
        + sum(
            _delivered(graph, output, partitions[output.source], topology)
            for output in graph.outputs
            if objective == "bytes" and output.source in partitions
        )
    )


def brute_force(
    graph: EinGraph, candidates: Mapping[str, Sequence[Partition]], objective: str, topology: Topology
) -> float:
    """The least total cost of all assignments, every one of them added up."""
    names = list(candidates)
    if objective == "seconds":
        return min(
            price(graph, dict(zip(names, chosen)), topology).cost for chosen in product(*candidates.values())
        )
    total = np.zeros([len(candidates[name]) for name in names])
    for name, node in graph.nodes.items():
        costs = [node_cost(graph, node, one.parts, objective) for one in candidates[name]]
        total += _along(np.array(costs, dtype=float), [name], names)
        for labels, source in zip(node.expression.operands, node.inputs):
            table = np.array(
                [
                    [
                        _read(graph, source, theirs, mine, labels, objective, topology)
                        for mine in candidates[name]
                    ]
                    for theirs in candidates.get(source, [None])
                ],
                dtype=float,
            )
            total += (
                _along(table, [source, name], names)
                if source in candidates
                else _along(table[0], [name], names)
            )
    for output in graph.outputs:
        if objective == "bytes" and output.chunks is not None and output.source in candidates:
            costs = [_delivered(graph, output, one, topology) for one in candidates[output.source]]
            total += _along(np.array(costs, dtype=float), [output.source], names)
    return float(total.min())


def _edges(graph: EinGraph) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Every tensor that an expression reads, the expression, and the labels it reads it with."""
    for node in graph.nodes.values():
        for labels, source in zip(node.expression.operands, node.inputs):
            yield source, node.name, labels


def _delivered(graph: EinGraph, output: Output, mine: Partition, topology: Topology) -> float:
    """What cutting a result into the chunks it was promised in costs."""
    produced = mine.grid(graph.nodes[output.source].expression.output)
    if output.chunks is None or topology.workers == 1:
        return 0
    return delivery_cost(produced, output.chunks) * np.dtype(graph.dtype(output.source)).itemsize


def _read(
    graph: EinGraph,
    source: str,
    theirs: Partition | None,
    mine: Partition,
    labels: tuple[str, ...],
    objective: str,
    topology: Topology,
) -> float:
    """What reading ``source`` with these labels costs."""
    wanted = mine.grid(labels)
    copies = prod(parts for label, parts in mine.parts.items() if label not in labels)
    itemsize = 1 if objective == "paper" else np.dtype(graph.dtype(source)).itemsize
    if theirs is not None:
        produced = theirs.grid(graph.nodes[source].expression.output)
        return itemsize * edge_cost(graph.shape(source), produced, wanted, objective, copies)
    given = graph.inputs[source]
    if objective == "paper" or given.chunks is None:
        return 0
    if not given.stays:  # each block is made where most of it is wanted
        return itemsize * delivery_cost(wanted, given.chunks) if topology.workers > 1 else 0
    return itemsize * given_cost(given.chunks, given.owners, wanted, topology.workers, copies)


def _along(table: np.ndarray, scope: list[str], names: list[str]) -> np.ndarray:
    """A table over some variables, shaped to be added to one over all of them."""
    order = sorted(range(len(scope)), key=lambda axis: names.index(scope[axis]))
    lengths = {name: length for name, length in zip(scope, table.shape)}
    return table.transpose(order).reshape([lengths.get(name, 1) for name in names])


# What must move at least


def least_bytes(graph: EinGraph, workers: int) -> int:
    """Fewest bytes that must move: every grid of one tile a worker, and every placement of its tiles, is tried.

    For graphs in which an expression reads one other expression at most and given tensors have owners.  Partial
    results may be added up with any of them, and blocks that leave may be put together anywhere.
    """
    reached: dict[str, dict[tuple[Any, ...], int]] = {}
    for node in graph.nodes.values():
        options: dict[tuple[Any, ...], int] = {}
        for parts in viable(dict(node.extents), workers, divide=False):
            mine = Partition.balanced(dict(node.extents), parts)
            for state, moved in _placements(graph, node, mine, workers, reached):
                options[state] = min(moved, options.get(state, moved))
        reached[node.name] = options
    (output,) = graph.outputs
    itemsize = graph.itemsize(output.source)
    return min(
        moved + (0 if output.chunks is None else itemsize * _put_together(state, output.chunks, workers))
        for state, moved in reached[output.source].items()
    )


def _placements(
    graph: EinGraph,
    node: Node,
    mine: Partition,
    workers: int,
    reached: Mapping[str, Mapping[tuple[Any, ...], int]],
) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Grid and owners of a result, with the bytes moved up to it, for every placement of the tiles of one grid."""
    labels = node.expression.labels
    tiles = list(product(*(range(mine.parts[label]) for label in labels)))
    ways = np.array(list(permutations(range(workers), len(tiles))))
    total = np.zeros(len(ways), dtype=int)
    for operand, source in zip(node.expression.operands, node.inputs):
        shape = [mine.parts[label] for label in operand]
        index = [[tile[labels.index(label)] for tile in tiles] for label in operand]
        numbers = np.ravel_multi_index(index, shape) if shape else np.zeros(len(tiles), dtype=int)
        given = graph.inputs.get(source)
        states: Mapping[Any, int] = reached[source] if given is None else {(given.chunks, given.owners): 0}
        lacking = [
            moved + _lacking(state, mine.grid(operand), numbers, ways, workers) * graph.itemsize(source)
            for state, moved in states.items()
        ]
        total = total + np.min(lacking, axis=0)
    grid = mine.grid(node.expression.output)
    combined = [n for n, label in enumerate(labels) if label not in node.expression.output]
    blocks: dict[tuple[int, ...], list[int]] = {}
    for number, tile in enumerate(tiles):
        blocks.setdefault(tuple(tile[labels.index(one)] for one in node.expression.output), []).append(number)
    sizes = [prod(axis[n] for axis, n in zip(grid, block)) for block in sorted(blocks)]
    partial = sum(sizes) * (prod(mine.parts[labels[n]] for n in combined) - 1) * np.dtype(node.dtype).itemsize
    for way, moved in zip(ways, total):
        for chosen in product(*(blocks[block] for block in sorted(blocks))):
            yield (grid, tuple(int(way[number]) for number in chosen)), int(moved) + partial


def _lacking(
    state: tuple[Any, ...], wanted: Chunks, numbers: np.ndarray, ways: np.ndarray, workers: int
) -> np.ndarray:
    """Elements that tiles lack of the wanted blocks of these numbers, for every way to place them."""
    there, sizes = _there(*state, wanted, workers)
    return np.asarray((sizes[:, None] - there)[numbers][np.arange(len(numbers)), ways].sum(axis=1))


def _there(
    chunks: Chunks, owners: tuple[int, ...], wanted: Chunks, workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Elements of each wanted block that each worker has, and of each wanted block."""
    overlap = np.ones((1, 1), dtype=int)
    for have, want in zip(chunks, wanted):
        overlap = np.kron(overlap, np.array(shared(have, want)))
    there = np.zeros((overlap.shape[1], workers), dtype=int)
    for row, owner in zip(overlap, owners):
        there[:, owner] += row
    return there, overlap.sum(axis=0)


def _put_together(state: tuple[Any, ...], chunks: Chunks, workers: int) -> int:
    """Elements that must move for blocks that leave, each made where most of it is."""
    there, sizes = _there(*state, chunks, workers)
    return int((sizes - there.max(axis=1)).sum())
