"""Slow, plain versions of what the package does quickly: the costs, and the best plan by trying every one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

import numpy as np

from dask_eindecomp.graph import EinGraph, Node
from dask_eindecomp.partition import viable

Parts = Mapping[str, int]


def node_cost(graph: EinGraph, node: Node, parts: Parts, objective: str) -> float:
    """Join and aggregate of one expression: floats for ``paper``, bytes beyond one copy of each input for ``bytes``."""
    extents = dict(node.extents)
    total = 0.0
    for source, labels in zip(node.inputs, node.expression.operands):
        size = prod(graph.shape(source))
        copies = 1
        for label in parts:
            if label not in labels:
                copies *= parts[label]
        total += size * copies if objective == "paper" else size * (copies - 1) * graph.itemsize(source)
    result = prod(extents[label] for label in node.expression.output)
    partials = prod(parts[label] for label in parts if label not in node.expression.output)
    return total + result * (partials - 1) * (1 if objective == "paper" else np.dtype(node.dtype).itemsize)


def edge_cost(
    shape: tuple[int, ...], one: tuple[int, ...], two: tuple[int, ...], itemsize: int, objective: str
) -> float:
    """Repartition between grids that nest."""
    if one == two:
        return 0.0
    size = prod(shape)
    produced, consumed = size / prod(one), size / prod(two)
    meeting = size / prod(max(a, b) for a, b in zip(one, two))
    if objective == "paper":
        return size * produced / meeting + size * (consumed / meeting - 1)
    return (size - min(prod(one), prod(two)) * meeting) * itemsize


def plan_cost(graph: EinGraph, plan: Mapping[str, Parts], objective: str) -> float:
    """What a whole plan costs."""
    total = 0.0
    for node in graph.nodes.values():
        mine = plan[node.name]
        total += node_cost(graph, node, mine, objective)
        for source, labels in zip(node.inputs, node.expression.operands):
            if source in graph.nodes:
                one = tuple(plan[source][label] for label in graph.nodes[source].expression.output)
                two = tuple(mine[label] for label in labels)
                total += edge_cost(graph.shape(source), one, two, graph.itemsize(source), objective)
    return total


def brute_force(graph: EinGraph, tiles: int, objective: str) -> float:
    """The least cost of all plans of exactly so many tiles an expression."""
    spaces = [viable(dict(node.extents), tiles, divide=objective == "paper") for node in graph.nodes.values()]
    names = list(graph.nodes)
    return min(plan_cost(graph, dict(zip(names, plan)), objective) for plan in product(*spaces))


def evaluate(graph: EinGraph, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every tensor of a graph of sums of products, by ``np.einsum``."""
    values = dict(arrays)
    for node in graph.nodes.values():
        numbers = {label: n for n, label in enumerate(node.expression.labels)}
        operands: list[object] = []
        for source, labels in zip(node.inputs, node.expression.operands):
            operands += [values[source], [numbers[label] for label in labels]]
        values[node.name] = np.einsum(*operands, [numbers[label] for label in node.expression.output])
    return values
