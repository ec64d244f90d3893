"""Kernels of the extended summation: any join, any aggregate, without the joined cube.

A `Fold` joins and combines one tile in blocks small enough for the processor's cache, so that the values of the join
over all labels are never there at once::

                     joined values of one block
    operands          ┌───────────┐
    ──── slices ────▶ │ contracted│ ── combine ──▶ part of the result
                      │  × output │
                      └───────────┘

Where all pairs of rows meet, BLAS or SciPy may do it instead, see `grams`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from dask_eindecomp import grams
from dask_eindecomp.axes import (
    Array,
    Extents,
    Labels,
    Operands,
    diagonal,
    ordered,
    shape_of,
    spread,
    squeezed,
)
from dask_eindecomp.combining import Combine, Finish, Merge
from dask_eindecomp.fused import fused

__all__ = ["Fold", "FoldBlocks", "FoldTree", "passed"]

BLOCK_NBYTES = 1 << 20
"""Bytes of joined values that a processor's cache holds beside what they come from."""
ROW = 2048
"""Elements of the last axis of the output in a block, at most: a result that stays in the innermost cache."""
DEEP = 64
"""Contracted elements joined before they are combined, at least where there are as many."""
WIDE = 32
"""Elements of the output's last axis from which on NumPy is faster along it than along the contracted axes."""
REUSE = 4
"""Joined values for each element of an operand from which on it is worth bringing its axes into order."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Join and combine one tile.

    >>> nearest = Fold(np.add, Combine(np.minimum, None), "int64", "int64")
    >>> nearest((("i", "k"), ("k", "j")), ("i", "j"), {"i": 1, "k": 2, "j": 2}, np.array([[1, 2]]), np.eye(2, dtype=int))
    array([[2, 1]])
    """

    join: Callable[..., Any] | None
    """Takes one array of each operand, broadcast against each other; None for the values of one operand."""
    combine: Combine
    """How joined values meet."""
    joined: str
    """Element type of joined values."""
    dtype: str
    """Element type in which they are combined, and of the tile."""
    pairwise: tuple[str, str] | None = None
    """Join and aggregate by name, where all pairs of rows may be left to a compiled library: see `grams.PAIRWISE`."""
    scratch: int = 64 << 20
    """Bytes that one tile may use beside operands and result."""

    def __call__(self, operands: Operands, output: Labels, extents: Extents, *blocks: Array) -> Array:
        """Fold one cell."""
        taken = [_without_single(*diagonal(block, labels), output) for block, labels in zip(blocks, operands)]
        arrays, labels = [array for array, _ in taken], [mine for _, mine in taken]
        known = dict.fromkeys(label for mine in labels for label in mine)
        outer = tuple(label for label in output if label in known)
        inner = tuple(label for label in known if label not in output)
        if not all(extents[label] for label in inner):
            return self.combine.nothing(arrays[0], shape_of(extents, output), self.dtype)
        if not inner:
            views = [_view(array, mine, outer) for array, mine in taken]
            result = self._joined(views, shape_of(extents, outer)).astype(self.dtype, copy=False)
        else:
            result = self._pairwise(arrays, labels, inner, outer)
            if result is None:
                result = self._in_blocks(arrays, labels, inner, outer, extents)
        return spread(result, outer, output, extents)

    def add(self, total: Array, value: Array) -> None:
        """Combine the value of one cell into what is there, in place."""
        self.combine.into(total, value)

    def _pairwise(
        self, arrays: list[Array], labels: list[Labels], inner: Labels, outer: Labels
    ) -> Array | None:
        """The result by a compiled library for all pairs of rows; None where there is none."""
        if self.pairwise is None or len(arrays) != 2 or any(set(inner) - {*mine} for mine in labels):
            return None
        if not all(isinstance(array, np.ndarray) for array in arrays):
            return None
        batch = tuple(label for label in outer if label in labels[0] and label in labels[1])
        apart = [tuple(label for label in outer if label in mine and label not in batch) for mine in labels]
        lengths = {label: n for array, mine in zip(arrays, labels) for label, n in zip(mine, array.shape)}
        stack, depth = shape_of(lengths, batch), prod(shape_of(lengths, inner))
        one, two = (
            ordered(array, mine, (*batch, *own, *inner)).reshape(
                (prod(stack), prod(shape_of(lengths, own)), depth)
            )
            for array, mine, own in zip(arrays, labels, apart)
        )
        found = grams.PAIRWISE[self.pairwise](one, two, self.joined, self.dtype, self.scratch)
        if found is None:
            return None
        order = (*batch, *apart[0], *apart[1])
        return ordered(found.reshape(shape_of(lengths, order)), order, outer)

    def _in_blocks(
        self, arrays: list[Array], labels: list[Labels], inner: Labels, outer: Labels, extents: Extents
    ) -> Array:
        """The result block by block."""
        wide = bool(outer) and extents[outer[-1]] >= WIDE
        order = (*inner, *outer) if wide else (*outer, *inner)
        cube = prod(shape_of(extents, order))
        views = []
        for array, mine in zip(arrays, labels):
            view = _view(array, mine, order)
            views.append(view.copy() if isinstance(view, np.ndarray) and cube > REUSE * view.size else view)
        axes = tuple(n for n, label in enumerate(order) if label in inner)
        at_once = fused(self.join, self.combine.function, self.dtype, views, axes)
        if at_once is not None:
            return at_once
        itemsize = np.dtype(self.joined).itemsize
        steps = _steps(
            inner, outer, extents, max(min(BLOCK_NBYTES, self.scratch // 4) // max(itemsize, 1), 1)
        )
        result: Array = np.empty_like(arrays[0], shape=shape_of(extents, outer), dtype=self.dtype, order="C")
        buffer = None
        if isinstance(self.join, np.ufunc) and all(isinstance(view, np.ndarray) for view in views):
            buffer = np.empty(prod(steps.values()), self.joined)
        for place in _blocks(outer, extents, steps):
            part = result[(*(place[label] for label in outer), ...)]  # an array even without axes
            for number, depth in enumerate(_blocks(inner, extents, steps)):
                where = place | depth
                taken = [
                    view[
                        tuple(slice(None) if n == 1 else where[label] for label, n in zip(order, view.shape))
                    ]
                    for view in views
                ]
                shape = tuple(where[label].stop - where[label].start for label in order)
                value = self._combined(self._joined(taken, shape, buffer), len(inner), wide)
                if number:
                    self.combine.into(part, value)
                else:
                    part[...] = value
        return result

    def _joined(self, views: Sequence[Array], shape: tuple[int, ...], buffer: Any = None) -> Array:
        """Joined values of one block."""
        if self.join is None:
            return views[0]
        if buffer is not None:
            return self.join(*views, out=buffer[: prod(shape)].reshape(shape), casting="unsafe")
        found = self.join(*views)
        if getattr(found, "shape", None) != shape:
            raise ValueError(
                f"join {self.join!r} made {getattr(found, 'shape', type(found).__name__)} of arrays of shapes "
                f"{', '.join(str(view.shape) for view in views)}; expected {shape}"
            )
        return found

    def _combined(self, values: Array, inner: int, first: bool) -> Array:
        """Joined values combined along the contracted axes, which are the first ones or the last."""
        if first:
            return self.combine.along(values.reshape((-1, *values.shape[inner:])), self.dtype)
        outer = values.ndim - inner
        flat = values.reshape((*values.shape[:outer], -1))
        return self.combine.along(np.moveaxis(flat, -1, 0), self.dtype)


def _without_single(array: Array, labels: Labels, output: Labels) -> tuple[Array, Labels]:
    """Without contracted axes of length 1, along which nothing meets."""
    single = (axis for axis, label in enumerate(labels) if label not in output and array.shape[axis] == 1)
    return squeezed(array, labels, tuple(single))


def _view(array: Array, labels: Labels, order: Labels) -> Array:
    """An array with one axis for each label of an order, of length 1 where it lacks the label."""
    present = tuple(label for label in order if label in labels)
    return ordered(array, labels, present)[tuple(slice(None) if label in labels else None for label in order)]


def _steps(inner: Labels, outer: Labels, extents: Extents, elements: int) -> dict[str, int]:
    """How much of each label a block of so many elements takes.

    >>> _steps(("k",), ("i", "j"), {"i": 500, "j": 3000, "k": 64}, 1 << 18)
    {'k': 64, 'i': 1, 'j': 3000}
    """
    sizes = dict.fromkeys((*inner, *outer), 1)

    def grow(label: str, most: int) -> None:
        room = elements * sizes[label] // prod(sizes.values())
        sizes[label] = max(sizes[label], min(extents[label], room, most))

    for label in outer[-1:]:
        grow(label, ROW)
    for label in reversed(inner):
        grow(label, max(DEEP // prod(sizes[one] for one in inner), 1))
    for label in (*reversed(outer), *reversed(inner)):
        grow(label, elements)
    return sizes


def _blocks(labels: Labels, extents: Extents, steps: dict[str, int]) -> Iterator[dict[str, slice]]:
    """Every block along some labels."""
    ranges = [range(0, extents[label], steps[label]) for label in labels]
    for starts in product(*ranges):
        yield {
            label: slice(start, min(start + steps[label], extents[label]))
            for label, start in zip(labels, starts)
        }


# without a plan


@dataclass(frozen=True, slots=True)
class FoldBlocks:
    """Blocks joined and combined, as Dask calls it where nothing is planned: contracted axes keep length 1.

    >>> plus = Fold(np.add, Combine(np.maximum, None), "int64", "int64")
    >>> FoldBlocks((("i", "k"), ("k",)), ("i",), ("k",), plus)(np.eye(2, dtype=int), np.array([3, 1]))
    array([[4],
           [3]])
    """

    operands: Operands
    """Labels of each operand's axes."""
    output: Labels
    """Labels of the result's axes."""
    contracted: Labels
    """Labels the output lacks, whose axes come last."""
    step: Any
    """The kernel: a `Fold`, or the contraction of sums of products."""
    join: str = "multiply"
    """What a plan calls the join."""
    aggregate: Any = "sum"
    """Name of the aggregate, or the user's own."""
    finish: Finish | None = None
    """What becomes of values when all are combined; called here only if nothing is contracted."""

    def __call__(self, *blocks: Array) -> Array:
        """One block of the result, or what is to be combined with others into it."""
        extents = {
            label: n for block, mine in zip(blocks, self.operands) for label, n in zip(mine, block.shape)
        }
        found = self.step(self.operands, self.output, extents, *blocks)
        if self.contracted:
            return found.reshape((*shape_of(extents, self.output), *(1,) * len(self.contracted)))
        return found if self.finish is None else self.finish(found)


def passed(partials: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    """What blocks gave as it is: the first step of Dask's reductions has nothing to do."""
    return partials


@dataclass(frozen=True, slots=True)
class FoldTree:
    """Partial results combined, as Dask's reductions call it.

    >>> FoldTree(Combine(np.add, 0))([np.ones((2, 1)), np.ones((2, 1))], axis=(1,), keepdims=False)
    array([2., 2.])
    """

    combine: Combine
    """How they meet."""
    finish: Finish | None = None
    """Applied to the last result."""

    def __call__(self, partials: Any, axis: tuple[int, ...], keepdims: bool) -> Array:
        """Nested lists of partial results, one level an axis, combined."""
        flat = [partials]
        while isinstance(flat[0], list):
            flat = [one for several in flat for one in several]
        total = Merge(self.combine)(flat)
        total = total if keepdims else total.squeeze(axis=axis)
        return total if self.finish is None else self.finish(total)
