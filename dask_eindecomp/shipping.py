"""What a placement ships, block by block.

A worker has a block because it computed it, was given it, or fetched it for an earlier tile; a tile that needs only a
part of a block has that part cut where the block lies, and a copy of the part serves every tile of that worker which
needs the same part.

      block 0     block 1           a tile needs
    ┌───────────┬───────────┐     ┌─────┬─────────┐
    │           │           │     │ cut │  whole  │
    └───────────┴───────────┘     └─────┴─────────┘
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dask_eindecomp import cost
from dask_eindecomp.cost import Traffic
from dask_eindecomp.partition import Chunks
from dask_eindecomp.plan import Workers

__all__ = ["Stock"]

Table = npt.NDArray[np.float64]


@dataclass
class Stock:
    """Which workers have which blocks of one tensor.

    >>> rows = Stock(((2, 2), (4,)), np.array([[0], [1]]), itemsize=8, workers=2)
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
    fetched: dict[Chunks, npt.NDArray[np.bool_]] = field(default_factory=dict)
    """Of each grid it was cut into, who fetched which part; under its own chunks, whole blocks."""

    def there(self, wanted: Chunks) -> Table:
        """Elements of each wanted block that each worker has, workers by blocks in row-major order."""
        return self._counted(
            wanted, [cost.overlaps(*pair).astype(float) for pair in zip(self.chunks, wanted)]
        )

    def take(self, wanted: Chunks, needed: npt.NDArray[np.bool_]) -> tuple[Traffic, Traffic]:
        """Fetch what workers lack of the blocks they need: what the first copy of each costs, and what further ones.

        ``needed`` says for workers by wanted blocks, row-major, who needs what.
        """
        overlap = [cost.overlaps(*pair).astype(float) for pair in zip(self.chunks, wanted)]
        meets = [(table > 0).astype(float) for table in overlap]
        lacking = self._all(overlap) - self._counted(wanted, overlap)
        pieces = self._all(meets) - self._counted(wanted, meets)
        first, further = Traffic(), Traffic()
        if needed.any():
            # the copy that takes least is the first
            least = np.where(needed, lacking, np.inf).argmin(axis=0)
            once = np.zeros_like(needed)
            once[least, np.arange(needed.shape[1])] = needed.any(axis=0)
            first = self._traffic(lacking, pieces, once)
            further = self._traffic(lacking, pieces, needed & ~once)
        self._note(wanted, needed)
        return first, further

    def copied(self) -> Stock:
        """The same, to try something on."""
        return replace(self, fetched={grid: who.copy() for grid, who in self.fetched.items()})

    def _traffic(self, lacking: Table, pieces: Table, who: npt.NDArray[np.bool_]) -> Traffic:
        return Traffic(int(lacking[who].sum()) * self.itemsize, int(pieces[who].sum()))

    def _all(self, tables: list[Table]) -> Table:
        """What each wanted block consists of, counted by the table of each axis."""
        total = np.ones((1, 1))
        for table in tables:
            total = (total[:, :, None] * table.sum(axis=0)).reshape(1, -1)
        return total

    def _counted(self, wanted: Chunks, tables: list[Table]) -> Table:
        """What each worker has of each wanted block, counted by the table of each axis."""
        mine = np.zeros((self.workers, *self.owners.shape))
        np.put_along_axis(mine, self.owners[None], 1.0, axis=0)
        found = _contracted(mine, tables)
        if self.chunks in self.fetched:
            copies = np.where(mine > 0, 0.0, self.fetched[self.chunks].reshape(mine.shape))
            found += _contracted(copies, [t * w for t, w in zip(tables, self._whole(wanted))])
        if wanted in self.fetched and wanted != self.chunks:
            found = np.where(self.fetched[wanted], self._all(tables), found)
        return found

    def _whole(self, wanted: Chunks) -> list[Table]:
        """For each axis whether a block lies inside a wanted one, blocks by wanted blocks."""
        return [
            np.array(cost.overlaps(have, want) == np.array(have)[:, None], dtype=float)
            for have, want in zip(self.chunks, wanted)
        ]

    def _note(self, wanted: Chunks, needed: npt.NDArray[np.bool_]) -> None:
        """Remember who has what now."""
        grid = (self.workers, *map(len, wanted))
        blocks = needed.reshape(grid).astype(float)
        whole = _contracted(blocks, [table.T for table in self._whole(wanted)]) > 0
        for key, now in ((self.chunks, whole), (wanted, needed)):
            before = self.fetched.get(key)
            self.fetched[key] = now if before is None else before | now


def _contracted(table: Table, axes: list[Table]) -> Table:
    """A table over workers and blocks turned into one over other blocks, flat: each axis by its own matrix."""
    for matrix in axes:
        # the first axis of blocks goes, the other one comes last: after all axes they are in order again
        table = np.tensordot(table, matrix, axes=(1, 0))
    return table.reshape(len(table), -1)
