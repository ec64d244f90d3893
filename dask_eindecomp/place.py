"""Which worker runs which tile.

Tiles go where most of what they read already lies, evenly: no worker gets more of an expression's tiles than its
share.  Where there are more tiles than workers, each worker runs a block of neighbouring tiles, which read the same.

    blocks of A, by worker    0 0 1 1        tiles of i, by worker    0 1
                              0 0 1 1   ─▶   (A cut by columns)       0 1

Blocks that are only made when they are read are made where they are used.  What is shipped is counted on the way, block
by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from dask_eindecomp import cost
from dask_eindecomp.cost import Traffic
from dask_eindecomp.expression import Labels
from dask_eindecomp.graph import EinGraph, Node
from dask_eindecomp.kernels import Reduction
from dask_eindecomp.partition import Chunks, Partition, factorisations
from dask_eindecomp.plan import Placement, Shipped, Workers
from dask_eindecomp.shipping import Stock
from dask_eindecomp.topology import Topology

__all__ = ["place"]

MOST = 1 << 20
"""Pairs of workers and pieces of one tensor beyond which tiles are dealt out in runs, wherever their inputs lie, and what
they ship is not counted."""

GRIDS = 12
"""Most ways to share out the tiles of one expression that are looked at."""


def place(graph: EinGraph, partitions: Mapping[str, Partition], topology: Topology) -> Placement:
    """Owners for every tile of every expression, those it reads placed before it, and what that ships.

    >>> spec, rows = {"Z": ("ij->i", "A")}, ((4, 4), (8,))
    >>> g = EinGraph.from_spec({"A": (8, 8)}, spec, ["Z"], chunks={"A": rows})
    >>> halves = {"Z": Partition.balanced({"i": 8, "j": 8}, {"i": 2})}
    >>> place(g, halves, Topology(workers=2)).tiles["Z"].tolist()
    [[0], [1]]
    """
    return _Placing(graph, partitions, topology).run()


@dataclass
class _Operand:
    """What tiles read of one tensor."""

    there: npt.NDArray[np.float64]
    """Bytes of each wanted block that each worker holds, workers by blocks."""
    nbytes: npt.NDArray[np.float64]
    """Bytes of each wanted block."""
    number: npt.NDArray[np.int64]
    """Which of these blocks each tile reads, tiles in row-major order."""


@dataclass(frozen=True)
class _Placed:
    """One expression placed: the same for all that are alike and read what lies alike."""

    tiles: Workers
    """The worker of each tile."""
    read: tuple[Stock | None, ...]
    """Who has what of each operand afterwards; None for tensors that may be had anywhere."""
    result: Stock
    """Who has what of the result."""
    shipped: Shipped | None
    """What that ships; None if it was not counted."""


class _Placing:
    """Where everything is so far."""

    def __init__(self, graph: EinGraph, partitions: Mapping[str, Partition], topology: Topology) -> None:
        self.graph, self.partitions = graph, partitions
        self.workers, self.shares = topology.workers, topology.shares
        self.stocks: dict[str, Stock] = {}
        self.placed: dict[str, _Placed] = {}
        self.bound: dict[str, Workers] = {}
        """Workers of the tiles of an expression that are computed inside another's tasks, or take others' in."""
        self.fresh: dict[object, Stock] = {}
        """Tensors of which nothing was fetched yet, by chunks and owners: those that lie alike are one."""
        self.alike: dict[object, _Placed] = {}
        """Expressions by their kind, their partition and what lies where of all they read: the layers of a model repeat."""

    def run(self) -> Placement:
        """Place every expression after those it reads, then what leaves."""
        for given in self.graph.inputs.values():
            if given.chunks is not None and (given.stays or given.owners is not None):
                shape = tuple(map(len, given.chunks))
                owners = cost.spread(prod(shape), self.workers) if given.owners is None else given.owners
                blocks = np.array(owners, dtype=np.int64).reshape(shape)
                self.stocks[given.name] = self.stock(given.name, given.chunks, blocks)
        for node in self.graph.nodes.values():
            read = (self.stocks.get(source) or self.chunks(source) for source in node.inputs)
            bound = self.bound[node.name].tobytes() if node.name in self.bound else None
            key = (self.graph.kinds[node.name], id(self.partitions[node.name]), bound, *read)
            if key not in self.alike:
                self.alike[key] = self.node(node)
            placed = self.placed[node.name] = self.alike[key]
            self.stocks |= {source: one for source, one in zip(node.inputs, placed.read) if one is not None}
            self.stocks[node.name] = placed.result
            self.bind(node, placed.tiles.reshape(-1))
        delivery = sum(
            (self.delivered(output.source, output.chunks) for output in self.graph.outputs), Traffic()
        )
        return Placement(
            {name: one.tiles for name, one in self.placed.items()},
            {name: stock.owners for name, stock in self.stocks.items()},
            {name: one.shipped for name, one in self.placed.items() if one.shipped is not None},
            delivery,
        )

    def chunks(self, source: str) -> Chunks | None:
        """The chunks of a given tensor that is made on demand."""
        given = self.graph.inputs.get(source)
        return None if given is None else given.chunks

    def stock(self, source: str, chunks: Chunks, owners: Workers) -> Stock:
        """A tensor of which each worker has its own blocks."""
        itemsize = self.graph.itemsize(source)
        key = (chunks, owners.tobytes(), itemsize)
        return self.fresh.setdefault(key, Stock.of(chunks, owners, itemsize, self.workers))

    def node(self, node: Node) -> _Placed:
        """Place the tiles of one expression, fetch what they read, and note where its result is."""
        mine, labels = self.partitions[node.name], node.expression.labels
        shape = tuple(mine.parts[label] for label in labels)
        wanted = [mine.grid(operand) for operand in node.expression.operands]
        numbers = [_numbers(shape, labels, operand) for operand in node.expression.operands]
        counted = all(self.is_small(source, grid) for source, grid in zip(node.inputs, wanted))
        operands = []
        for source, grid, number in zip(node.inputs, wanted, numbers):
            if counted and source in self.stocks:
                there = self.stocks[source].there(grid) * self.graph.itemsize(source)
                operands.append(_Operand(there, _sizes(grid) * self.graph.itemsize(source), number))
        if node.name in self.bound:
            tiles = self.bound[node.name]
        else:
            tiles = self.best(node, shape, operands, counted)
        repartition, joined = Traffic(), Traffic()
        read = {source: self.stocks.get(source) for source in node.inputs}
        for source, grid, number in zip(node.inputs, wanted, numbers):
            needed = np.zeros((self.workers, prod(map(len, grid))), dtype=bool)
            needed[tiles, number] = True
            stock = read[source] or self.made(source, grid, needed)
            if counted and stock is not None:
                stock, first, further = stock.take(grid, needed)
                repartition, joined = repartition + first, joined + further
            read[source] = stock
        owners, combined = _results(node, mine, tiles.reshape(shape), self.workers)
        return _Placed(
            tiles.reshape(shape),
            tuple(read[source] for source in node.inputs),
            self.stock(node.name, mine.grid(node.expression.output), owners),
            Shipped(joined, combined, repartition) if counted else None,
        )

    def bind(self, node: Node, tiles: Workers) -> None:
        """Put expressions that share their tasks with this one where it is: the reader, and what else it takes in."""
        readers = self.graph.readers[node.name]
        if len(readers) != 1 or not self.graph.inlines(node.name, readers[0][0], self.partitions):
            return
        reader = self.graph.nodes[readers[0][0]]
        parts, every = self.partitions[node.name].parts, node.expression.labels
        output = _numbers(tuple(parts[label] for label in every), every, node.expression.output)
        mine, labels = self.partitions[reader.name], reader.expression.labels
        shape = tuple(mine.parts[label] for label in labels)
        blocks = np.empty(len(tiles), dtype=np.int64)
        blocks[output] = tiles
        theirs = blocks[_numbers(shape, labels, reader.expression.operands[readers[0][1]])]
        self.bound[reader.name] = theirs
        for name, operand in zip(reader.inputs, reader.expression.operands):
            if self.graph.inlines(name, reader.name, self.partitions):
                wanted = np.empty(len(tiles), dtype=np.int64)
                wanted[_numbers(shape, labels, operand)] = theirs
                source = self.graph.nodes[name].expression
                own = tuple(self.partitions[name].parts[label] for label in source.labels)
                self.bound[name] = wanted[_numbers(own, source.labels, source.output)]

    def is_small(self, source: str, wanted: Chunks) -> bool:
        """Whether a tensor falls into few enough pieces to look at each."""
        given = self.graph.inputs.get(source)
        chunks = self.stocks[source].chunks if given is None else given.chunks
        pieces = prod(len(have) + len(want) for have, want in zip(chunks or wanted, wanted))
        return pieces * self.workers <= MOST

    def made(self, source: str, wanted: Chunks, needed: npt.NDArray[np.bool_]) -> Stock | None:
        """Blocks that are made on demand, on workers that need most of them; None if they may be had anywhere."""
        chunks = self.chunks(source)
        if chunks is None:
            return None
        uses = needed.reshape(self.workers, *map(len, wanted)).astype(float)
        for have, want in zip(chunks, wanted):
            uses = np.tensordot(uses, cost.overlaps(have, want).T.astype(float), axes=(1, 0))
        # of equal ones the worker that makes fewest so far
        flat, load = uses.reshape(self.workers, -1), np.zeros(self.workers)
        owners = np.empty(flat.shape[1], dtype=np.int64)
        for block in range(flat.shape[1]):
            most = flat[:, block] == flat[:, block].max()
            owners[block] = np.where(most, load, np.inf).argmin()
            load[owners[block]] += 1
        return self.stock(source, chunks, owners.reshape(tuple(map(len, chunks))))

    def best(self, node: Node, shape: tuple[int, ...], operands: list[_Operand], counted: bool) -> Workers:
        """The worker of each tile, row-major: the way to share them out that ships least."""
        count, workers = prod(shape), self.workers
        runs = np.array(cost.spread(count, workers), dtype=np.int64)
        if workers == 1 or not counted or count * workers > MOST:
            return runs
        if self.shares:
            return _in_turn(operands, runs, np.array(cost.portions(count, self.shares)))
        if count <= workers:
            return _assigned(operands, np.arange(count), workers)[0]
        found: list[tuple[float, Workers]] = []
        for group, partial in self.ways(node, shape):
            owners, missing = _assigned(operands, group, workers)
            found.append((missing + partial, owners[group]))
        if not found:
            return _in_turn(operands, runs, np.full(workers, -(-count // workers)))
        return min(found, key=lambda one: one[0])[1]

    def ways(self, node: Node, shape: tuple[int, ...]) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
        """Ways to put neighbouring tiles together, the group of each tile, and the bytes of partial results that ship."""
        labels, expression = node.expression.labels, node.expression
        parts, extents = dict(zip(labels, shape)), dict(node.extents)
        share = -(-prod(shape) // self.workers)
        itemsizes = tuple(map(self.graph.itemsize, node.inputs))
        blocks = np.minimum(factorisations(share, shape, False), np.array(shape))
        across = -(-np.array(shape) // blocks)
        blocks = blocks[across.prod(axis=1) <= self.workers]
        index = np.unravel_index(np.arange(prod(shape)), shape)
        priced = []
        for number, block in enumerate(blocks.tolist()):
            bundle = dict(zip(labels, block))
            joined = cost.join_traffic(expression, extents, parts, itemsizes, self.workers, bundle=bundle)
            itemsize = np.dtype(node.dtype).itemsize
            combined = cost.aggregate_traffic(
                expression, extents, parts, itemsize, self.workers, bundle=bundle
            )
            priced.append((joined.nbytes + combined.nbytes, number, combined.nbytes))
        for _, number, partial in sorted(priced)[:GRIDS]:
            group = np.zeros(prod(shape), dtype=np.int64)
            for axis, block in enumerate(blocks[number].tolist()):
                group = group * -(-shape[axis] // block) + index[axis] // block
            yield group, partial

    def delivered(self, source: str, chunks: Chunks | None) -> Traffic:
        """What it takes to cut a result into other chunks, each block put together where its largest piece lies."""
        stock = self.stocks.get(source)
        if stock is None or chunks is None or chunks == stock.chunks or not self.is_small(source, chunks):
            return Traffic()
        longest = [cost.overlaps(*pair).argmax(axis=0) for pair in zip(stock.chunks, chunks)]
        owners = stock.owners[np.ix_(*longest)].reshape(-1)
        needed = np.zeros((self.workers, len(owners)), dtype=bool)
        needed[owners, np.arange(len(owners))] = True
        _, first, _ = stock.take(chunks, needed)
        return first


def _sizes(grid: Chunks) -> npt.NDArray[np.float64]:
    """Elements of each block, row-major."""
    sizes = np.ones(1)
    for axis in grid:
        sizes = np.outer(sizes, axis).reshape(-1)
    return sizes


@lru_cache(maxsize=1024)
def _numbers(shape: tuple[int, ...], labels: Labels, operand: Labels) -> npt.NDArray[np.int64]:
    """For every tile the row-major number of the block of an operand that it reads.

    The same are asked for again and again; and `numpy.unravel_index` lets go of the interpreter's lock so briefly that
    no other thread gets it.
    """
    number = np.zeros(prod(shape), dtype=np.int64)
    index = np.unravel_index(np.arange(len(number)), shape) if shape else ()
    for label in operand:
        axis = labels.index(label)
        number = number * shape[axis] + index[axis]
    number.flags.writeable = False  # shared
    return number


def _assigned(
    operands: Sequence[_Operand], group: npt.NDArray[np.int64], workers: int
) -> tuple[Workers, float]:
    """A worker of its own for each group of tiles so that most stays where it is, and the bytes that do not."""
    count = int(group.max(initial=-1)) + 1
    score, total = np.zeros((count, workers)), 0.0
    for operand in operands:
        pairs = np.unique(np.stack([group, operand.number]), axis=1)
        np.add.at(score, pairs[0], operand.there[:, pairs[1]].T)
        total += float(operand.nbytes[pairs[1]].sum())
    stays = score.copy()
    score[np.arange(count), np.array(cost.spread(count, workers), dtype=np.int64)] += (
        0.5  # equal grids line up
    )
    chosen = _matched(score)
    return chosen, total - float(stays[np.arange(count), chosen].sum())


def _matched(score: npt.NDArray[np.float64]) -> Workers:
    """A column of its own for each row, of greatest sum: SciPy's answer, which is exact, if that is there."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        return _swapped(score)
    return np.asarray(linear_sum_assignment(score, maximize=True)[1], dtype=np.int64)


def _swapped(score: npt.NDArray[np.float64]) -> Workers:
    """The greatest first, then every exchange of two columns, or move to a free one, that makes the sum greater."""
    count, workers = score.shape
    chosen, free = np.full(count, -1), np.ones(workers, dtype=bool)
    for flat in np.argsort(-score, axis=None, kind="stable"):
        row, column = divmod(int(flat), workers)
        if chosen[row] < 0 and free[column]:
            chosen[row] = column
            free[column] = False
    better = True
    while better:
        better = False
        for row in range(count):
            for other in range(row):
                mine, theirs = chosen[row], chosen[other]
                gain = score[row, theirs] + score[other, mine] - score[row, mine] - score[other, theirs]
                if gain > 1e-9:
                    chosen[row], chosen[other] = theirs, mine
                    better = True
            moved = np.where(free, score[row], -np.inf)
            if moved.max() > score[row, chosen[row]] + 1e-9:
                free[chosen[row]] = True
                chosen[row] = int(moved.argmax())
                free[chosen[row]] = False
                better = True
    return chosen


def _in_turn(operands: Sequence[_Operand], runs: Workers, room: npt.NDArray[np.int64]) -> Workers:
    """So many tiles a worker: each where most of what it reads lies or was fetched to, while there is room."""
    room, there = room.copy(), [operand.there.copy() for operand in operands]
    chosen = np.empty(len(runs), dtype=np.int64)
    for tile, run in enumerate(runs.tolist()):
        score = np.where(room > 0, 0.0, -np.inf)
        for operand, mine in zip(operands, there):
            score += mine[:, operand.number[tile]]
        score[run] += 0.5
        worker = int(score.argmax())
        chosen[tile] = worker
        room[worker] -= 1
        for operand, mine in zip(operands, there):
            number = operand.number[tile]
            mine[worker, number] = operand.nbytes[number]
    return chosen


def _results(node: Node, mine: Partition, tiles: Workers, workers: int) -> tuple[Workers, Traffic]:
    """The worker of each block of a result, and what partial results ship.

    A block is where its tile is, or where partial results are added up, with one of them.
    """
    labels, output = node.expression.labels, node.expression.output
    contracted = [axis for axis, label in enumerate(labels) if label not in output]
    order = [labels.index(label) for label in output]
    apart = tiles.transpose(*order, *contracted)
    groups = apart.reshape(*apart.shape[: len(order)], -1)
    if groups.shape[-1] == 1:
        return np.asarray(groups[..., 0]), Traffic()
    sizes = _sizes(mine.grid(output)) * np.dtype(node.dtype).itemsize
    together = not isinstance(node.step, Reduction)  # a sum adds up what a worker has before it is sent
    load = np.zeros(workers, dtype=np.int64)
    flat = groups.reshape(-1, groups.shape[-1])
    owners = np.empty(len(flat), dtype=np.int64)
    nbytes = messages = 0
    for number, group in enumerate(flat):
        shared = np.bincount(group, minlength=workers)
        # the fewest results so far, then the most partial results already there
        owners[number] = min(set(group.tolist()), key=lambda worker: (load[worker], -shared[worker], worker))
        load[owners[number]] += 1
        there = np.count_nonzero(shared) - 1 if together else len(group) - shared[owners[number]]
        travelling = int(there)
        nbytes += travelling * int(sizes[number])
        messages += travelling
    return owners.reshape(groups.shape[:-1]), Traffic(nbytes, messages)
