"""What partitions cost under an objective: one by one for a plan, whole tables at a time for the planner.

Both ways give the same figures; a test prices what the planner chose anew, by `estimate.price`.  Expressions that are alike, the repeated
layers of a model, are of one *kind* and priced once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_eindecomp import cost
from dask_eindecomp.candidates import Space
from dask_eindecomp.cost import Traffic
from dask_eindecomp.elimination import Factor, Table
from dask_eindecomp.expression import Labels
from dask_eindecomp.graph import EinGraph, Given, Node
from dask_eindecomp.partition import Chunks, Cut, Partition, cut
from dask_eindecomp.topology import Topology

__all__ = ["OBJECTIVES", "Pricing"]

OBJECTIVES = ("paper", "bytes", "seconds")

FIGURES = ("coarser", "meeting", "pieces", "whole")
"""What `Pricing._axis` tells of two cuts that the published cost does not need."""


@dataclass(frozen=True)
class Pricing:
    """Costs of partitions and of edges of one graph, for one objective."""

    graph: EinGraph
    objective: str
    topology: Topology
    _between: dict[Any, Any] = field(default_factory=dict, repr=False)
    _bundles: dict[Any, tuple[Any, dict[str, Any]]] = field(default_factory=dict, repr=False)

    def form(self, node: Node) -> object:
        """What the price of an expression depends on, partitions aside: equal for the repeated layers of a model."""
        form = self.graph.forms[node.name]
        if self.topology.hosts == 1:
            return form
        # where hosts matter it is not enough to know which blocks lie together
        given = (self.graph.inputs.get(source) for source in node.inputs)
        return (form, *(None if one is None else one.owners for one in given))

    # one expression; parts may be arrays of candidates

    def node_traffic(self, node: Node, parts: Mapping[str, Any]) -> tuple[Traffic, Traffic]:
        """Join and aggregate of one expression."""
        extents, itemsizes, itemsize = self._sizes(node)
        workers, hosts = self.topology.workers, self.topology.hosts
        bundle = self.bundle(node, parts)
        joined = cost.join_traffic(node.expression, extents, parts, itemsizes, workers, hosts, bundle)
        combined = cost.aggregate_traffic(node.expression, extents, parts, itemsize, workers, hosts, bundle)
        return joined, combined

    def bundle(self, node: Node, parts: Mapping[str, Any]) -> dict[str, Any]:
        """How the tiles of one worker stand together: `cost.bundles`, what is read of given tensors included."""
        given = [
            (labels, self.graph.inputs[source])
            for labels, source in zip(node.expression.operands, node.inputs)
            if source in self.graph.inputs and self.graph.inputs[source].chunks is not None
        ]
        # of arrays of candidates the array itself is the key, which is kept so that no other takes its place
        key = (self.form(node), *(id(one) if isinstance(one, np.ndarray) else one for one in parts.values()))
        if key in self._bundles:
            return self._bundles[key][1]
        extents, itemsizes, itemsize = self._sizes(node)
        workers = self.topology.workers

        def reading(between: Mapping[str, Any]) -> Any:
            total: Any = 0
            for labels, tensor in given:
                lacking = [between[label] for label in node.expression.labels if label not in labels]
                copies = np.minimum(prod(lacking, start=np.ones_like(next(iter(between.values())))), workers)
                counts = np.stack([copies, *(between[label] for label in labels)])
                flat = counts.reshape(len(counts), -1)
                first, which = _distinct(flat)
                moved = []
                for several, *one in flat[:, first].T.tolist():
                    grid = tuple(_evenly(extents[label], n) for label, n in zip(labels, one))
                    moved.append(self.given_traffic(tensor, grid, several).nbytes)
                total = total + np.array(moved)[which.reshape(counts.shape[1:])]
            return total

        chosen = cost.bundles(
            node.expression, extents, parts, itemsizes, itemsize, workers, reading if given else None
        )
        self._bundles[key] = parts, chosen
        return chosen

    def node_seconds(self, node: Node, parts: Mapping[str, Any]) -> Any:
        """Seconds of one expression, edges not counted."""
        extents, itemsizes, itemsize = self._sizes(node)
        joined, combined = self.node_traffic(node, parts)
        topology, expression = self.topology, node.expression
        tiles = prod(parts.values())
        results = prod(parts[label] for label in expression.output)
        handled = cost.kernel_nbytes(expression, extents, parts, itemsizes, itemsize)
        added = 3 * itemsize * combined.flops  # each partial result is read, added to another and written
        return (
            topology.compute_seconds(joined.flops, handled, tiles, node.kernel, node.dtype)
            + topology.compute_seconds(combined.flops, added, results, "stream", node.dtype)
            + topology.move_seconds(joined, tiles)
            + topology.move_seconds(combined, results)
            + topology.turn_seconds(tiles)
            + topology.turn_seconds(results * (tiles > results))
        )

    def node_cost(self, node: Node, parts: Mapping[str, Any]) -> Any:
        """Cost of one expression under the objective."""
        if self.objective == "paper":
            extents = dict(node.extents)
            joined = cost.paper_join(node.expression, extents, parts)
            return joined + cost.paper_aggregate(node.expression, extents, parts)
        if self.objective == "bytes":
            joined_traffic, combined = self.node_traffic(node, parts)
            return joined_traffic.nbytes + combined.nbytes
        return self.node_seconds(node, parts)

    def node_costs(self, node: Node, space: Space) -> Table:
        """Cost of every candidate by itself."""
        costs = np.asarray(self.node_cost(node, space.parts), dtype=np.float64)
        return np.array(np.broadcast_to(costs, len(space)))

    def _sizes(self, node: Node) -> tuple[dict[str, int], tuple[int, ...], int]:
        itemsizes = tuple(self.graph.itemsize(source) for source in node.inputs)
        return dict(node.extents), itemsizes, np.dtype(node.dtype).itemsize

    # one edge of a plan

    def edge_traffic(
        self, source: str, partitions: Mapping[str, Partition], reader: Node, labels: Labels
    ) -> Traffic:
        """What it takes to read ``source`` with these labels."""
        itemsize, workers, hosts = self.graph.itemsize(source), self.topology.workers, self.topology.hosts
        mine = partitions[reader.name]
        produced, given = self.produced(source, partitions), self.graph.inputs.get(source)
        if produced is None:
            return Traffic()
        between, copies = self.between_workers(reader, mine.parts, labels)
        if given is None:
            wanted = mine.grid(labels)
            return cost.repartition_traffic(produced, wanted, itemsize, workers, hosts, copies)
        return self.read_traffic(given, mine.grid(labels), tuple(between[label] for label in labels), copies)

    def between_workers(
        self, reader: Node, parts: Mapping[str, Any], labels: Labels
    ) -> tuple[Mapping[str, Any], Any]:
        """Parts of each label that lie on different workers, and how many workers want each tile of an operand."""
        bundle = self.bundle(reader, parts)
        copies = cost.further_copies(reader.expression, labels, parts, self.topology.workers, bundle) + 1
        return cost.across(parts, bundle), copies

    def given_traffic(self, given: Given, wanted: Chunks, copies: int) -> Traffic:
        """What is shipped of a given tensor to workers that want these blocks, so many of them each."""
        assert given.chunks is not None, f"{given.name} may be had in any chunks"
        workers, hosts = self.topology.workers, self.topology.hosts
        itemsize = np.dtype(given.dtype).itemsize
        if given.stays:
            owners = given.pattern if hosts == 1 else given.owners
            return cost.given_traffic(given.chunks, owners, wanted, itemsize, workers, hosts, copies)
        return cost.making_traffic(given.chunks, wanted, itemsize, workers, hosts)

    def read_traffic(self, given: Given, wanted: Chunks, between: tuple[int, ...], copies: int) -> Traffic:
        """What it takes to read a given tensor in some chunks, of which workers have so many parts along each axis."""
        step = self.given_traffic(given, wanted, copies)
        if between == tuple(map(len, wanted)):
            return step
        assert given.chunks is not None, f"{given.name} may be had in any chunks"
        grid = tuple(_evenly(sum(axis), parts) for axis, parts in zip(wanted, between))
        together = self.given_traffic(given, grid, copies)
        missing = together.nbytes // np.dtype(given.dtype).itemsize
        messages = cost.repartition_messages(given.chunks, wanted, missing)
        return replace(step, nbytes=together.nbytes, messages=messages, crossing=together.crossing)

    def beside(self, reader: Node, labels: Labels) -> tuple[Labels, Chunks | None, int]:
        """Labels, given chunks and bytes of the other operand of a product; nothing where BLAS reads one operand."""
        if reader.kernel != "blas" or len(reader.inputs) != 2:
            return labels, None, 0
        other = 1 - reader.expression.operands.index(labels)
        source = reader.inputs[other]
        given = self.graph.inputs.get(source)
        chunks = None if given is None else given.chunks
        return reader.expression.operands[other], chunks, self.graph.nbytes(source)

    def walked_seconds(
        self,
        nbytes: float,
        reader: Node,
        labels: Labels,
        rows: Sequence[Any],
        columns: Sequence[Any],
        copies: Any,
    ) -> Any:
        """Seconds that products take longer because an operand is read piece by piece.

        For each piece along a label that the other operand lacks, that one is read again.  Where blocks of the other
        operand end inside a piece, and not along its first axis, what is multiplied is not contiguous, and is copied.

        Parameters
        ----------
        nbytes
            Of the operand.
        reader, labels
            The product, and the operand's labels in it.
        rows, columns
            For each axis how many pieces it falls into with whether other blocks end inside them, and how many the
            tiles of the product need: arrays that broadcast against each other.
        copies
            How many tiles need each.
        """
        others, _, beside = self.beside(reader, labels)
        again, split, scattered, tiles = 1.0, 1.0, False, copies
        for axis, (label, (pieces, inside), wanted) in enumerate(zip(labels, rows, columns)):
            tiles = tiles * wanted
            if label not in others:
                again = again * np.maximum(pieces / wanted, 1.0)
                split = split * wanted
            elif axis:
                scattered = scattered | inside
        read = (again - 1) * split * beside / 2  # a copy reads and writes
        return self.topology.copy_seconds(read + scattered * nbytes * copies, tiles)

    def cut_inside(self, reader: Node, labels: Labels, axis: int, cuts: Sequence[Cut]) -> list[bool]:
        """Whether blocks of the other operand of a product end inside the pieces of each cut of one axis."""
        others, chunks, _ = self.beside(reader, labels)
        if chunks is None or labels[axis] not in others:
            return [False] * len(cuts)
        return [not cost.nests(one, chunks[others.index(labels[axis])]) for one in cuts]

    def edge_seconds(
        self,
        source: str,
        partitions: Mapping[str, Partition],
        wanted: Chunks,
        step: Traffic,
        copies: int,
        reader: Node,
        labels: Labels,
    ) -> float:
        """Seconds of that traffic, and of what further copies take longer because few workers send them."""
        produced = self.produced(source, partitions)
        if produced is None:
            return 0.0
        blocks, readers = prod(map(len, produced)), prod(map(len, wanted))
        nbytes = self.graph.nbytes(source)
        rows = [
            (len(axis), self.cut_inside(reader, labels, number, [axis])[0])
            for number, axis in enumerate(produced)
        ]
        seconds = self.sending_seconds(nbytes, blocks, readers, copies)
        seconds += self.walked_seconds(nbytes, reader, labels, rows, list(map(len, wanted)), copies)
        if produced == wanted and not step.nbytes:
            return float(seconds)
        seconds += self.topology.move_seconds(step, min(blocks, readers))
        if step.tasks:  # what is not cut is read where it is
            share = step.tasks / prod(cost.axis_overlap(p, c)[1] for p, c in zip(produced, wanted))
            seconds += self.topology.copy_seconds(nbytes * share, readers)
        return float(seconds)

    def sending_seconds(self, nbytes: Any, blocks: Any, readers: Any, copies: Any) -> Any:
        """Seconds beyond those of receiving them that further copies take where few workers have what they send.

        The join of an expression counts its further copies as if all workers sent them.
        """
        further = Traffic(nbytes * (copies - 1))
        tiles = readers * copies
        shared = self.topology.move_seconds(further, tiles)
        return self.topology.move_seconds(further, tiles, np.maximum(blocks, readers)) - shared

    def received(self, node: Node, partitions: Mapping[str, Partition]) -> tuple[int, ...]:
        """Bytes of each operand that reach one worker for its tiles."""
        mine, (extents, itemsizes, _) = partitions[node.name], self._sizes(node)
        workers, bundle = self.topology.workers, self.bundle(node, mine.parts)
        sharing = min(mine.tiles, workers)
        found = []
        for labels, source, each in zip(node.expression.operands, node.inputs, itemsizes):
            copies = cost.further_copies(node.expression, labels, mine.parts, workers, bundle)
            nbytes = prod(extents[label] for label in dict.fromkeys(labels)) * each * copies
            nbytes += self.edge_traffic(source, partitions, node, labels).nbytes
            found.append(-(-nbytes // sharing))
        return tuple(found)

    def produced(self, source: str, partitions: Mapping[str, Partition]) -> Chunks | None:
        """The chunks a tensor is in; None if it may be had in any."""
        given = self.graph.inputs.get(source)
        if given is not None:
            return given.chunks
        return partitions[source].grid(self.graph.nodes[source].expression.output)

    # all candidates of an edge

    def reading(self, source: str, reader: Node, space: Space, labels: Labels) -> Table:
        """Cost of reading a given tensor, for every candidate of its reader."""
        given, grids, which = self.graph.inputs[source], space.grids(labels), space.project(labels)[1]
        parts = space.parts
        between, copies = self.between_workers(reader, parts, labels)
        seen = [which, copies, *(between[label] for label in labels)]
        keys = np.stack([np.broadcast_to(one, len(space)) for one in seen]).astype(int)
        each, place = np.unique(keys, axis=1, return_inverse=True)
        costs = []
        for number, several, *counts in each.T.tolist():
            step = self.read_traffic(given, grids[number], tuple(counts), several)
            seconds = self.objective == "seconds"
            costs.append(
                self.edge_seconds(source, {}, grids[number], step, several, reader, labels)
                if seconds
                else float(step.nbytes)
            )
        return np.array(costs)[place.reshape(-1)]

    def edge(self, producer: Node, theirs: Space, reader: Node, mine: Space, labels: Labels) -> Factor:
        """Repartition cost between every grid of a producer and every one that its reader may want."""
        rows, which = theirs.project(producer.expression.output)
        columns, copies, mine_which = self.seen(reader, mine, labels)
        table = self.between(producer, theirs, rows, reader, mine, labels, columns, copies)
        if self.objective != "seconds" or not self.graph.may_inline(producer.name, reader.name):
            return Factor((producer.name, reader.name), table, (which, mine_which))
        # tiles that are wanted one by one are computed inside the reader's tasks
        passed = self.passed_on(producer, theirs, reader, mine, labels)
        blocks = _tiles(theirs, producer.expression.output, rows)
        spared = np.tile(self.spared_seconds(blocks), 2)[:, None]
        return replace(passed, table=np.tile(table, (2, 2)) - np.where(passed.table, spared, 0.0))

    def seen(
        self, reader: Node, space: Space, labels: Labels
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """What an edge can see of its reader's candidates: the grids wanted, how many workers want each tile, and which.

        Where the published figures are minimised copies do not matter.
        """
        columns, which = space.project(labels)
        if self.objective == "paper":
            return columns, np.ones(len(columns), dtype=np.int64), which
        key = (id(space), labels)
        if key not in self._between:
            _, copies = self.between_workers(reader, space.parts, labels)
            keys = np.stack([which, np.broadcast_to(copies, len(space))]).astype(np.int64)
            each, place = np.unique(keys, axis=1, return_inverse=True)
            self._between[key] = columns[each[0]], each[1], place.reshape(-1)
        return self._between[key]  # type: ignore[no-any-return]

    def spared_seconds(self, tiles: Any) -> Any:
        """Seconds that tiles take less which are computed inside other tasks."""
        return tiles * self.topology.task_overhead + self.topology.turn_seconds(tiles)

    def passed_on(self, producer: Node, theirs: Space, reader: Node, mine: Space, labels: Labels) -> Factor:
        """Whether each tile of a producer is wanted by one tile of its reader: ``EinGraph.passes_on`` for all candidates.

        Classes are the grids twice: of candidates that cut other labels too, then of those that do not.
        """
        rows, which = theirs.project(producer.expression.output)
        columns, _, mine_which = self.seen(reader, mine, labels)
        aligned = self._pairs(producer, theirs, rows, mine, labels, columns, "equal")["equal"]
        blocks = _tiles(theirs, producer.expression.output, rows)
        wanted = _tiles(mine, labels, columns)
        simple = blocks[which] == prod(theirs.parts.values(), start=np.ones(len(theirs)))
        bare = wanted[mine_which] == prod(mine.parts.values(), start=np.ones(len(mine)))
        never = np.zeros_like(aligned)
        table = np.block([[never, never], [never, aligned]])
        classes = (which + simple * len(rows), mine_which + bare * len(columns))
        return Factor((producer.name, reader.name), table, classes)

    def delivery(self, producer: Node, space: Space, promised: Chunks) -> Table:
        """Cost of cutting a result into the chunks it was promised in, for every candidate."""
        labels = producer.expression.output
        costs = []
        for produced in space.grids(labels):
            step = self.delivery_traffic(produced, promised, np.dtype(producer.dtype).itemsize)
            seconds = self.objective == "seconds"
            costs.append(
                self.delivery_seconds(produced, promised, step, producer) if seconds else step.nbytes
            )
        return np.array(costs, dtype=np.float64)[space.project(labels)[1]]

    def delivery_traffic(self, produced: Chunks, promised: Chunks, itemsize: int) -> Traffic:
        """What cutting a result into the chunks it was promised in moves."""
        return cost.delivery_traffic(produced, promised, itemsize, self.topology.workers, self.topology.hosts)

    def delivery_seconds(self, produced: Chunks, promised: Chunks, step: Traffic, producer: Node) -> float:
        """Seconds of that."""
        if produced == promised:
            return 0.0
        readers = prod(map(len, promised))
        seconds = self.topology.move_seconds(step, min(prod(map(len, produced)), readers))
        size = prod(producer.shape) * np.dtype(producer.dtype).itemsize
        return float(seconds + self.topology.copy_seconds(size, readers))

    def between(
        self,
        producer: Node,
        theirs: Space,
        rows: npt.NDArray[np.int64],
        reader: Node,
        mine: Space,
        labels: Labels,
        columns: npt.NDArray[np.int64],
        copies: npt.NDArray[np.int64],
    ) -> Table:
        """Cost between distinct grids: ``cost.repartition_traffic`` and its kin, over whole tables at once."""
        blocks, readers = _tiles(theirs, producer.expression.output, rows), _tiles(mine, labels, columns)
        some, other, size = blocks[:, None], readers[None, :], float(prod(producer.shape))
        names = {"paper": (), "bytes": ("coarser", "meeting")}.get(self.objective, FIGURES)
        pairs = self._pairs(producer, theirs, rows, mine, labels, columns, "equal", "finer", *names)
        equal = pairs["equal"]
        if self.objective == "paper":
            if not size:
                return np.zeros(equal.shape)
            meeting = size / (pairs["finer"] * other)  # elements where the two grids meet
            moved = size * (size / some) / meeting + size * ((size / other) / meeting - 1)
            return np.asarray(np.where(equal, 0.0, moved))
        workers, hosts = self.topology.workers, self.topology.hosts
        itemsize = np.dtype(producer.dtype).itemsize
        missing = size - _stays(pairs, blocks, readers, size, workers, copies)
        nbytes = np.where(equal | (workers == 1), 0.0, missing) * itemsize
        if self.objective == "bytes":
            return np.asarray(nbytes)
        tasks = np.where(equal, 0.0, np.maximum(pairs["pieces"] - pairs["whole"], 0))
        crossing: Any = 0
        if hosts > 1:
            apart = size - _stays(pairs, blocks, readers, size, hosts)
            crossing = np.minimum(np.where(equal, 0.0, apart) * itemsize, nbytes)
        messages = np.ceil(pairs["pieces"] * nbytes / max(size * itemsize, 1))
        step = Traffic(nbytes, messages, tasks=tasks, crossing=crossing)  # type: ignore[arg-type]
        seconds = self.topology.move_seconds(step, np.minimum(some, other))
        share = tasks / np.maximum(pairs["pieces"], 1)
        distinct, which = np.unique(blocks, return_inverse=True)
        sending = self.sending_seconds(size * itemsize, distinct[:, None], other, copies[None, :])
        seconds = seconds + np.broadcast_to(sending, (len(distinct), len(columns)))[which]
        pieces, tiles = [], []
        for axis, label in enumerate(producer.expression.output):
            cuts = theirs.cuts[theirs.labels.index(label)]
            at, inside = rows[:, axis], self.cut_inside(reader, labels, axis, cuts)
            pieces.append((np.array(list(map(len, cuts)))[at][:, None], np.array(inside)[at][:, None]))
            wanted = mine.cuts[mine.labels.index(labels[axis])]
            tiles.append(np.array(list(map(len, wanted)))[columns[:, axis]][None, :])
        seconds = seconds + self.walked_seconds(
            size * itemsize, reader, labels, pieces, tiles, copies[None, :]
        )
        return np.asarray(seconds + self.topology.copy_seconds(size * itemsize * share, other))

    def _pairs(
        self,
        producer: Node,
        theirs: Space,
        rows: npt.NDArray[np.int64],
        mine: Space,
        labels: Labels,
        columns: npt.NDArray[np.int64],
        *names: str,
    ) -> dict[str, npt.NDArray[Any]]:
        """What two grids have in common, for every pair of them: for each figure the product over all axes."""
        axes = []
        for label, wanted in zip(producer.expression.output, labels):
            axes.append((theirs.cuts[theirs.labels.index(label)], mine.cuts[mine.labels.index(wanted)]))
        if not axes:
            shape = (len(rows), len(columns))
            return {name: np.ones(shape, dtype=bool if name == "equal" else float) for name in names}
        return self._products(axes, list(names), rows, columns)

    def _products(
        self,
        axes: list[tuple[tuple[Cut, ...], tuple[Cut, ...]]],
        names: list[str],
        rows: npt.NDArray[np.int64],
        columns: npt.NDArray[np.int64],
    ) -> dict[str, npt.NDArray[Any]]:
        """The same for some axes: the products over either half of them, which fewer pairs tell apart, multiplied."""
        if len(axes) == 1:
            figures = self._axis(*axes[0])
            return {name: figures[name][rows[:, 0]][:, columns[:, 0]] for name in names}
        half = len(axes) // 2
        found: dict[str, npt.NDArray[Any]] = {}
        for part in (slice(half), slice(half, None)):
            some, i = np.unique(rows[:, part], axis=0, return_inverse=True)
            other, j = np.unique(columns[:, part], axis=0, return_inverse=True)
            figures = self._products(axes[part], names, some, other)
            for name, table in figures.items():
                wide = table[i.reshape(-1)][:, j.reshape(-1)]
                found[name] = np.multiply(found[name], wide, out=wide) if name in found else wide
        return found

    def _axis(self, produced: tuple[Cut, ...], consumed: tuple[Cut, ...]) -> dict[str, npt.NDArray[Any]]:
        """What two cuts of one axis have in common, for every pair of them."""
        key = (produced, consumed)
        if key not in self._between:
            p, c = (np.array(list(map(len, cuts)), dtype=np.float64) for cuts in key)
            finer, coarser = np.maximum(p[:, None] / c, 1), np.maximum(c / p[:, None], 1)
            figures = {"finer": finer, "coarser": coarser}
            figures["equal"] = np.array([[one == other for other in consumed] for one in produced])
            if self.objective != "paper":
                counts = [[cost.axis_overlap(one, other) for other in consumed] for one in produced]
                meeting, pieces, whole = np.moveaxis(np.array(counts, dtype=np.float64), -1, 0)
                figures |= {"meeting": meeting, "pieces": pieces, "whole": whole}
            self._between[key] = figures
        return self._between[key]  # type: ignore[no-any-return]


def _tiles(space: Space, labels: Labels, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Number of blocks of each grid of a tensor with these labels."""
    counts = np.ones(len(rows))
    for axis, label in enumerate(labels):
        cuts = space.cuts[space.labels.index(label)]
        counts *= np.array(list(map(len, cuts)), dtype=np.float64)[rows[:, axis]]
    return counts


def _stays(
    pairs: Mapping[str, npt.NDArray[Any]],
    some: npt.NDArray[np.float64],
    other: npt.NDArray[np.float64],
    size: float,
    workers: int,
    copies: Any = 1,
) -> npt.NDArray[Any]:
    """``cost.stays`` for every pair of grids of so many blocks."""
    few, many = np.minimum(some, workers), np.minimum(other, workers)
    grown = np.minimum((some / few)[:, None], pairs["finer"])
    grown = grown * np.minimum((other / many)[None, :], pairs["coarser"])
    copied = np.minimum(other * copies, workers)
    held = np.minimum(few[:, None], copied[None, :]) * pairs["meeting"] * grown
    # the tolerance keeps the floor equal to that of exact fractions
    return np.asarray(np.minimum(np.floor(held + 1e-6), size))


def _distinct(columns: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where each distinct column is first, and which of them each column is; entries are not negative.

    NumPy's own ``unique`` of columns compares them byte by byte, which took a hundred times as long.

    >>> _distinct(np.array([[5, 3, 5], [1, 1, 1]]))
    (array([1, 0]), array([1, 0, 1]))
    """
    key, size = np.zeros(columns.shape[1], dtype=np.int64), 1
    for row in columns:
        width = int(row.max(initial=0)) + 1
        if size * width >= 1 << 62:
            _, key = np.unique(key, return_inverse=True)
            size = int(key.max(initial=0)) + 1
        key, size = key * width + row, size * width
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return first, which.reshape(-1)


def _evenly(extent: int, parts: int) -> Cut:
    """A balanced cut, into single elements where there are more parts than these: other parts are empty."""
    return cut(extent, min(parts, max(extent, 1)))
