"""Which worker runs which tile.

Tiles go where most of what they read already lies, evenly: no worker gets more of an expression's tiles than its
share.  Where a worker runs several tiles, what one of them fetched is there for the next.

    blocks of A, by worker    0 0 1 1        tiles of i, by worker    0 1
                              0 0 1 1   ─▶   (A cut by columns)       0 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from dask_eindecomp import cost
from dask_eindecomp.expression import Labels
from dask_eindecomp.graph import EinGraph, Node
from dask_eindecomp.partition import Chunks, Partition
from dask_eindecomp.plan import Placement, Workers
from dask_eindecomp.topology import Topology

__all__ = ["place"]

MOST = 1 << 20
"""Pairs of workers and tiles of one expression beyond which tiles are dealt out in runs, wherever their inputs lie."""


def place(graph: EinGraph, partitions: Mapping[str, Partition], topology: Topology) -> Placement:
    """Owners for every tile of every expression, those it reads placed before it.

    >>> spec, rows = {"Z": ("ij->i", "A")}, ((4, 4), (8,))
    >>> g = EinGraph.from_spec({"A": (8, 8)}, spec, ["Z"], chunks={"A": rows})
    >>> halves = {"Z": Partition.balanced({"i": 8, "j": 8}, {"i": 2})}
    >>> place(g, halves, Topology(workers=2)).tiles["Z"].tolist()
    [[0], [1]]
    """
    workers = topology.workers
    tiles: dict[str, Workers] = {}
    blocks: dict[str, Workers] = {}
    for given in graph.inputs.values():
        if given.chunks is not None:
            shape = tuple(map(len, given.chunks))
            owners = cost.spread(prod(shape), workers) if given.owners is None else given.owners
            blocks[given.name] = np.array(owners, dtype=np.int64).reshape(shape)
    for node in graph.nodes.values():
        mine = partitions[node.name]
        tiles[node.name] = _tiles(graph, node, partitions, blocks, workers)
        blocks[node.name] = _results(node, mine, tiles[node.name], workers)
    return Placement(tiles, blocks)


@dataclass
class _Operand:
    """What tiles read of one tensor."""

    there: npt.NDArray[np.float64]
    """Bytes of each wanted block that each worker holds, workers by blocks; grows as blocks are fetched."""
    nbytes: npt.NDArray[np.float64]
    """Bytes of each wanted block."""
    number: npt.NDArray[np.int64]
    """Which of these blocks each tile reads, tiles in row-major order."""


def _tiles(
    graph: EinGraph,
    node: Node,
    partitions: Mapping[str, Partition],
    blocks: Mapping[str, Workers],
    workers: int,
) -> Workers:
    """The worker of each tile of one expression."""
    mine, labels = partitions[node.name], node.expression.labels
    shape = tuple(mine.parts[label] for label in labels)
    count = prod(shape)
    runs = np.array(cost.spread(count, workers), dtype=np.int64)
    if workers == 1 or count * workers > MOST:
        return runs.reshape(shape)
    operands = []
    for operand, source in zip(node.expression.operands, node.inputs):
        produced = _grid(graph, source, partitions)
        if produced is not None:
            wanted, itemsize = mine.grid(operand), graph.itemsize(source)
            there = _presence(blocks[source], produced, wanted, workers) * itemsize
            sizes = there.sum(axis=0) if len(there) else there
            operands.append(_Operand(there, sizes, _numbers(shape, labels, operand)))
    if count <= workers:
        return _one_each(operands, runs, workers).reshape(shape)
    return _in_turn(operands, runs, workers).reshape(shape)


def _grid(graph: EinGraph, source: str, partitions: Mapping[str, Partition]) -> Chunks | None:
    """The chunks a tensor is in; None if it may be had in any."""
    if source in graph.inputs:
        return graph.inputs[source].chunks
    return partitions[source].grid(graph.nodes[source].expression.output)


def _presence(owners: Workers, produced: Chunks, wanted: Chunks, workers: int) -> npt.NDArray[np.float64]:
    """Elements of each wanted block that lie on each worker: workers by blocks in row-major order."""
    there = np.zeros((workers, *owners.shape))
    np.put_along_axis(there, owners[None], 1.0, axis=0)
    for have, want in zip(produced, wanted):
        # the first axis of blocks goes, the wanted one comes last: after all axes they are in order again
        there = np.tensordot(there, cost.overlaps(have, want).astype(np.float64), axes=(1, 0))
    return there.reshape(workers, -1)


def _numbers(shape: tuple[int, ...], labels: Labels, operand: Labels) -> npt.NDArray[np.int64]:
    """For every tile the row-major number of the block of an operand that it reads."""
    number = np.zeros(prod(shape), dtype=np.int64)
    index = np.unravel_index(np.arange(len(number)), shape) if shape else ()
    for label in operand:
        axis = labels.index(label)
        number = number * shape[axis] + index[axis]
    return number


def _one_each(operands: list[_Operand], runs: Workers, workers: int) -> Workers:
    """At most one tile a worker: the assignment that leaves most where it is."""
    score = np.zeros((len(runs), workers))
    for operand in operands:
        score += operand.there[:, operand.number].T
    score[np.arange(len(runs)), runs] += 0.5  # of equal ones the run's, so that equal grids line up
    chosen = np.full(len(runs), -1)
    free = np.ones(workers, dtype=bool)
    for flat in np.argsort(-score, axis=None, kind="stable"):
        tile, worker = divmod(int(flat), workers)
        if chosen[tile] < 0 and free[worker]:
            chosen[tile] = worker
            free[worker] = False
    return _swapped(score, chosen, free)


def _swapped(score: npt.NDArray[np.float64], chosen: Workers, free: npt.NDArray[np.bool_]) -> Workers:
    """The same assignment after every exchange of two tiles, or move to a free worker, that leaves more in place."""
    better = True
    while better:
        better = False
        for tile in range(len(chosen)):
            for other in range(tile):
                mine, theirs = chosen[tile], chosen[other]
                gain = score[tile, theirs] + score[other, mine] - score[tile, mine] - score[other, theirs]
                if gain > 1e-9:
                    chosen[tile], chosen[other] = theirs, mine
                    better = True
            moved = np.where(free, score[tile], -np.inf)
            if moved.max() > score[tile, chosen[tile]] + 1e-9:
                free[chosen[tile]] = True
                chosen[tile] = int(moved.argmax())
                free[chosen[tile]] = False
                better = True
    return chosen


def _in_turn(operands: list[_Operand], runs: Workers, workers: int) -> Workers:
    """Several tiles a worker: each where most of what it reads lies or was fetched to, while there is room."""
    room = np.full(workers, -(-len(runs) // workers))
    chosen = np.empty(len(runs), dtype=np.int64)
    for tile, run in enumerate(runs.tolist()):
        score = np.where(room > 0, 0.0, -np.inf)
        for operand in operands:
            score += operand.there[:, operand.number[tile]]
        score[run] += 0.5
        worker = int(score.argmax())
        chosen[tile] = worker
        room[worker] -= 1
        for operand in operands:
            number = operand.number[tile]
            operand.there[worker, number] = operand.nbytes[number]
    return chosen


def _results(node: Node, mine: Partition, tiles: Workers, workers: int) -> Workers:
    """The worker of each block of a result: its tile's, or where partial results are added up, one of theirs."""
    labels, output = node.expression.labels, node.expression.output
    contracted = [axis for axis, label in enumerate(labels) if label not in output]
    order = [labels.index(label) for label in output]
    apart = tiles.transpose(*order, *contracted)
    groups = apart.reshape(*apart.shape[: len(order)], -1)
    if groups.shape[-1] == 1:
        return np.asarray(groups[..., 0])
    load = np.zeros(workers, dtype=np.int64)
    flat = groups.reshape(-1, groups.shape[-1])
    owners = np.empty(len(flat), dtype=np.int64)
    for number, group in enumerate(flat):
        shared = np.bincount(group, minlength=workers)
        # the fewest results so far, then the most partial results already there
        owners[number] = min(set(group.tolist()), key=lambda worker: (load[worker], -shared[worker], worker))
        load[owners[number]] += 1
    return owners.reshape(groups.shape[:-1])
