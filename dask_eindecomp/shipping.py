"""What a placement ships, block by block.

A worker has a block because it computed it, was given it, or fetched it for an earlier tile.  Of a block that a tile
needs only a part of, that part is cut where the block lies, and a copy of it serves every tile of that worker which
needs the same part.  So what counts is *pieces*: where two cuts of an axis meet::

      blocks      │    0      │     1     │
      wanted      │   0  │    1    │  2   │
      pieces      │  0:0 │0:1 │ 1:1│ 1:2  │      cut, cut, cut, cut; a piece that is all of its block is the block
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dask_eindecomp.cost import Traffic
from dask_eindecomp.partition import Chunks, Cut, Piece, pieces_of
from dask_eindecomp.plan import Workers

__all__ = ["Stock"]

Table = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Axis:
    """Pieces along one axis, in order."""

    block: npt.NDArray[np.int64]
    """Which block each is of."""
    length: npt.NDArray[np.int64]
    """Elements of each."""
    number: npt.NDArray[np.int64]
    """What each piece is known by: equal for equal parts of one block, whatever they were cut for."""
    first: npt.NDArray[np.int64]
    """The first piece of each wanted block."""


@dataclass(frozen=True, eq=False)
class Stock:
    """Which workers have which pieces of one tensor.

    >>> rows = Stock.of(((2, 2), (4,)), np.array([[0], [1]]), itemsize=8, workers=2)
    >>> rows.there(((4,), (2, 2))).tolist()
    [[4.0, 4.0], [4.0, 4.0]]
    """

    chunks: Chunks
    """How it is cut."""
    owners: Workers
    """The worker of each block."""
    itemsize: int
    """Bytes of an element."""
    workers: int
    """How many there are."""
    fetched: Flags
    """Which worker fetched which piece: an axis of numbers for each axis."""
    known: tuple[dict[Piece, int], ...]
    """For each axis the number of every piece seen so far; grows, and is shared by all that come of one tensor."""

    @classmethod
    def of(cls, chunks: Chunks, owners: Workers, itemsize: int, workers: int) -> Stock:
        """A tensor of which nothing was fetched yet."""
        nothing = np.zeros((workers, *(0 for _ in chunks)), dtype=bool)
        return cls(chunks, owners, itemsize, workers, nothing, tuple({} for _ in chunks))

    def there(self, wanted: Chunks) -> Table:
        """Elements of each wanted block that each worker has, workers by blocks in row-major order."""
        axes, fetched = self._axes(wanted)
        return _summed(self._present(axes, fetched) * _sizes(axes), axes)

    def take(self, wanted: Chunks, needed: Flags) -> tuple[Stock, Traffic, Traffic]:
        """Fetch what workers lack of the blocks they need: who has what then, and what first and further copies cost.

        ``needed`` says for workers by wanted blocks, row-major, who needs what.
        """
        axes, fetched = self._axes(wanted)
        absent = ~self._present(axes, fetched)
        sizes = _sizes(axes)
        lacking = _summed(absent * sizes, axes)
        pieces = _summed((absent & (sizes > 0)).astype(float), axes)
        first, further = Traffic(), Traffic()
        if needed.any():
            # the copy that takes least is the first
            least = np.where(needed, lacking, np.inf).argmin(axis=0)
            once = np.zeros_like(needed)
            once[least, np.arange(needed.shape[1])] = needed.any(axis=0)
            first = self._traffic(lacking, pieces, once)
            further = self._traffic(lacking, pieces, needed & ~once)
        grid = needed.reshape(self.workers, *(len(axis.first) for axis in axes))
        for number, axis in enumerate(axes):
            counts = np.diff([*axis.first, len(axis.block)])
            grid = np.repeat(grid, counts, axis=number + 1)
        at = np.ix_(np.arange(self.workers), *(axis.number for axis in axes))
        if (fetched[at] >= grid).all():  # the same, so that what comes next is alike too
            return self, first, further
        fetched = fetched.copy()
        fetched[at] |= grid
        return replace(self, fetched=fetched), first, further

    def _traffic(self, lacking: Table, pieces: Table, who: Flags) -> Traffic:
        return Traffic(int(lacking[who].sum()) * self.itemsize, int(pieces[who].sum()))

    def _axes(self, wanted: Chunks) -> tuple[list[_Axis], Flags]:
        """The pieces of every axis, those that are new with new numbers, and who fetched which by these numbers."""
        axes = [_axis(*pair, known) for pair, known in zip(zip(self.chunks, wanted), self.known)]
        more = [(0, len(known) - size) for known, size in zip(self.known, self.fetched.shape[1:])]
        return axes, np.pad(self.fetched, [(0, 0), *more]) if any(n for _, n in more) else self.fetched

    def _present(self, axes: list[_Axis], fetched: Flags) -> Flags:
        """Whether each worker has each piece."""
        mine = self.owners[np.ix_(*(axis.block for axis in axes))] if axes else self.owners
        owned = np.arange(self.workers).reshape(-1, *(1 for _ in axes)) == mine
        return np.asarray(owned | fetched[np.ix_(np.arange(self.workers), *(axis.number for axis in axes))])


def _axis(have: Cut, want: Cut, known: dict[Piece, int]) -> _Axis:
    """The pieces of one axis."""
    found = pieces_of(have, want)
    every = [piece for mine in found for piece in mine]
    first = np.cumsum([0, *map(len, found[:-1])])
    numbers = np.array([known.setdefault(piece, len(known)) for piece in every])
    where = np.array(every, dtype=np.int64).reshape(-1, 4)
    return _Axis(where[:, 0], where[:, 2] - where[:, 1], numbers, first)


def _sizes(axes: list[_Axis]) -> npt.NDArray[np.int64]:
    """Elements of every piece."""
    sizes = np.ones((), dtype=np.int64)
    for axis in axes:
        sizes = sizes[..., None] * axis.length
    return sizes


def _summed(pieces: npt.NDArray[np.float64] | npt.NDArray[np.int64], axes: list[_Axis]) -> Table:
    """Sums over the pieces of each wanted block, flat: workers by blocks."""
    total = np.asarray(pieces, dtype=np.float64)
    for number, axis in enumerate(axes):
        total = np.add.reduceat(total, axis.first, axis=number + 1)
    return total.reshape(len(total), -1)
