"""Which partitions of an expression are worth pricing.

Every way to share the labels out among so many tiles as there are workers, and among twice and four times as many;
fewer where the work may be too small to share; the layout the graph came in.  What does not fit a worker's memory or a
block's size is left out, and more tiles are tried until something fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_eindecomp import memory
from dask_eindecomp.elimination import Late
from dask_eindecomp.expression import Labels
from dask_eindecomp.graph import EinGraph, Node
from dask_eindecomp.partition import Chunks, Cut, Partition, cut, smooth, viable_rows
from dask_eindecomp.topology import Topology

__all__ = [
    "MANY",
    "Budget",
    "BudgetError",
    "Space",
    "space_of",
    "tile_counts",
    "usual_cuts",
    "worth_trying",
]

MANY = 150
"""Candidates of one expression beyond which numbers of tiles that do not suit it are left out."""


MOST_COUNTS = 10_000
"""Numbers of parts, in all ways to share out one number of tiles, beyond which fewer labels are cut: tensors of many
short axes have millions."""

MOST_TILES = 1 << 20
"""Tiles of one expression beyond which nothing that fits a budget is looked for."""


class BudgetError(ValueError):
    """No partition keeps within what the user allows; says what would."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a plan must keep within."""

    memory: int | None = None
    """Bytes on one worker; None for any."""
    block: int | None = None
    """Bytes of one block of a planned array; None for any."""


@dataclass(frozen=True, eq=False)
class Space:
    """The candidate partitions of one expression as indices into the cuts of each label.

    >>> space = Space.of_parts({"i": 4, "j": 2}, viable_rows((4, 2), 4), {})
    >>> len(space), space.partition(0).parts
    (2, {'i': 2, 'j': 2})
    """

    labels: Labels
    cuts: tuple[tuple[Cut, ...], ...]
    """For each label the distinct cuts that occur."""
    index: npt.NDArray[np.int64]
    """Candidates by labels: which cut."""
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of_parts(
        cls,
        extents: Mapping[str, int],
        rows: npt.NDArray[np.int64],
        usual: Mapping[tuple[int, int], Cut],
        came: tuple[Cut, ...] = (),
        pinned: Mapping[str, Cut] | None = None,
    ) -> Space:
        """Candidates from numbers of parts, a row each, and one more with cuts of its own.

        Labels that are ``pinned`` have that cut, whatever a row says.
        """
        columns: list[npt.NDArray[np.int64]] = []
        cuts: list[tuple[Cut, ...]] = []
        for axis, (label, extent) in enumerate(extents.items()):
            if pinned and label in pinned:
                columns.append(np.zeros(len(rows) + bool(came), dtype=np.int64))
                cuts.append((pinned[label],))
                continue
            counts, place = np.unique(rows[:, axis], return_inverse=True)
            found = [usual.get((extent, n)) or cut(extent, n) for n in counts.tolist()]
            if came:
                if came[axis] not in found:
                    found.append(came[axis])
                place = np.append(place.reshape(-1), found.index(came[axis]))
            columns.append(place.reshape(-1))
            cuts.append(tuple(found))
        size = len(rows) + bool(came)
        index = np.column_stack(columns) if columns else np.zeros((size, 0), dtype=np.int64)
        if came and (index[:-1] == index[-1]).all(axis=1).any():
            index = index[:-1]
        return cls(tuple(extents), tuple(cuts), index)

    def __len__(self) -> int:
        return len(self.index)

    def picked(self, candidates: npt.NDArray[np.int64]) -> Space:
        """Only these candidates."""
        return Space(self.labels, self.cuts, self.index[candidates])

    def partition(self, candidate: int) -> Partition:
        """One candidate; the same object each time."""
        if candidate not in self._known:
            chosen = self.index[candidate]
            self._known[candidate] = Partition(
                tuple((label, self.cuts[n][chosen[n]]) for n, label in enumerate(self.labels))
            )
        return self._known[candidate]  # type: ignore[no-any-return]

    @property
    def parts(self) -> dict[str, npt.NDArray[np.float64]]:
        """How many parts each label has in every candidate."""
        if "parts" not in self._known:
            self._known["parts"] = {
                label: np.array([len(one) for one in cuts], dtype=np.float64)[self.index[:, axis]]
                for axis, (label, cuts) in enumerate(zip(self.labels, self.cuts))
            }
        return self._known["parts"]  # type: ignore[no-any-return]

    def project(self, labels: Labels) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Distinct grids of a tensor with these labels as rows of cut indices, and which one each candidate has."""
        if labels not in self._known:
            columns = [self.labels.index(label) for label in labels]
            key = np.zeros(len(self), dtype=np.int64)
            for column in columns:
                key = key * len(self.cuts[column]) + self.index[:, column]
            _, first, which = np.unique(key, return_index=True, return_inverse=True)
            self._known[labels] = (self.index[first][:, columns], which.reshape(-1))
        return self._known[labels]  # type: ignore[no-any-return]

    def grids(self, labels: Labels) -> list[Chunks]:
        """The distinct grids as chunks."""
        columns = [self.labels.index(label) for label in labels]
        rows, _ = self.project(labels)
        return [tuple(self.cuts[c][i] for c, i in zip(columns, row)) for row in rows.tolist()]


def tile_counts(slots: int) -> list[int]:
    """Numbers of tiles to try on machines that run ``slots`` tasks at a time.

    >>> tile_counts(4), tile_counts(7)
    ([1, 2, 4, 8, 16], [1, 3, 6, 7, 12, 14, 27, 28])
    """
    fewer = {slots >> shift for shift in range(slots.bit_length())}
    more = {slots, 2 * slots, 4 * slots}
    return sorted(fewer | more | {smooth(count) for count in more})


def space_of(
    graph: EinGraph,
    node: Node,
    counts: list[int],
    topology: Topology,
    budget: Budget,
    usual: Mapping[tuple[int, int], Cut],
    divide: bool,
    with_came: bool,
    late: Callable[[], bool] = bool,
) -> Space:
    """Candidate partitions of one expression.

    Parameters
    ----------
    counts
        Numbers of tiles to try.
    usual
        The cut that arrays already have, by extent and number of parts.
    divide
        Whether parts must divide their extent.
    with_came
        Whether the layout the graph came in is one of them.
    late
        Whether there is no time to try more tiles than these.

    Raises
    ------
    BudgetError
        If no number of tiles fits the budget.
    Late
        If there was no time to find one that does.
    """
    extents = dict(node.extents)
    pinned = dict(node.pinned)
    fixed = prod(map(len, pinned.values()))  # tiles there are at any rate
    counts = sorted({max(count // fixed, 1) for count in counts})
    rows = np.concatenate([viable_rows(_cuttable(node, count), count, divide) for count in counts])
    rows = np.unique(rows, axis=0) if len(counts) > 1 else rows
    came = tuple(chunks for _, chunks in node.came) if with_came else ()
    space = Space.of_parts(extents, rows, usual, came, pinned)
    count, most = max(counts), min(prod(max(extent, 1) for extent in extents.values()), MOST_TILES)
    tried = []
    while True:
        tried.append(space)
        fits = _fits(graph, node, space, topology, budget)
        if fits.all():
            return space
        if fits.any():
            return space.picked(np.flatnonzero(fits))
        if count >= most:
            raise BudgetError(_misfit(graph, node, tried, topology, budget))
        if late():
            raise Late
        count *= 2
        rows = viable_rows(_cuttable(node, count), count, divide)
        space = Space.of_parts(extents, rows, usual, pinned=pinned)


def _cuttable(node: Node, tiles: int) -> tuple[int, ...]:
    """How often each label may be cut: its length, or once for labels that are pinned, or of which there are too many.

    Those stay that the graph came cut along, and then the longest.

    >>> inputs = {"X": (2,) * 20}
    >>> g = EinGraph.from_spec(inputs, {"Z": ("abcdefghijklmnopqrst->a", "X")}, ["Z"])
    >>> sum(_cuttable(g.nodes["Z"], 64)) - 20
    11
    """
    extents, came = dict(node.extents), dict(node.came)
    most = tiles.bit_length()
    ways = [1] + [0] * most  # how many ways there are to share out so many halvings
    kept, labels = dict.fromkeys(extents, 1), 0
    free = [label for label in extents if label not in dict(node.pinned)]
    for label in sorted(free, key=lambda one: (-len(came.get(one, ())), -extents[one])):
        halvings = range(extents[label].bit_length())
        ways = [sum(ways[n - taken] for taken in halvings if taken <= n) for n in range(most + 1)]
        labels += extents[label] > 1
        if max(ways) * labels > MOST_COUNTS:
            break
        kept[label] = extents[label]
    return tuple(kept.values())


def _fits(
    graph: EinGraph, node: Node, space: Space, topology: Topology, budget: Budget
) -> npt.NDArray[np.bool_]:
    fits = np.ones(len(space), dtype=bool)
    if budget.memory is not None:
        fits &= memory.held(graph, node, space.parts, topology).least <= budget.memory
    if budget.block is not None:
        fits &= _block(node, space) <= budget.block
    return fits


def _block(node: Node, space: Space) -> Any:
    """Bytes of the largest block of a result, for every candidate."""
    labels = node.expression.output
    lengths = [
        np.array([max(one, default=0) for one in cuts], dtype=np.float64)[space.index[:, axis]]
        for axis, (label, cuts) in enumerate(zip(space.labels, space.cuts))
        if label in labels
    ]
    return prod(lengths, start=np.full(len(space), float(np.dtype(node.dtype).itemsize)))


def _misfit(graph: EinGraph, node: Node, tried: list[Space], topology: Topology, budget: Budget) -> str:
    """Which expression does not fit, how much it needs at least, and what would make it fit."""
    title = f"{node.title or node.name} ({node.expression.einsum})"
    least = min(int(_block(node, space).min()) for space in tried)
    if budget.block is not None and least > budget.block:
        return (
            f"{title} has a block of {least:,} bytes even when it is cut most finely, but max-block-bytes is "
            f"{budget.block:,}; expected {least:,} or more"
        )
    least = min(int(np.min(memory.held(graph, node, space.parts, topology).least)) for space in tried)
    return (
        f"{title} needs {least:,} bytes on each of {topology.workers} workers, but may have {budget.memory:,}; "
        f"a memory limit of {least:,} bytes or more workers would do"
    )


def worth_trying(space: Space, costs: npt.NDArray[np.float64], slots: int) -> Space:
    """Of many candidates those with as many tiles as slots, or a number with which some come near the cheapest.

    Twice what the cheapest candidate costs by itself is not near.  Work too small to be shared keeps small numbers of
    tiles that way, and large work large ones.
    """
    tiles = prod(space.parts.values(), start=np.ones(len(space)))
    keep = costs <= 2 * costs.min()
    near = np.isin(tiles, [*np.unique(tiles[keep]), slots])
    return space.picked(np.flatnonzero(near))


def usual_cuts(graph: EinGraph) -> dict[tuple[int, int], Cut]:
    """The cut that arrays of the graph already have, by extent and number of parts: lining up with it costs nothing."""
    seen: dict[tuple[int, int], Counter[Cut]] = {}
    layouts = [chunks for tensor in graph.inputs.values() if (chunks := tensor.chunks)]
    layouts += [output.chunks for output in graph.outputs if output.chunks]
    layouts += [tuple(axis for _, axis in (*node.came, *node.pinned)) for node in graph.nodes.values()]
    for chunks in layouts:
        for axis in chunks:
            seen.setdefault((sum(axis), len(axis)), Counter())[axis] += 1
    return {key: max(counts, key=lambda axis: (counts[axis], axis)) for key, counts in seen.items()}
