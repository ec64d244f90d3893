"""What runs on a worker.

A ``Join`` computes one tile of one expression from the blocks it touches.  The blocks of an operand form a grid of
*pieces*; the tile falls into *cells* along the common refinement of all pieces' boundaries.  Each cell reads slices
of pieces (views), computes, and writes into or adds to its part of one result, so no operand is ever put together
first.  Array functions are called through NumPy's protocols, which send them to the library the blocks come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod
from typing import Any

import numpy as np

__all__ = ["Contraction", "Creation", "Cut", "Elementwise", "Join", "Rearrange", "Reduction", "Slot", "Sum", "TreeReduce"]

Array = Any
Labels = tuple[str, ...]

SMALL_CELL = 1 << 17
"""Multiply-adds of a cell below which it is faster to put the operands together first."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of an operand among the arguments of a function."""

    operand: int
    """Number of the operand."""


@dataclass(frozen=True, slots=True)
class Contraction:
    """Sum of products over the labels the output lacks, through BLAS, in one element type.

    The result is that of ``np.einsum`` on the operands cast to ``dtype``.  Half precision is added up in single
    precision and cast once at the end.

    >>> matmul = Contraction("int64")
    >>> matmul((("i", "j"), ("j", "k")), ("i", "k"), {}, np.ones((2, 3), "i1"), np.ones((3, 2), "i1"))
    array([[3, 3],
           [3, 3]])
    """

    dtype: str
    """Element type of the result; all arithmetic is done in it."""
    cast: str | None = None
    """Element type the operands are cast to first."""
    partial: bool = False
    """Whether more is to be added, so that half precision stays single."""

    @property
    def working(self) -> str:
        """Element type that values are added up in."""
        return "float32" if self.dtype == "float16" else self.dtype

    @property
    def result(self) -> str:
        """Element type that leaves the tile."""
        return self.working if self.partial else self.dtype

    def __call__(
        self, operands: tuple[Labels, ...], output: Labels, extents: Mapping[str, int], *blocks: Array
    ) -> Array:
        """Contract one cell."""
        labels = []
        arrays = []
        elsewhere = [set(output).union(*(set(o) for m, o in enumerate(operands) if m != n)) for n in range(len(operands))]
        for number, (mine, block) in enumerate(zip(operands, blocks)):
            array = block if self.cast is None else block.astype(self.cast, copy=False)
            array, mine = _diagonal(array.astype(self.working, copy=False), mine)
            alone = tuple(axis for axis, label in enumerate(mine) if label not in elsewhere[number])
            if alone:  # contracted in this operand only
                array = _add_up(array, alone, self.working)
                mine = tuple(label for label in mine if label in elsewhere[number])
            labels.append(mine)
            arrays.append(array)
        if len(arrays) == 1:
            return _ordered(arrays[0], labels[0], output)
        return _product(labels[0], labels[1], output, arrays[0], arrays[1])


def _add_up(array: Array, axes: tuple[int, ...], dtype: str) -> Array:
    return array.any(axis=axes) if dtype == "bool" else array.sum(axis=axes, dtype=dtype)


def _diagonal(array: Array, labels: Labels) -> tuple[Array, Labels]:
    """One axis for each label: the diagonal where a label stands twice."""
    while len(set(labels)) != len(labels):
        label = next(one for one in labels if labels.count(one) > 1)
        first, second = [axis for axis, one in enumerate(labels) if one == label][:2]
        array = array.diagonal(axis1=first, axis2=second)
        rest = tuple(one for axis, one in enumerate(labels) if axis not in (first, second))
        labels = (*rest, label)
    return array, labels


def _ordered(array: Array, labels: Labels, output: Labels) -> Array:
    """Axes in the order of the output, which has the same labels."""
    order = tuple(labels.index(label) for label in output)
    return array if order == tuple(range(len(order))) else array.transpose(order)


def _product(one: Labels, two: Labels, output: Labels, x: Array, y: Array) -> Array:
    """Contract two arrays whose labels are distinct and all either shared or in the output."""
    contracted = tuple(label for label in one if label in two and label not in output)
    batch = tuple(label for label in output if label in one and label in two)
    left = tuple(label for label in output if label in one and label not in two)
    right = tuple(label for label in output if label in two and label not in one)
    lengths = dict(zip((*one, *two), (*x.shape, *y.shape)))
    if not contracted:
        order = (*batch, *left, *right)
        x = _ordered(x, one, (*batch, *left)).reshape((*x_shape(lengths, (*batch, *left)), *(1 for _ in right)))
        y = _ordered(y, two, (*batch, *right)).reshape(
            (*x_shape(lengths, batch), *(1 for _ in left), *x_shape(lengths, right))
        )
        return _ordered(np.multiply(x, y), order, output)
    if batch and not left and not right and all(lengths[label] for label in contracted):
        letters = {label: chr(97 + n) for n, label in enumerate((*batch, *contracted))}
        terms = ["".join(letters[label] for label in labels) for labels in (one, two, output)]
        if x.dtype.kind != "b":
            return np.einsum(f"{terms[0]},{terms[1]}->{terms[2]}", x, y)
    rows, inner, columns, batches = (
        prod(lengths[label] for label in labels) for labels in (left, contracted, right, batch)
    )
    x = _for_blas(_ordered(x, one, (*batch, *left, *contracted)), x_shape(lengths, batch), (rows, inner))
    y = _for_blas(_ordered(y, two, (*batch, *contracted, *right)), x_shape(lengths, batch), (inner, columns))
    result = np.matmul(x, y).reshape(x_shape(lengths, (*batch, *left, *right)))
    return _ordered(result, (*batch, *left, *right), output)


def x_shape(lengths: Mapping[str, int], labels: Labels) -> tuple[int, ...]:
    """Lengths of these labels."""
    return tuple(lengths[label] for label in labels)


def _for_blas(array: Array, batch: tuple[int, ...], matrix: tuple[int, int]) -> Array:
    """A stack of matrices with strides that BLAS takes; NumPy's matmul is a slow loop on any others."""
    array = array.reshape((*batch, *matrix))
    if type(array) is np.ndarray and array.size and array.dtype.kind in "fc":
        row, column = array.strides[-2:]
        size = array.itemsize
        tall, wide = matrix
        rows_fit = column == size and row % size == 0 and row >= wide * size
        columns_fit = row == size and column % size == 0 and column >= tall * size
        if not (rows_fit or columns_fit):
            return array.copy()
    return array


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Any scalar function of one value of each operand.

    >>> double = Elementwise(np.multiply, (Slot(0), 2))
    >>> double((("i",),), ("i",), {"i": 2}, np.arange(2))
    array([0, 2])
    """

    function: Callable[..., Any]
    """Called with whole arrays."""
    arguments: tuple[Any, ...]
    """Its positional arguments, with slots for the operands."""
    keywords: tuple[tuple[str, Any], ...] = ()
    """Its keyword arguments."""

    def __call__(
        self, operands: tuple[Labels, ...], output: Labels, extents: Mapping[str, int], *blocks: Array
    ) -> Array:
        """Compute one cell."""
        aligned = [_aligned(block, labels, output) for labels, block in zip(operands, blocks)]
        arguments = [aligned[a.operand] if isinstance(a, Slot) else a for a in self.arguments]
        result = self.function(*arguments, **dict(self.keywords))
        shape = x_shape(extents, output)
        return result if np.shape(result) == shape else np.broadcast_to(result, shape)


def _aligned(array: Array, labels: Labels, output: Labels) -> Array:
    """An array that broadcasts against the output: its labels in order, axes of length 1 for those it lacks.

    Leading axes are left to NumPy, so that what has no axes keeps none.
    """
    array, labels = _diagonal(array, labels)
    gone = tuple(axis for axis, label in enumerate(labels) if label not in output)
    if gone:
        array = array.squeeze(axis=gone)
        labels = tuple(label for label in labels if label in output)
    present = tuple(label for label in output if label in labels)
    array = _ordered(array, labels, present)
    if not present:
        return array
    tail = output[output.index(present[0]) :]
    if len(tail) == len(present):
        return array
    lengths = dict(zip(present, array.shape))
    return array.reshape(tuple(lengths.get(label, 1) for label in tail))


@dataclass(frozen=True, slots=True)
class Rearrange:
    """The same values with axes moved, dropped, inserted or repeated."""

    def __call__(
        self, operands: tuple[Labels, ...], output: Labels, extents: Mapping[str, int], *blocks: Array
    ) -> Array:
        """Rearrange one cell."""
        array = _aligned(blocks[0], operands[0], output)
        shape = x_shape(extents, output)
        return array if array.shape == shape else np.broadcast_to(array, shape)


@dataclass(frozen=True, slots=True)
class Creation:
    """Values made from a shape."""

    function: Callable[..., Any]
    """Called with the shape of a tile."""
    keywords: tuple[tuple[str, Any], ...] = ()
    """Its keyword arguments."""

    def __call__(
        self, operands: tuple[Labels, ...], output: Labels, extents: Mapping[str, int], *blocks: Array
    ) -> Array:
        """Make one cell."""
        return self.function(x_shape(extents, output), **dict(self.keywords))


@dataclass(frozen=True, slots=True)
class Reduction:
    """The first step of a reduction by functions that follow Dask's protocol."""

    chunk: Callable[..., Any]
    """Reduces one block; called with ``axis`` and ``keepdims``."""
    labels: Labels
    """What is reduced."""
    combine: Callable[..., Any] | None = None
    """Combines nested lists of what ``chunk`` gives; None to put pieces together first."""

    def tile(self, labels: Labels, blocks: list[Array], grid: tuple[int, ...]) -> Any:
        """Reduce one tile given as a grid of pieces."""
        axes = tuple(labels.index(label) for label in self.labels)
        kept = [axis for axis in range(len(labels)) if self.combine is None or axis not in axes]
        pieces = np.empty(grid, dtype=object)
        for index, block in zip(product(*map(range, grid)), blocks):
            pieces[index] = block
        merged, grid = _concatenate(pieces, kept)
        partials = [self.chunk(block, axis=axes, keepdims=True) for block in merged]
        if len(partials) == 1:
            return partials[0]
        assert self.combine is not None
        return self.combine(_nested(partials, tuple(grid[axis] for axis in axes)))


def _concatenate(pieces: Any, axes: list[int]) -> tuple[list[Array], tuple[int, ...]]:
    """Put pieces together along some axes: what is left in row-major order, and its grid."""
    for axis in axes:
        if pieces.shape[axis] == 1:
            continue
        grid = (*pieces.shape[:axis], 1, *pieces.shape[axis + 1 :])
        merged = np.empty(grid, dtype=object)
        for index in product(*map(range, grid)):
            line = [pieces[(*index[:axis], n, *index[axis + 1 :])] for n in range(pieces.shape[axis])]
            merged[index] = np.concatenate(line, axis=axis)
        pieces = merged
    return list(pieces.flat), pieces.shape


def _nested(flat: list[Any], shape: tuple[int, ...]) -> Any:
    """Nested lists of this shape from a row-major list."""
    if not shape:
        return flat[0]
    size = len(flat) // shape[0]
    return [_nested(flat[start : start + size], shape[1:]) for start in range(0, len(flat), size)]


Step = Contraction | Elementwise | Rearrange | Creation | Reduction


@dataclass(frozen=True, slots=True)
class Join:
    """One tile of one expression, computed from the blocks it touches.

    >>> tile = Join("ij,jk->ik", (("i", "j"), ("j", "k")), ("i", "k"), (("i", 1), ("j", 3), ("k", 1)),
    ...             (((1,), (1, 2)), ((3,), (1,))), Contraction("float64"))
    >>> tile([np.ones((1, 1)), np.ones((1, 2))], np.ones((3, 1)))
    array([[3.]])
    """

    expression: str
    """What is computed, for messages."""
    operands: tuple[Labels, ...]
    """Labels of each operand's axes."""
    output: Labels
    """Labels of the result's axes."""
    extents: tuple[tuple[str, int], ...]
    """Length of every label inside this tile."""
    pieces: tuple[tuple[tuple[int, ...], ...], ...]
    """For each operand and axis the lengths of the pieces along it."""
    step: Step
    """How one cell is computed."""
    finish: Callable[..., Any] | None = None
    """Applied to the result; for a reduction, Dask's aggregate function."""

    def __call__(self, *blocks: Any) -> Any:
        """Compute the tile; an operand of several pieces comes as a list, row-major."""
        grids = [tuple(map(len, axes)) for axes in self.pieces]
        lists = [
            list(block) if prod(grid) != 1 else block if isinstance(block, list) else [block]
            for block, grid in zip(blocks, grids)
        ]
        self._check(lists)
        if isinstance(self.step, Reduction):
            partial = self.step.tile(self.operands[0], lists[0], grids[0])
            return partial if self.finish is None else self.finish(_nested([partial], (1,) * len(self.step.labels)))
        result = self._cells(lists, grids)
        return result if self.finish is None else self.finish(result)

    def _check(self, lists: list[list[Array]]) -> None:
        """Refuse blocks that are not what the graph said of them."""
        for number, (blocks, axes) in enumerate(zip(lists, self.pieces)):
            shapes = list(product(*axes))
            if len(blocks) != len(shapes):
                raise ValueError(
                    f"operand {number} of {self.expression!r} came in {len(blocks)} blocks; expected {len(shapes)}"
                )
            for block, shape in zip(blocks, shapes):
                found = getattr(block, "shape", None)
                if found != shape:
                    raise ValueError(
                        f"operand {number} of {self.expression!r} has a block of shape {found} "
                        f"({type(block).__name__}); expected {shape}"
                    )

    def _cells(self, lists: list[list[Array]], grids: list[tuple[int, ...]]) -> Array:
        """Compute every cell into one result."""
        assert not isinstance(self.step, Reduction)
        extents = dict(self.extents)
        step = self.step
        dtype = step.result if isinstance(step, Contraction) else None
        edges = self._edges(extents)
        count = prod(map(len, edges.values()))
        if count == 1:
            result = step(self.operands, self.output, extents, *(blocks[0] for blocks in lists))
            return result if dtype is None else result.astype(dtype, copy=False)
        if isinstance(step, Contraction) and prod(extents.values()) < SMALL_CELL * count:
            whole = []
            for blocks, grid in zip(lists, grids):
                pieces = np.empty(grid, dtype=object)
                for index, block in zip(product(*map(range, grid)), blocks):
                    pieces[index] = block
                whole.append(_concatenate(pieces, list(range(len(grid))))[0])
            single = tuple(tuple((sum(axis),) for axis in axes) for axes in self.pieces)
            return replace(self, pieces=single, finish=None)(*(blocks[0] for blocks in whole))
        shape = x_shape(extents, self.output)
        result = None
        written: set[tuple[int, ...]] = set()
        working = step.working if isinstance(step, Contraction) else None
        for bounds in self._walk(edges):
            cell = self._cell(step, lists, grids, bounds)
            if result is None:
                result = np.empty_like(cell, shape=shape, dtype=working or cell.dtype, order="C", subok=True)
            place = tuple(slice(*bounds[label]) for label in self.output)
            start = tuple(bounds[label][0] for label in self.output)
            if start not in written:
                written.add(start)
                result[place] = cell
            elif result.dtype.kind == "b":
                result[place] |= cell
            else:
                result[place] += cell
        assert result is not None
        return result if dtype is None else result.astype(dtype, copy=False)

    def _edges(self, extents: Mapping[str, int]) -> dict[str, list[tuple[int, int]]]:
        """For every label the stretches between boundaries of any operand's pieces."""
        marks: dict[str, set[int]] = {label: {0, extent} for label, extent in self.extents}
        for labels, axes in zip(self.operands, self.pieces):
            for label, lengths in zip(labels, axes):
                marks[label].update(accumulate(lengths))
        cells = {}
        for label, found in marks.items():
            line = sorted(found)
            cells[label] = list(zip(line, line[1:])) or [(0, 0)]
        return cells

    def _walk(self, edges: Mapping[str, list[tuple[int, int]]]) -> Iterator[dict[str, tuple[int, int]]]:
        """Every cell: where it begins and ends along each label, one part of the result after the other."""
        labels = (*self.output, *(label for label in edges if label not in self.output))
        for bounds in product(*(edges[label] for label in labels)):
            yield dict(zip(labels, bounds))

    def _cell(
        self,
        step: Contraction | Elementwise | Rearrange | Creation,
        lists: list[list[Array]],
        grids: list[tuple[int, ...]],
        bounds: Mapping[str, tuple[int, int]],
    ) -> Array:
        slices = []
        for labels, axes, blocks, grid in zip(self.operands, self.pieces, lists, grids):
            position = 0
            inside = []
            for label, lengths, count in zip(labels, axes, grid):
                low, high = bounds[label]
                number, start = _holder(lengths, low, high)
                position = position * count + number
                inside.append(slice(low - start, high - start))
            slices.append(blocks[position][tuple(inside)])
        return step(self.operands, self.output, {label: high - low for label, (low, high) in bounds.items()}, *slices)


def _holder(lengths: tuple[int, ...], low: int, high: int) -> tuple[int, int]:
    """Number and start of the piece that holds a stretch."""
    start = 0
    for number, length in enumerate(lengths):
        if start <= low and high <= start + length and (length or low == high):
            return number, start
        start += length
    raise AssertionError(f"no piece of {lengths} holds {low} to {high}")


@dataclass(frozen=True, slots=True)
class Sum:
    """Adds partial results of one tile; none of them is changed.

    >>> Sum("float64")([np.ones(2), np.ones(2)])
    array([2., 2.])
    """

    dtype: str
    """Element type of the result."""

    def __call__(self, partials: list[Array]) -> Array:
        """Add them up."""
        first, *rest = partials
        if not rest:
            return first.astype(self.dtype, copy=False)
        logical = self.dtype == "bool"
        total = np.logical_or(first, rest[0]) if logical else np.add(first, rest[0])
        for partial in rest[1:]:
            if logical:
                total |= partial
            else:
                total += partial
        return total.astype(self.dtype, copy=False)


@dataclass(frozen=True, slots=True)
class TreeReduce:
    """Hands partial results to a function of Dask's reduction protocol."""

    function: Callable[..., Any]
    """Takes nested lists, one level a reduced axis."""
    shape: tuple[int, ...]
    """Number of partial results along each reduced axis."""

    def __call__(self, partials: list[Any]) -> Any:
        """Combine them."""
        return self.function(_nested(list(partials), self.shape))


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a block.

    >>> Cut(((1, 3),))(np.arange(4))
    array([1, 2])
    """

    bounds: tuple[tuple[int, int], ...]
    """First and last element along each axis."""

    def __call__(self, block: Array) -> Array:
        """The part; a copy if it is small, so that the block is not kept for its sake."""
        part = block[tuple(slice(*bound) for bound in self.bounds)]
        return part.copy() if 2 * part.size < block.size else part
