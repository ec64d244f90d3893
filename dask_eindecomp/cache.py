"""Plans remembered.

Two graphs that differ in names alone have the same plans: iterations of a solver, one notebook cell run twice, many
clients of one scheduler with the same model.  So a plan is kept under what its graph *is*, tensors numbered in order,
together with everything else it depends on, and given back under the names asked for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace

from dask_eindecomp.graph import EinGraph
from dask_eindecomp.plan import Choice, Plan

__all__ = ["Plans", "canonical"]


def canonical(graph: EinGraph) -> Hashable:
    """What a graph is whatever its tensors are called: equal for graphs that have the same plans.

    >>> one = EinGraph.from_spec({"A": (4, 4)}, {"Z": ("ij->i", "A")}, ["Z"])
    >>> other = EinGraph.from_spec({"B": (4, 4)}, {"Y": ("ij->i", "B")}, ["Y"])
    >>> canonical(one) == canonical(other)
    True
    """
    numbers = {name: number for number, name in enumerate((*graph.inputs, *graph.nodes))}
    inputs = tuple((one.shape, one.dtype, one.chunks, one.owners, one.stays) for one in graph.inputs.values())
    nodes = tuple(
        (
            node.expression,
            node.extents,
            node.dtype,
            node.kernel,
            node.came,
            node.pinned,
            node.came_kernel,
            node.tasks,
            *[numbers[source] for source in node.inputs],
        )
        for node in graph.nodes.values()
    )
    return inputs, nodes, tuple((numbers[one.source], one.chunks) for one in graph.outputs)


class _Key:
    """What a plan is of; long, so its hash is computed once."""

    __slots__ = ("hashed", "parts")

    def __init__(self, *parts: Hashable) -> None:
        self.parts = parts
        self.hashed = hash(parts)

    def __hash__(self) -> int:
        return self.hashed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.parts == other.parts


class Plans:
    """The plans asked for last, safe to use from several threads."""

    def __init__(self, most: int = 128) -> None:
        self.most = most
        self._plans: OrderedDict[_Key, Plan] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def clear(self) -> None:
        """Forget all plans."""
        with self._lock:
            self._plans.clear()

    def plan(self, lifted: EinGraph, binary: EinGraph, settings: Hashable, make: Callable[[], Plan]) -> Plan:
        """The plan for a graph under the names it has; ``make`` is called if none is known.

        Parameters
        ----------
        lifted
            The graph as it was lifted.
        binary
            The same with products of two operands only, which the plan is of.
        settings
            Whatever else the plan depends on.
        make
            Plans anew; what it raises is passed on and not remembered.
        """
        key = _Key(canonical(lifted), settings)
        with self._lock:
            known = self._plans.get(key)
            if known is not None:
                self._plans.move_to_end(key)
        if known is not None:
            return _renamed(known, binary)
        plan = make()
        with self._lock:
            self._plans[key] = plan
            while len(self._plans) > self.most:
                self._plans.popitem(last=False)
        return plan


def _renamed(plan: Plan, graph: EinGraph) -> Plan:
    """The same plan under the names of an equal graph."""
    if tuple(plan.partitions) == tuple(graph.nodes) and plan.left_alone == graph.left_alone:
        return plan
    names = dict(zip(plan.partitions, graph.nodes)) | {"": ""}
    choices = tuple(
        Choice(
            node.name,
            one.einsum,
            one.cuts,
            one.join,
            one.aggregate,
            one.repartition,
            one.seconds,
            one.reason,
            node.title or node.name,
            names[one.inside],
        )
        for one, node in zip(plan.choices, graph.nodes.values())
    )
    return replace(plan, choices=choices, left_alone=graph.left_alone)
