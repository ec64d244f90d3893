"""How axes are cut.

A *cut* is the tuple of lengths one axis falls into (Dask's chunks of one axis).  A *partition* gives every label of
an expression a cut; the tiles of the expression are the product of its cuts.  The planner mostly proposes balanced
cuts, and beside them the cuts that arrays already have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from dask_eindecomp.expression import Labels

__all__ = ["Chunks", "Cut", "Partition", "PartitionError", "boundaries", "cut", "pieces_of", "viable"]

Cut = tuple[int, ...]
Chunks = tuple[Cut, ...]


class PartitionError(ValueError):
    """An axis that cannot be cut as asked."""


@lru_cache(maxsize=65536)
def cut(extent: int, parts: int) -> Cut:
    """Cut ``extent`` elements into ``parts`` chunks that differ by at most one.

    Longer chunks come first, so equal cuts of equal axes always line up.

    >>> cut(10, 4)
    (3, 3, 2, 2)
    """
    most = max(extent, 1)  # an empty axis is one empty chunk
    if not 1 <= parts <= most:
        raise PartitionError(f"cannot cut {extent} elements into {parts} parts; expected 1 to {most}")
    short, longer = divmod(extent, parts)
    return (short + 1,) * longer + (short,) * (parts - longer)


@lru_cache(maxsize=65536)
def boundaries(chunks: Cut) -> tuple[int, ...]:
    """Where the chunks of one axis begin, and where the last one ends.

    >>> boundaries((3, 3, 2))
    (0, 3, 6, 8)
    """
    return (0, *accumulate(chunks))


Piece = tuple[int, int, int, bool]
"""Number of a block, first and last element wanted of it, whether that is all of it."""


@lru_cache(maxsize=65536)
def pieces_of(produced: Cut, consumed: Cut) -> tuple[tuple[Piece, ...], ...]:
    """For every consumed chunk of one axis the pieces of produced chunks it is made of.

    >>> pieces_of((4, 4), (6, 2))
    (((0, 0, 4, True), (1, 0, 2, False)), ((1, 2, 4, False),))
    """
    if produced == consumed:  # also where some chunks are empty
        return tuple(((number, 0, length, True),) for number, length in enumerate(produced))
    have, want = boundaries(produced), boundaries(consumed)
    return tuple(tuple(_overlapping(have, low, high)) for low, high in pairwise(want))


def _overlapping(have: tuple[int, ...], low: int, high: int) -> Iterator[Piece]:
    found = False
    for number, (start, stop) in enumerate(pairwise(have)):
        first, last = max(start, low), min(stop, high)
        if first < last:
            found = True
            yield number, first - start, last - start, (first, last) == (start, stop)
    if not found:  # an empty chunk is read from the block it lies in
        number = next(n for n, stop in enumerate(have[1:]) if low <= stop)
        start, stop = have[number], have[number + 1]
        yield number, low - start, low - start, start == stop


@dataclass(frozen=True, slots=True)
class Partition:
    """The cut of every label of one expression.

    >>> p = Partition.balanced({"i": 4, "j": 6}, {"i": 2, "j": 3})
    >>> p.tiles, p.parts, p.grid(("j", "i"))
    (6, {'i': 2, 'j': 3}, ((2, 2, 2), (2, 2)))
    """

    cuts: tuple[tuple[str, Cut], ...]
    """Label and cut, in the order of the expression's labels."""

    @classmethod
    def balanced(cls, extents: Mapping[str, int], parts: Mapping[str, int]) -> Partition:
        """The balanced partition with so many parts a label; labels not named stay whole."""
        return cls(tuple((label, cut(extent, parts.get(label, 1))) for label, extent in extents.items()))

    @property
    def parts(self) -> dict[str, int]:
        """How many parts each label is cut into."""
        return {label: len(chunks) for label, chunks in self.cuts}

    @property
    def tiles(self) -> int:
        """Number of tiles: the product of the parts."""
        return prod(len(chunks) for _, chunks in self.cuts)

    def grid(self, labels: Labels) -> Chunks:
        """Chunks of a tensor whose axes have these labels."""
        cuts = dict(self.cuts)
        return tuple(cuts[label] for label in labels)


def divisors(number: int) -> list[int]:
    """Every divisor, smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


@lru_cache(maxsize=4096)
def factorisations(number: int, limits: tuple[int, ...], divide: bool) -> npt.NDArray[np.int64]:
    """Ordered factorisations of ``number``, a row each, one factor an axis, none above the axis' extent.

    With ``divide`` a factor must divide its extent, as in the published planner; else any balanced cut will do.

    >>> factorisations(4, (4, 2), False).tolist()
    [[2, 2], [4, 1]]
    """
    if not limits:
        return np.ones((int(number == 1), 0), dtype=np.int64)
    extent, *others = limits
    found = [np.ones((0, len(limits)), dtype=np.int64)]
    for parts in divisors(number):
        if parts <= max(extent, 1) and (not divide or extent % parts == 0):
            rest = factorisations(number // parts, tuple(others), divide)
            found.append(np.column_stack([np.full(len(rest), parts), rest]))
    rows = np.concatenate(found)
    rows.flags.writeable = False
    return rows


def smooth(limit: int) -> int:
    """The largest number up to ``limit`` with no prime factor above 5: it can be shared out in many ways.

    >>> smooth(7), smooth(64), smooth(101)
    (6, 64, 100)
    """
    for number in range(limit, 1, -1):
        rest = number
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return number
    return 1


def viable(extents: Mapping[str, int], tiles: int, divide: bool = False) -> list[dict[str, int]]:
    """Every way to cut the labels into exactly ``tiles`` tiles: parts by label.

    If there is none, the largest feasible number of tiles below is used.

    >>> viable({"i": 4, "j": 2}, 4)
    [{'i': 2, 'j': 2}, {'i': 4, 'j': 1}]
    >>> viable({"i": 2, "j": 2, "k": 2}, 16, divide=True)
    [{'i': 2, 'j': 2, 'k': 2}]

    Raises
    ------
    PartitionError
        If ``tiles`` is not positive.
    """
    if tiles < 1:
        raise PartitionError(f"cannot cut an expression into {tiles} tiles; expected at least 1")
    rows = viable_rows(tuple(extents.values()), tiles, divide)
    return [dict(zip(extents, row)) for row in rows.tolist()]


@lru_cache(maxsize=4096)
def viable_rows(extents: tuple[int, ...], tiles: int, divide: bool = False) -> npt.NDArray[np.int64]:
    """What `viable` gives, parts of one way a row."""
    power = tiles & (tiles - 1) == 0
    number = tiles if divide else min(tiles, prod(max(extent, 1) for extent in extents))
    while number >= 1:
        rows = factorisations(number, extents, divide)
        if len(rows):
            return rows
        # halving keeps the published candidates: powers of two fall back to powers of two
        number = number // 2 if power and divide else number - 1
    raise AssertionError("one tile is always viable")
