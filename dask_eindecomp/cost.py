"""What a choice costs, in exact counts.

Two families stand side by side.  The *published* formulas count floats moved when nobody knows where tiles lie; they
are what EinDecomp was defined with (arXiv 2410.02682, section 8) and are kept exact, as fractions where grids do not
nest.  The *traffic* functions count what Dask moves: slices instead of tiles, a tile that lies where it is needed for
nothing.  Everything is a Python integer: NumPy's int64 wraps at real sizes.

The formulas of a single expression take float64 arrays of parts just as well, one entry a candidate, and then give
arrays: exact below 2**53.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from dask_eindecomp.expression import Expression, Labels
from dask_eindecomp.partition import Chunks, Cut, boundaries, factorisations

__all__ = [
    "Traffic",
    "across",
    "aggregate_traffic",
    "bundles",
    "delivery_traffic",
    "given_traffic",
    "join_traffic",
    "kernel_nbytes",
    "largest_overlap",
    "making_traffic",
    "nests",
    "paper_aggregate",
    "paper_join",
    "paper_repartition",
    "repartition_traffic",
    "stays",
    "tile_nbytes",
]

DEALT_OUT = 1 << 18
"""Most pairs of tiles with blocks or workers for which tiles are dealt out one by one."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one step of a plan moves and computes, counted exactly.

    >>> (Traffic(nbytes=64, peak_nbytes=9) + Traffic(nbytes=16, peak_nbytes=7)).peak_nbytes
    9
    """

    nbytes: int = 0
    """Bytes that must reach a worker which does not yet hold them."""
    messages: int = 0
    """Block-sized transfers; each pays the link's latency once."""
    flops: int = 0
    """Joins evaluated (one multiply-add each in a contraction), over all tiles together."""
    tasks: int = 0
    """Dask tasks, inputs not counted."""
    peak_nbytes: int = 0
    """Largest memory of one worker; sums take the larger."""
    crossing: int = 0
    """Bytes of `nbytes` that go from one host to another."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.nbytes + other.nbytes,
            self.messages + other.messages,
            self.flops + other.flops,
            self.tasks + other.tasks,
            max(self.peak_nbytes, other.peak_nbytes),
            self.crossing + other.crossing,
        )

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def paper_join(expression: Expression, extents: Mapping[str, int], parts: Mapping[str, int]) -> int:
    """Floats the join moves: every input once for each cut of a label it lacks.

    >>> paper_join(Expression.parse("ij,jk->ik"), {"i": 16, "j": 16, "k": 16}, {"i": 2, "j": 2, "k": 2})
    1024
    """
    return sum(
        prod(extents[label] for label in labels)
        * prod(parts[label] for label in expression.labels if label not in labels)
        for labels in expression.operands
    )


def paper_aggregate(expression: Expression, extents: Mapping[str, int], parts: Mapping[str, int]) -> int:
    """Floats the aggregate moves: all partial results of a tile but one.

    >>> paper_aggregate(Expression.parse("ij,jk->ik"), {"i": 16, "j": 16, "k": 16}, {"i": 2, "j": 2, "k": 2})
    256
    """
    partials = prod(parts[label] for label in expression.contracted)
    return prod(extents[label] for label in expression.output) * (partials - 1)


def paper_repartition(
    shape: tuple[int, ...], produced: tuple[int, ...], consumed: tuple[int, ...]
) -> Fraction:
    """Floats moved from a grid of ``produced`` parts an axis to one of ``consumed``.

    >>> paper_repartition((8, 8), (4, 1), (1, 4)), paper_repartition((8, 8), (2, 2), (2, 2))
    (Fraction(448, 1), Fraction(0, 1))
    """
    if produced == consumed:
        return Fraction(0)
    size = prod(shape)
    if not size:
        return Fraction(0)
    meeting = Fraction(size, prod(map(max, produced, consumed)))
    return size * Fraction(size, prod(produced)) / meeting + size * (
        Fraction(size, prod(consumed)) / meeting - 1
    )


def join_traffic(
    expression: Expression,
    extents: Mapping[str, int],
    parts: Mapping[str, Any],
    itemsizes: tuple[int, ...],
    workers: int | None = None,
    hosts: int = 1,
    bundle: Mapping[str, Any] | None = None,
) -> Traffic:
    """What the join ships beyond one copy of each input tile: the all-gather of the grid.

    ``itemsizes`` are the bytes of one element of each operand.  No more than one copy reaches each of ``workers``;
    None is as many workers as tiles.  Workers of one host come before those of the next.  ``bundle`` is how many
    tiles of one worker stand together along each label, one by default.

    >>> matmul = Expression.parse("ij,jk->ik")
    >>> join_traffic(matmul, {"i": 16, "j": 16, "k": 16}, {"i": 2, "j": 2, "k": 2}, (8, 8)).nbytes
    4096
    """
    nbytes = messages = crossing = 0
    for labels, itemsize in zip(expression.operands, itemsizes):
        distinct = tuple(dict.fromkeys(labels))  # a diagonal's tiles off it are never read
        copies = further_copies(expression, labels, parts, workers, bundle)
        size = prod(extents[label] for label in distinct) * itemsize
        nbytes += size * copies
        messages += prod(parts[label] for label in distinct) * copies
        if workers is not None and hosts > 1:
            crossing += size * (copies // -(-workers // hosts))
    tasks = prod(parts.values())
    return Traffic(nbytes, messages, prod(extents.values()), tasks, crossing=crossing)


def further_copies(
    expression: Expression,
    labels: Labels,
    parts: Mapping[str, Any],
    workers: int | None = None,
    bundle: Mapping[str, Any] | None = None,
) -> Any:
    """Copies of each tile of an operand that are needed beyond the first: one for each cut of a label it lacks.

    >>> further_copies(Expression.parse("ij,jk->ik"), ("i", "j"), {"i": 2, "j": 2, "k": 3})
    2
    """
    between = across(parts, bundle)
    copies = prod(between[label] for label in expression.labels if label not in labels) - 1
    return copies if workers is None else at_most(copies, workers - 1)


def aggregate_traffic(
    expression: Expression,
    extents: Mapping[str, int],
    parts: Mapping[str, Any],
    itemsize: int,
    workers: int | None = None,
    hosts: int = 1,
    bundle: Mapping[str, Any] | None = None,
) -> Traffic:
    """What the aggregate ships: a partial result of every worker but one; nothing on one worker.

    >>> matmul = Expression.parse("ij,jk->ik")
    >>> aggregate_traffic(matmul, {"i": 16, "j": 16, "k": 16}, {"i": 2, "j": 2, "k": 2}, 8).nbytes
    2048
    """
    partials = prod(parts[label] for label in expression.contracted)
    size = prod(extents[label] for label in expression.output)
    tiles = prod(parts[label] for label in expression.output)
    apart = prod(across(parts, bundle)[label] for label in expression.contracted)
    travelling = (apart - 1) * (workers != 1)
    # those of one worker are added up there first
    there = 0 if workers == 1 else tiles * apart * (apart < partials) * (apart > 1)
    crossing = 0
    if workers is not None and hosts > 1:
        crossing = size * itemsize * at_least(apart - -(-workers // hosts), 0)
    return Traffic(
        nbytes=size * travelling * itemsize,
        messages=tiles * travelling,
        flops=size * (partials - 1),
        tasks=tiles * (partials > 1) + there,
        crossing=crossing,
    )


MOST_BUNDLES = 1 << 17
"""Blocks of tiles, over all candidates with as many tiles, that are looked at; more would take seconds."""


def across(parts: Mapping[str, Any], bundle: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Parts of each label that lie on different workers.

    >>> across({"i": 5, "j": 4}, {"i": 2, "j": 4})
    {'i': 3, 'j': 1}
    """
    return parts if bundle is None else {label: -(-count // bundle[label]) for label, count in parts.items()}


def bundles(
    expression: Expression,
    extents: Mapping[str, int],
    parts: Mapping[str, Any],
    itemsizes: tuple[int, ...],
    itemsize: int,
    workers: int,
    reading: Callable[[Mapping[str, Any]], Any] | None = None,
) -> dict[str, Any]:
    """How the tiles of one worker stand together where there are more tiles than workers: tiles along each label.

    Of all blocks of tiles that share the work out evenly the one with which join and aggregate ship least; one tile
    each where nothing else divides, or where there are too many to look at.  ``reading`` gives the bytes that it ships
    besides, from the cuts of each label that lie between workers.

    >>> matmul, extents = Expression.parse("ij,jk->ik"), {"i": 64, "j": 8, "k": 8}
    >>> bundles(matmul, extents, {"i": 4, "j": 1, "k": 4}, (8, 8), 8, workers=4)
    {'i': 1, 'j': 1, 'k': 4}
    """
    if workers == 1 or not parts:
        return dict(parts)
    labels = tuple(parts)
    counts = np.stack(np.broadcast_arrays(*(np.asarray(parts[label], dtype=np.int64) for label in labels)))
    several = counts.ndim > 1
    counts = counts.reshape(len(labels), -1)
    share = -(-counts.prod(axis=0) // workers)
    chosen = np.ones_like(counts)
    for most in np.unique(share[share > 1]).tolist():
        mine = np.flatnonzero(share == most)
        grid = counts[:, mine]
        rows = factorisations(most, tuple(grid.max(axis=1).tolist()), False)
        if not 0 < len(rows) * len(mine) <= MOST_BUNDLES:
            continue
        block = dict(zip(labels, np.minimum(rows.T[:, :, None], grid[:, None, :])))
        cut = {label: np.broadcast_to(grid[axis], block[label].shape) for axis, label in enumerate(labels)}
        joined = join_traffic(expression, extents, cut, itemsizes, workers, bundle=block)
        combined = aggregate_traffic(expression, extents, cut, itemsize, workers, bundle=block)
        between = prod(across(cut, block).values())
        nbytes = joined.nbytes + combined.nbytes + (0 if reading is None else reading(across(cut, block)))
        moved = np.where(between <= workers, nbytes + np.zeros(between.shape), np.inf)
        best = moved.argmin(axis=0)
        fits = np.flatnonzero(np.isfinite(moved.min(axis=0)))
        for axis, label in enumerate(labels):
            chosen[axis, mine[fits]] = block[label][best, np.arange(len(mine))][fits]
    kept = chosen if several else chosen[:, 0].tolist()
    return dict(zip(labels, kept))


def kernel_nbytes(
    expression: Expression,
    extents: Mapping[str, int],
    parts: Mapping[str, Any],
    itemsizes: tuple[int, ...],
    itemsize: int,
) -> Any:
    """Bytes that the tiles of a join together read and write, each tile its own operands and result.

    >>> matmul = Expression.parse("ij,jk->ik")
    >>> kernel_nbytes(matmul, {"i": 2, "j": 2, "k": 2}, {"i": 2, "j": 1, "k": 1}, (8, 8), 8)
    128
    """
    total = 0
    for labels, each in zip((*expression.operands, expression.output), (*itemsizes, itemsize)):
        lacking = prod(parts[label] for label in expression.labels if label not in labels)
        total += prod(extents[label] for label in dict.fromkeys(labels)) * each * lacking
    return total


def tile_nbytes(labels: Labels, extents: Mapping[str, int], parts: Mapping[str, Any], itemsize: int) -> Any:
    """Bytes of the largest tile of a tensor with these labels.

    >>> tile_nbytes(("i", "j"), {"i": 10, "j": 2}, {"i": 4, "j": 1}, 8)
    48
    """
    return prod(-(-extents[label] // parts[label]) for label in dict.fromkeys(labels)) * itemsize


def at_most(value: Any, limit: int) -> Any:
    """The lesser of the two, of arrays entry by entry."""
    return np.minimum(value, limit) if isinstance(value, np.ndarray) else min(value, limit)


def at_least(value: Any, limit: int) -> Any:
    """The larger of the two, of arrays entry by entry."""
    return np.maximum(value, limit) if isinstance(value, np.ndarray) else max(value, limit)


@lru_cache(maxsize=65536)
def axis_overlap(produced: Cut, consumed: Cut) -> tuple[int, int, int]:
    """Of two cuts of one axis: the longest piece of both, all pieces, and those that are whole produced chunks.

    >>> axis_overlap((4, 4), (2, 6))
    (4, 3, 1)
    """
    mine, theirs = np.unique(boundaries(produced)), np.unique(boundaries(consumed))
    lengths = np.diff(np.unique(np.concatenate([mine, theirs])))
    inside = np.searchsorted(theirs, mine[1:], side="left") - np.searchsorted(theirs, mine[:-1], side="right")
    return int(lengths.max(initial=0)), len(lengths), int((inside == 0).sum())


def largest_overlap(produced: Cut, consumed: Cut) -> int:
    """Most elements that one chunk of either cut shares with one of the other.

    >>> largest_overlap((5, 5), (4, 3, 3))
    4
    """
    return axis_overlap(produced, consumed)[0]


@lru_cache(maxsize=65536)
def nests(produced: Cut, consumed: Cut) -> bool:
    """Whether every consumed chunk is a union of whole produced chunks.

    >>> nests((2, 2, 2), (4, 2)), nests((4, 2), (2, 2, 2))
    (True, False)
    """
    return set(boundaries(consumed)) <= set(boundaries(produced))


def overlaps(produced: Cut, consumed: Cut) -> np.ndarray:
    """Elements that each produced chunk shares with each consumed one, ``len(produced)`` by ``len(consumed)``."""
    one, two = np.array(boundaries(produced), dtype=np.int64), np.array(boundaries(consumed), dtype=np.int64)
    start = np.maximum(one[:-1, None], two[None, :-1])
    stop = np.minimum(one[1:, None], two[None, 1:])
    return np.asarray(np.maximum(stop - start, 0))


def stays(produced: Chunks, consumed: Chunks, workers: int, copies: int = 1) -> int:
    """Elements that need not move between two grids, owners chosen at best.

    With one tile a worker that is ``min(tiles, tiles) * largest intersection`` (exact where grids nest).  Where a
    side has more tiles than workers, each worker holds several: they are taken to form the coarser grid that lines
    up best with the other side.

    >>> stays(((2, 2, 2, 2), (8,)), ((8,), (2, 2, 2, 2)), workers=4)
    16
    >>> stays(((1,) * 8, (8,)), ((2,) * 4, (8,)), workers=4)
    64

    Where several workers want a tile, each has in place what it holds of it:

    >>> [stays(((2, 2, 2, 2), (8,)), ((8,), (8,)), workers=4, copies=copies) for copies in (1, 2, 4)]
    [16, 32, 64]
    """
    size = prod(sum(chunks) for chunks in produced)
    if produced == consumed or workers == 1:
        return size
    some, other = prod(map(len, produced)), prod(map(len, consumed))
    copied = min(other * copies, workers)
    meeting = Fraction(prod(largest_overlap(p, c) for p, c in zip(produced, consumed)))
    finer = Fraction(prod(max(Fraction(len(p), len(c)), Fraction(1)) for p, c in zip(produced, consumed)))
    coarser = Fraction(prod(max(Fraction(len(c), len(p)), Fraction(1)) for p, c in zip(produced, consumed)))
    owners_some, owners_other = min(some, workers), min(other, workers)
    grown = min(Fraction(some, owners_some), finer) * min(Fraction(other, owners_other), coarser)
    return min(int(min(owners_some, copied) * meeting * grown), size)


def repartition_tasks(produced: Chunks, consumed: Chunks) -> int:
    """Slices that have to be cut: pieces of blocks that a consumed tile takes a part of.

    >>> repartition_tasks(((4, 4),), ((2, 2, 2, 2),)), repartition_tasks(((2, 2, 2, 2),), ((4, 4),))
    (4, 0)
    """
    counts = [axis_overlap(p, c) for p, c in zip(produced, consumed)]
    return prod(pieces for _, pieces, _ in counts) - prod(whole for *_, whole in counts)


def repartition_messages(produced: Chunks, consumed: Chunks, missing: int) -> int:
    """Pieces that travel: of all that blocks fall into, the share of the elements that are missing.

    >>> repartition_messages(((2, 2, 2, 2),), ((8,),), 6)
    3
    """
    size = prod(sum(chunks) for chunks in produced)
    pieces = prod(axis_overlap(p, c)[1] for p, c in zip(produced, consumed))
    return -(-pieces * missing // size) if missing else 0


def _shipped(produced: Chunks, consumed: Chunks, missing: int, itemsize: int, hosts: int) -> Traffic:
    """Traffic of so many elements that are not in place."""
    outside = prod(sum(chunks) for chunks in produced) - stays(produced, consumed, hosts)
    return Traffic(
        missing * itemsize,
        repartition_messages(produced, consumed, missing),
        tasks=repartition_tasks(produced, consumed),
        crossing=min(outside, missing) * itemsize,
    )


def repartition_traffic(
    produced: Chunks, consumed: Chunks, itemsize: int, workers: int, hosts: int = 1, copies: int = 1
) -> Traffic:
    """What is shipped from one grid to another when only missing slices travel, at best overlap.

    Of ``copies`` of each tile that as many workers want, `join_traffic` counts all but one whole; what is in place of any
    of them counts here.

    Rows to columns over P workers moves ``(1 - 1/P)`` of the tensor, where the published formula charges
    ``2P - 1`` times all of it.

    >>> repartition_traffic(((2, 2, 2, 2), (8,)), ((8,), (2, 2, 2, 2)), itemsize=1, workers=4).nbytes
    48
    """
    if produced == consumed:
        return Traffic()
    size = prod(sum(chunks) for chunks in produced)
    missing = size - stays(produced, consumed, workers, copies)
    return _shipped(produced, consumed, missing, itemsize, hosts)


@lru_cache(maxsize=65536)
def axis_delivery(produced: Cut, consumed: Cut) -> int:
    """Elements of one axis that are in place when each consumed chunk is put together where its longest piece is.

    >>> axis_delivery((4, 4), (2, 2, 2, 2)), axis_delivery((2, 2, 2, 2), (8,))
    (8, 2)
    """
    have, want = boundaries(produced), boundaries(consumed)
    marks = np.unique([*have, *want])
    which = np.searchsorted(want, marks[:-1], side="right") - 1
    longest = np.zeros(len(consumed), dtype=np.int64)
    np.maximum.at(longest, which, np.diff(marks))
    return int(longest.sum())


def delivery_traffic(
    produced: Chunks, consumed: Chunks, itemsize: int, workers: int, hosts: int = 1
) -> Traffic:
    """What is shipped to put a result into other chunks, each block made where its largest piece lies.

    Unlike tiles, blocks that leave need not be shared out evenly: a grid that is only cut finer moves nothing.

    >>> rows, columns = ((2, 2, 2, 2), (8,)), ((8,), (2, 2, 2, 2))
    >>> delivery_traffic(rows, ((1,) * 8, (8,)), 1, 4).nbytes, delivery_traffic(rows, columns, 1, 4).nbytes
    (0, 48)
    """
    if produced == consumed:
        return Traffic()
    size = prod(sum(chunks) for chunks in produced)
    missing = size - prod(axis_delivery(p, c) for p, c in zip(produced, consumed)) if workers > 1 else 0
    return _shipped(produced, consumed, missing, itemsize, hosts)


def spread(blocks: int, workers: int) -> tuple[int, ...]:
    """Owner of each of ``blocks`` blocks, row-major runs of them spread evenly.

    >>> spread(5, 2)
    (0, 0, 0, 1, 1)
    """
    return tuple(block * workers // blocks for block in range(blocks))


def making_traffic(made: Chunks, consumed: Chunks, itemsize: int, workers: int, hosts: int = 1) -> Traffic:
    """What is shipped from blocks that are made when they are read, each where most of it is wanted.

    >>> making_traffic(((2, 2), (4,)), ((4,), (2, 2)), 1, 4).nbytes, making_traffic(((1,) * 4,), ((4,),), 1, 4).nbytes
    (8, 0)
    """
    if made == consumed:
        return Traffic()
    size = prod(sum(chunks) for chunks in made)
    missing = size - prod(axis_delivery(c, m) for m, c in zip(made, consumed)) if workers > 1 else 0
    return _shipped(made, consumed, missing, itemsize, hosts)


def portions(count: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """How ``count`` tiles are dealt out in proportion to shares: rounded down, the rest to the largest remainders.

    >>> portions(8, (1, 3)), portions(3, (2, 2))
    ((2, 6), (2, 1))
    """
    total = sum(shares)
    whole = [count * share // total for share in shares]
    rest = sorted(range(len(shares)), key=lambda worker: (-(count * shares[worker] % total), worker))
    for worker in rest[: count - sum(whole)]:
        whole[worker] += 1
    return tuple(whole)


@lru_cache(maxsize=65536)
def given_traffic(
    chunks: Chunks,
    owners: tuple[int, ...] | None,
    consumed: Chunks,
    itemsize: int,
    workers: int,
    hosts: int = 1,
    copies: int = 1,
) -> Traffic:
    """What is shipped from blocks that lie where they lie to a grid of tiles, each tile placed where most of it is.

    ``owners`` are the blocks' workers in row-major order; None is rows of blocks spread evenly.  Tiles are dealt out
    evenly, the largest overlap first.  Where blocks, tiles and workers are too many for that, the best overlap counts,
    as between two expressions.

    >>> given_traffic(((4, 4), (4, 4)), None, ((4, 4), (4, 4)), itemsize=1, workers=4).nbytes
    0
    """
    blocks = prod(map(len, chunks))
    tiles = prod(map(len, consumed))
    if tiles * max(blocks, workers) > DEALT_OUT:
        return repartition_traffic(chunks, consumed, itemsize, workers, hosts, copies)
    held = np.zeros((workers, tiles), dtype=np.float64)
    overlap: np.ndarray = np.ones((1, 1))
    for produced, wanted in zip(chunks, consumed):
        overlap = np.kron(overlap, overlaps(produced, wanted).astype(np.float64))
    np.add.at(held, np.array(spread(blocks, workers) if owners is None else owners), overlap)
    sizes = overlap.sum(axis=0)
    room = np.full(workers, -(-tiles * copies // workers))
    nbytes = crossing = 0
    near = np.arange(workers) * hosts // workers
    todo = np.full(tiles, copies)
    for flat in np.argsort(-held, axis=None, kind="stable"):
        worker, tile = divmod(int(flat), tiles)
        if todo[tile] and room[worker]:
            todo[tile] -= 1
            room[worker] -= 1
            nbytes += int(sizes[tile] - held[worker, tile])
            if hosts > 1:
                crossing += int(sizes[tile] - held[near == near[worker], tile].sum())
    # all copies but one are counted whole elsewhere, those to other hosts among them; what nobody took lacks nothing here
    size = int(sizes.sum())
    nbytes = max(nbytes + int((todo * sizes).sum()) - size * (copies - 1), 0)
    crossing = min(max(crossing - size * ((copies - 1) // -(-workers // hosts)), 0), nbytes)
    return Traffic(
        nbytes * itemsize,
        repartition_messages(chunks, consumed, nbytes),
        tasks=repartition_tasks(chunks, consumed),
        crossing=crossing * itemsize,
    )
