"""From a plan to Dask layers in tensor relational algebra: join, aggregate, repartition.

A tile of a join reads the blocks it needs by name, however many they are; no task merges them first.  A block of
which a tile needs only a part is cut where it lies, once for all tiles that need that part.  An elementwise
expression whose tiles are those of what it reads takes its operands' work into its own task.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from dask._task_spec import Alias, GraphNode, List, Task, TaskRef
from dask.base import tokenize

from dask_eindecomp import kernels
from dask_eindecomp.blas import Beside
from dask_eindecomp.combining import Merge
from dask_eindecomp.folds import Fold
from dask_eindecomp.graph import EinGraph, Node, Output
from dask_eindecomp.partition import Chunks, Partition, Piece, pieces_of
from dask_eindecomp.plan import Placement
from dask_eindecomp.topology import Topology

__all__ = ["Lowered", "digest", "lower"]

ALONE = Topology()
"""One worker of one thread."""
FAN_IN = 16
"""Partial results that one task adds up."""


@dataclass(frozen=True)
class Lowered:
    """Layers of a lowered plan."""

    layers: Mapping[str, dict[Any, GraphNode]]
    """Tasks by key, by layer."""
    purposes: Mapping[str, str]
    """By layer what it does, ``join``, ``aggregate`` or ``repartition``, a space, and for which tensor."""
    reads: frozenset[Any]
    """Keys of given tensors that the layers read."""
    workers: Mapping[Any, int]
    """Number of the worker that a task is meant for, by key."""
    token: str
    """Digest of the plan."""
    names: Mapping[str, str]
    """The name of the blocks of every tensor."""


def lower(
    graph: EinGraph,
    partitions: Mapping[str, Partition],
    placement: Placement | None = None,
    topology: Topology = ALONE,
) -> Lowered:
    """Write a plan as Dask layers for these machines, tasks meant for the workers of a placement if there is one.

    Every internal key carries the plan in its token: two plans of one graph never share a key but those of the
    outputs, which keep the names they were promised.
    """
    return _Lowering(graph, partitions, placement, topology).run()


def digest(graph: EinGraph, partitions: Mapping[str, Partition]) -> str:
    """What tells a plan from all others, made of one expression after the other: no step is long."""
    found = hashlib.md5(usedforsecurity=False)
    for node in graph.nodes.values():
        found.update(repr((node.name, node.expression.einsum, partitions[node.name].cuts)).encode())
    for output in graph.outputs:
        found.update(repr((output.name, output.source)).encode())
    return found.hexdigest()


class _Lowering:
    """Layers written so far and where the blocks of each tensor are."""

    def __init__(
        self,
        graph: EinGraph,
        partitions: Mapping[str, Partition],
        placement: Placement | None,
        topology: Topology,
    ) -> None:
        self.graph = graph
        self.topology = topology
        self.placement = placement
        self.workers: dict[Any, int] = {}
        self.partitions = partitions
        self.token = digest(graph, partitions)
        self.layers: dict[str, dict[Any, GraphNode]] = {}
        self.purposes: dict[str, str] = {}
        self.chunks: dict[str, Chunks] = {}
        self.names: dict[str, str] = {}
        self.inlined: dict[Any, GraphNode] = {}
        self.reads: set[Any] = set()
        self.kernels: dict[Any, kernels.Join | Beside] = {}
        for given in graph.inputs.values():
            assert given.chunks is not None, f"{given.name} has no blocks to read"
            self.chunks[given.name] = given.chunks
            self.names[given.name] = given.name

    def run(self) -> Lowered:
        """Lower every node, then what leaves."""
        for node in self.graph.nodes.values():
            self.node(node)
        for output in self.graph.outputs:
            self.deliver(output)
            if output.chunks is None and output.name:
                self.stand_alone(output.name)
        layers = {name: tasks for name, tasks in self.layers.items() if tasks}
        return Lowered(layers, self.purposes, frozenset(self.reads), self.workers, self.token, self.names)

    def layer(self, kind: str, title: str) -> tuple[str, dict[Any, GraphNode]]:
        """A layer by what it does and for which tensor."""
        name = f"{kind}-{title}-{tokenize(self.token, title)[:16]}"
        self.purposes[name] = f"{kind} {title}"
        return name, self.layers.setdefault(name, {})

    # nodes

    def node(self, node: Node) -> None:
        partition = self.partitions[node.name]
        expression = node.expression
        contracted = expression.contracted
        if isinstance(node.step, kernels.Reduction):
            contracted = (
                *node.step.labels,
                *(label for label in contracted if label not in node.step.labels),
            )
        parts = partition.parts
        partial = prod(parts[label] for label in contracted) > 1
        grid = partition.grid(expression.output)
        join_name, joins = self.layer("join", node.name)
        target = self.final_name(node, grid) or (
            self.layer("aggregate", node.name)[0] if partial else join_name
        )
        self.chunks[node.name], self.names[node.name] = grid, target
        inline = self.is_inlined(node)
        kernel = _step_kernel(node, partial)
        for index in product(*(range(parts[label]) for label in expression.output)):
            place = dict(zip(expression.output, index))
            key = (target, *index)
            if not partial:
                place |= dict.fromkeys(contracted, 0)
                self.meant_for_tile(key, node, place)
                task = self.join(key, node, kernel, partition, place)
                if inline:
                    self.inlined[key] = task
                else:
                    joins[key] = task
                continue
            keys = []
            for inner in product(*(range(parts[label]) for label in contracted)):
                one = (join_name, *index, *inner)
                there = place | dict(zip(contracted, inner))
                self.meant_for_tile(one, node, there)
                joins[one] = self.join(one, node, kernel, partition, there)
                keys.append(one)
            self.meant_for_block(key, node.name, index)
            self.aggregate(key, node, keys, tuple(parts[label] for label in contracted))

    def meant_for_tile(self, key: Any, node: Node, place: Mapping[str, int]) -> None:
        """Note the worker of a tile."""
        if self.placement is not None:
            at = tuple(place[label] for label in node.expression.labels)
            self.workers[key] = int(self.placement.tiles[node.name][at])

    def meant_for_block(self, key: Any, source: str, index: tuple[int, ...]) -> None:
        """Note the worker that has a block."""
        if self.placement is not None:
            self.workers[key] = int(self.placement.blocks[source][index])

    def final_name(self, node: Node, grid: Chunks) -> str | None:
        """The promised name under which the tiles of a node can leave as they are."""
        mine = (output for output in self.graph.outputs if output.source == node.name and output.name)
        return next((output.name for output in mine if output.chunks in (None, grid)), None)

    def is_inlined(self, node: Node) -> bool:
        """Whether the tiles of a node are computed inside the tasks of its reader."""
        readers = self.graph.readers[node.name]
        return len(readers) == 1 and self.graph.inlines(node.name, readers[0][0], self.partitions)

    def join(
        self,
        key: Any,
        node: Node,
        kernel: tuple[Any, Any, Any],
        partition: Partition,
        place: Mapping[str, int],
    ) -> Task:
        """The task of one tile."""
        step, finish, output = kernel
        cuts = dict(partition.cuts)
        arguments = []
        lengths = []
        for source, labels in zip(node.inputs, node.expression.operands):
            pieces = [
                pieces_of(self.chunks[source][axis], cuts[label])[place[label]]
                for axis, label in enumerate(labels)
            ]
            lengths.append(tuple(tuple(stop - start for _, start, stop, _ in axis) for axis in pieces))
            arguments.append(self.operand(source, pieces))
        extents = tuple((label, cuts[label][place.get(label, 0)]) for label in node.expression.labels)
        shared = (node.name, extents, tuple(lengths), output)
        if shared not in self.kernels:  # equal tiles share one kernel: it is pickled once
            tile = kernels.Join(
                node.expression.einsum,
                node.expression.operands,
                output,
                extents,
                tuple(lengths),
                step,
                finish,
            )
            # how many run at once in one process
            beside = min(self.topology.threads, -(-partition.tiles // self.topology.workers))
            self.kernels[shared] = Beside(tile, beside) if node.kernel == "blas" and beside > 1 else tile
        return Task(key, self.kernels[shared], *arguments)

    def operand(self, source: str, pieces: list[tuple[Piece, ...]]) -> Any:
        """What a task reads of one operand: a block, or a list of blocks in row-major order."""
        blocks = [self.block(source, piece) for piece in product(*pieces)]
        return blocks[0] if len(blocks) == 1 else List(*blocks)

    def block(self, source: str, piece: tuple[Piece, ...]) -> Any:
        """A reference to a block, to a part of it that is cut once, or the task that computes it right here."""
        index = tuple(number for number, *_ in piece)
        key = (self.names[source], *index)
        if source in self.graph.inputs:
            self.reads.add(key)
            if not self.graph.inputs[source].stays:
                self.meant_for_block(key, source, index)
        if all(whole for *_, whole in piece):
            return self.inlined.pop(key, None) or TaskRef(key)
        bounds = tuple((start, stop) for _, start, stop, _ in piece)
        name, tasks = self.layer("repartition", source)
        cut_key = (name, *index, *(start for start, _ in bounds), *(stop for _, stop in bounds))
        if cut_key not in tasks:
            tasks[cut_key] = Task(cut_key, kernels.Cut(bounds), TaskRef(key))
            self.meant_for_block(cut_key, source, index)
        return TaskRef(cut_key)

    def aggregate(self, key: Any, node: Node, keys: list[Any], shape: tuple[int, ...]) -> None:
        """Combine the partial results of one tile, in a tree where they are many."""
        name, tasks = self.layer("aggregate", node.name)
        if isinstance(node.step, kernels.Reduction):
            depth = shape[: len(node.step.labels)]
            tasks[key] = Task(key, kernels.TreeReduce(node.finish, depth), List(*map(TaskRef, keys)))
            return
        kernel, last = _combining(node)
        keys = self.summed_where_they_are(key, keys, name, kernel)
        level = 0
        while len(keys) > FAN_IN:
            groups = [keys[start : start + FAN_IN] for start in range(0, len(keys), FAN_IN)]
            keys = [(name, *key[1:], level, number) for number in range(len(groups))]
            for one, group in zip(keys, groups):
                tasks[one] = Task(one, kernel, List(*map(TaskRef, group)))
                if group[0] in self.workers:
                    self.workers[one] = self.workers[group[0]]
            level += 1
        tasks[key] = Task(key, last, List(*map(TaskRef, keys)))

    def summed_where_they_are(self, key: Any, keys: list[Any], layer: str, kernel: Any) -> list[Any]:
        """One partial result a worker, that of the worker which adds them all up first."""
        if self.placement is None:
            return keys
        groups: dict[int, list[Any]] = {self.workers[key]: []}
        for one in keys:
            groups.setdefault(self.workers[one], []).append(one)
        if len(groups) == 1:
            return keys
        found = []
        for worker, group in groups.items():
            if len(group) > 1:
                one = (layer, *key[1:], "here", worker)
                self.layers[layer][one] = Task(one, kernel, List(*map(TaskRef, group)))
                self.workers[one] = worker
                group = [one]
            found += group
        return found

    # outputs

    def stand_alone(self, name: str) -> None:
        """Give an array that users go on with a layer of its own name, as Dask expects of any array."""
        mine = self.layers.setdefault(name, {})
        for layer, tasks in self.layers.items():
            if layer != name:
                mine.update({key: tasks.pop(key) for key in list(tasks) if key[0] == name})

    def deliver(self, output: Output) -> None:
        """Give an output the names and chunks it was promised."""
        chunks = self.chunks[output.source]
        wanted = output.chunks or chunks
        if not output.name or (self.names[output.source] == output.name and wanted == chunks):
            return
        _, tasks = self.layer("repartition", output.source)
        shape = tuple(range(len(wanted)))
        labels = tuple(map(str, shape))
        for index in product(*(range(len(axis)) for axis in wanted)):
            key = (output.name, *index)
            pieces = [pieces_of(chunks[axis], wanted[axis])[index[axis]] for axis in shape]
            if all(len(axis) == 1 for axis in pieces):
                block = tuple(axis[0][0] for axis in pieces)
                source = (self.names[output.source], *block)
                if all(axis[0][3] for axis in pieces):
                    tasks[key] = Alias(key, source)
                else:
                    bounds = tuple((axis[0][1], axis[0][2]) for axis in pieces)
                    tasks[key] = Task(key, kernels.Cut(bounds), TaskRef(source))
                    self.meant_for_block(key, output.source, block)
                continue
            lengths = tuple(tuple(stop - start for _, start, stop, _ in axis) for axis in pieces)
            extents = tuple((label, sum(axis)) for label, axis in zip(labels, lengths))
            function = kernels.Join(
                "repartition", (labels,), labels, extents, (lengths,), kernels.Rearrange()
            )
            tasks[key] = Task(key, function, self.operand(output.source, pieces))
            longest = [max(axis, key=lambda piece: piece[2] - piece[1]) for axis in pieces]
            self.meant_for_block(key, output.source, tuple(piece[0] for piece in longest))


def _combining(node: Node) -> tuple[Any, Any]:
    """What combines some partial results of a tile, and what the last of them."""
    if isinstance(node.step, Fold):
        return Merge(node.step.combine), Merge(node.step.combine, node.finish)
    working = "float32" if node.dtype == "float16" else node.dtype
    return kernels.Sum(working), kernels.Sum(node.dtype, node.finish)


def _step_kernel(node: Node, partial: bool) -> tuple[Any, Any, tuple[str, ...]]:
    """Step, finish and output labels of the tiles of a node."""
    step = node.step
    if isinstance(step, kernels.Reduction):
        # partial results keep the reduced axes; Dask's last function drops them
        return step, None if partial else node.finish, node.expression.operands[0]
    if partial and isinstance(step, kernels.Contraction) and step.dtype == "float16":
        step = replace(step, partial=True)
    return step, None if partial else node.finish, node.expression.output
