"""What a plan moves, how long it takes and how much a worker holds, expression by expression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dask_eindecomp.cost import Traffic
from dask_eindecomp.graph import EinGraph, Node
from dask_eindecomp.memory import timeline
from dask_eindecomp.partition import Partition
from dask_eindecomp.plan import Choice, Plan
from dask_eindecomp.pricing import Pricing
from dask_eindecomp.topology import Topology

__all__ = ["price", "received"]


def price(graph: EinGraph, partitions: Mapping[str, Partition], topology: Topology) -> Plan:
    """The plan that uses these partitions: what it moves, how long it takes and how much a worker holds.

    Its cost is in seconds, the sum of what its choices and its delivery take.
    """
    pricing = Pricing(graph, "seconds", topology)
    known: dict[object, Choice] = {}
    alike = {name: _priced_alike(pricing, partitions, node) for name, node in graph.nodes.items()}
    arrived = _received(pricing, partitions, alike)
    steps = [peak for _, peak, _ in timeline(graph, partitions, topology, arrived)]
    peaks = dict(zip(graph.nodes, steps))
    joins: dict[object, Traffic] = {}
    choices = []
    for node in graph.nodes.values():
        key, peak = alike[node.name], peaks[node.name]
        if key not in known:
            known[key] = _choice(pricing, partitions, node)
        one = known[key]
        if (key, peak) not in joins:
            joins[key, peak] = replace(one.join, peak_nbytes=peak)
        joined, moved = joins[key, peak], (one.aggregate, one.repartition)
        readers = graph.readers[node.name]
        into = readers[0][0] if len(readers) == 1 else ""
        inside = into if into and graph.inlines(node.name, into, partitions) else ""
        title = node.title or node.name
        choices.append(
            Choice(node.name, one.einsum, one.cuts, joined, *moved, one.seconds, one.reason, title, inside)
        )
    delivered, delivery_seconds = [], 0.0
    for output in graph.outputs:
        if output.chunks is not None and output.source in graph.nodes:
            node = graph.nodes[output.source]
            produced = partitions[node.name].grid(node.expression.output)
            step = pricing.delivery_traffic(produced, output.chunks, np.dtype(node.dtype).itemsize)
            delivered.append(step)
            # messages are shared out anew for each result, so seconds are added, not derived from the sum
            delivery_seconds += pricing.delivery_seconds(produced, output.chunks, step, node)
    total = sum(choice.seconds for choice in choices) + delivery_seconds
    return Plan(
        tuple(choices),
        total,
        "seconds",
        topology,
        delivery=sum(delivered, Traffic(peak_nbytes=max(steps[len(graph.nodes) :], default=0))),
        delivery_seconds=delivery_seconds,
        left_alone=graph.left_alone,
    )


def received(
    graph: EinGraph, partitions: Mapping[str, Partition], topology: Topology
) -> dict[str, tuple[int, ...]]:
    """Bytes of each operand of every expression that reach one worker: slices it lacks, and copies beyond the first."""
    pricing = Pricing(graph, "seconds", topology)
    alike = {name: _priced_alike(pricing, partitions, node) for name, node in graph.nodes.items()}
    return _received(pricing, partitions, alike)


def _received(
    pricing: Pricing, partitions: Mapping[str, Partition], alike: Mapping[str, object]
) -> dict[str, tuple[int, ...]]:
    """The same, once for all that are priced alike."""
    known: dict[object, tuple[int, ...]] = {}
    found = {}
    for name, node in pricing.graph.nodes.items():
        key = alike[name]
        if key not in known:
            known[key] = pricing.received(node, partitions)
        found[name] = known[key]
    return found


def _priced_alike(pricing: Pricing, partitions: Mapping[str, Partition], node: Node) -> tuple[object, ...]:
    """What the price of an expression depends on: equal for the repeated layers of a model."""
    graph = pricing.graph
    edges = [
        (pricing.form(graph.nodes[one]), id(partitions[one]), graph.may_inline(one, node.name))
        for one in node.inputs
        if one in graph.nodes
    ]
    return (pricing.form(node), id(partitions[node.name]), *edges)


def _choice(pricing: Pricing, partitions: Mapping[str, Partition], node: Node) -> Choice:
    """One expression priced; the tasks it takes over from those it reads are taken off."""
    topology, mine = pricing.topology, partitions[node.name]
    joined, combined = pricing.node_traffic(node, mine.parts)
    moved, taken = Traffic(), 0
    seconds = float(pricing.node_seconds(node, mine.parts))
    for labels, source in zip(node.expression.operands, node.inputs):
        wanted = mine.grid(labels)
        step = pricing.edge_traffic(source, partitions, node, labels)
        inside = mine.tiles if pricing.graph.inlines(source, node.name, partitions) else 0
        moved += step
        taken += inside
        _, copies = pricing.between_workers(node, mine.parts, labels)
        seconds += pricing.edge_seconds(source, partitions, wanted, step, copies, node, labels)
        seconds -= float(pricing.spared_seconds(inside))
    joined = replace(joined, tasks=joined.tasks - taken)
    return Choice(
        node.name,
        str(node.expression),
        mine,
        joined,
        combined,
        moved,
        seconds,
        _reason(node, mine, topology),
    )


def _reason(node: Node, mine: Partition, topology: Topology) -> str:
    """Why this partition, in a few words."""
    cut_labels = [label for label, parts in mine.parts.items() if parts > 1]
    if mine.tiles == 1:
        return "too small to share" if topology.slots > 1 else "one worker"
    if node.pinned:
        return f"fixed by hand: {', '.join(label for label, _ in node.pinned)}"
    if mine.cuts == node.came:
        return "as it came"
    if all(label in node.expression.contracted for label in cut_labels):
        return "partial results are small"
    if any(label in node.expression.contracted for label in cut_labels):
        return "balances inputs against partial results"
    return "no partial results"
