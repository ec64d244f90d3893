"""What runs on a worker.

A `Join` computes one tile of one expression from the blocks it touches.  The blocks of an operand form a
grid of *pieces*; the boundaries of all pieces together cut the tile into *cells*::

     operand 0        operand 1           tile
    ┌─────┬───┐      ┌───┬─────┐      ┌───┬─┬───┐
    │     │   │      │   │     │      │   │ │   │
    │     │   │  and ├───┼─────┤  =>  ├───┼─┼───┤
    │     │   │      │   │     │      │   │ │   │
    └─────┴───┘      └───┴─────┘      └───┴─┴───┘

A cell reads slices of pieces (views), computes, and writes into or adds to its part of one result, so that no
operand has to be put together first.  Functions of arrays are called through NumPy's protocols, which send
them to the library the blocks come from.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any

import numpy as np

from dask_eindecomp.axes import (
    Array,
    Extents,
    Labels,
    Operands,
    aligned,
    diagonal,
    ordered,
    shape_of,
    spread,
    squeezed,
)
from dask_eindecomp.folds import Fold

__all__ = ["Contraction", "Creation", "Cut", "Elementwise", "Join", "Rearrange", "Reduction", "Slot", "Sum", "TreeReduce", "scalar"]  # fmt: skip

Pieces = tuple[tuple[int, ...], ...]
"""For each axis of one operand the lengths of the pieces along it."""
Stretch = tuple[int, int]
"""First element and the one past the last, along one axis."""
Cell = tuple[tuple[slice, ...], bool, Array]
"""Where it goes in the result, whether it is the first there, and its value."""

SMALL_CELL = 1 << 16
"""Elements of operands in pieces, for each cell, below which merging these operands first is faster."""
READ_AGAIN = 4
"""Elements of other operands read again, for each element of an operand in pieces, that take as long as a copy of it."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of an operand among the arguments of a function.

    >>> Slot(1).operand
    1
    """

    operand: int
    """Number of the operand."""


@dataclass(frozen=True, slots=True)
class Contraction:
    """Sum of products over the labels the output lacks, through BLAS, in one element type.

    The result is that of ``np.einsum`` on one or two operands cast to `dtype`.  Half precision is added up in
    single precision and cast once at the end.

    >>> matmul = Contraction("int64")
    >>> extents = {"i": 2, "j": 3, "k": 2}
    >>> matmul((("i", "j"), ("j", "k")), ("i", "k"), extents, np.ones((2, 3), "i1"), np.ones((3, 2), "i1"))
    array([[3, 3],
           [3, 3]])
    """

    dtype: str
    """Element type of the result; all arithmetic is done in it."""
    cast: str | None = None
    """Element type the operands are cast to before that."""
    partial: bool = False
    """Whether more is to be added by `Sum`, so that half precision stays single."""
    heeds_masks: bool = True
    """Whether masked elements are left out; ``np.einsum`` takes what lies under the mask."""

    @property
    def working(self) -> str:
        """Element type that values are added up in."""
        return _working(self.dtype)

    @property
    def result(self) -> str:
        """Element type that leaves the tile."""
        return self.working if self.partial else self.dtype

    def __call__(
        self,
        operands: Operands,
        output: Labels,
        extents: Extents,
        *blocks: Array,
        multiply: Callable[[Array, Array], Array] = np.matmul,
    ) -> Array:
        """Contract one cell, in the working type."""
        assert 1 <= len(blocks) <= 2, f"{len(blocks)} operands; expected one or two"
        contracted = {label for labels in operands for label in labels} - {*output}
        if not all(extents[label] for label in contracted):
            # nothing is added up, so that not even an infinity in the other operand counts
            return np.zeros_like(blocks[0], shape=shape_of(extents, output), dtype=self.working)
        prepared = []
        for number, (block, labels) in enumerate(zip(blocks, operands)):
            others = (theirs for other, theirs in enumerate(operands) if other != number)
            prepared.append(self._prepared(block, labels, output, {*output}.union(*others)))
        if len(prepared) == 1:
            array, labels = prepared[0]
        else:
            array, labels = _product(*prepared[0], *prepared[1], output, multiply)
        return spread(array, labels, output, extents)

    def _prepared(
        self, array: Array, labels: Labels, output: Labels, elsewhere: set[str]
    ) -> tuple[Array, Labels]:
        """An operand in the working type that has each label once, and none that nothing else has."""
        array, labels = diagonal(array, labels)
        for dtype in (self.cast, self.dtype, self.working):
            array = array if dtype is None else array.astype(dtype, copy=False)
        single = (n for n, label in enumerate(labels) if label not in output and array.shape[n] == 1)
        array, labels = squeezed(array, labels, tuple(single))
        alone = tuple(n for n, label in enumerate(labels) if label not in elsewhere)
        if alone:
            # libraries differ in whether a sum of logical values can be one
            logical = self.dtype == "bool"
            array = array.any(axis=alone) if logical else array.sum(axis=alone, dtype=self.working)
        return array, tuple(label for label in labels if label in elsewhere)


def _working(dtype: str) -> str:
    """Element type in which values of another are added up."""
    return "float32" if dtype == "float16" else dtype


def _product(
    x: Array, one: Labels, y: Array, two: Labels, output: Labels, multiply: Callable[[Array, Array], Array]
) -> tuple[Array, Labels]:
    """Contract two arrays; every label is in the other or in the output.  The result and its labels."""
    longer = one if x.size >= y.size else two  # axes merged in the order they lie in are not copied
    contracted = tuple(label for label in longer if label in one and label in two and label not in output)
    batch = tuple(label for label in output if label in one and label in two)
    left = tuple(label for label in one if label not in two)
    right = tuple(label for label in two if label not in one)
    if not contracted:
        either = tuple(label for label in output if label in one or label in two)
        return np.multiply(aligned(x, one, either), aligned(y, two, either)), either
    if not left and not right:  # matmul would be a loop of dot products, over copies if they are strided
        numbers = [[*map(one.index, labels)] for labels in (one, two, batch)]
        return np.einsum(x, numbers[0], y, numbers[1], numbers[2]), batch
    lengths = dict(zip((*one, *two), (*x.shape, *y.shape)))
    stack = shape_of(lengths, batch)
    rows, inner, columns = (prod(shape_of(lengths, labels)) for labels in (left, contracted, right))
    x = _for_blas(ordered(x, one, (*batch, *left, *contracted)).reshape((*stack, rows, inner)))
    y = _for_blas(ordered(y, two, (*batch, *contracted, *right)).reshape((*stack, inner, columns)))
    labels = (*batch, *left, *right)
    return multiply(x, y).reshape(shape_of(lengths, labels)), labels


class _InTurn:
    """Products of matrices that are looked at one after the other: those of one shape lie in the same memory.

    New memory for each took a quarter of the time of products of 400 rows.
    """

    def __init__(self) -> None:
        self._last: Array = None

    def __call__(self, x: Array, y: Array) -> Array:
        """The product; what was given before may be gone then."""
        last = self._last
        fits = (
            type(x) is type(y) is np.ndarray and type(last) is np.ndarray and last.dtype == x.dtype == y.dtype
        )
        if fits and last.shape == (*x.shape[:-1], y.shape[-1]):
            return np.matmul(x, y, out=last)
        self._last = np.matmul(x, y)
        return self._last


def _for_blas(array: Array) -> Array:
    """A stack of matrices with strides that BLAS takes; NumPy's matmul is a slow loop on any others."""
    if type(array) is not np.ndarray or array.dtype.kind not in "fc":
        return array
    (tall, wide), (down, across), size = array.shape[-2:], array.strides[-2:], array.itemsize
    by_rows = across == size and down % size == 0 and down >= wide * size
    by_columns = down == size and across % size == 0 and across >= tall * size
    return array if by_rows or by_columns else array.copy()


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Any scalar function of one value of each operand.

    >>> double = Elementwise(np.multiply, (Slot(0), 2))
    >>> double((("i",),), ("i",), {"i": 2}, np.arange(2))
    array([0, 2])
    """

    function: Callable[..., Any]
    """Called with whole arrays that broadcast against each other."""
    arguments: tuple[Any, ...]
    """Its positional arguments, with slots for the operands."""
    keywords: tuple[tuple[str, Any], ...] = ()
    """Its keyword arguments."""

    def __call__(self, operands: Operands, output: Labels, extents: Extents, *blocks: Array) -> Array:
        """Compute one cell."""
        views = [aligned(block, labels, output) for block, labels in zip(blocks, operands)]
        arguments = [views[one.operand] if isinstance(one, Slot) else one for one in self.arguments]
        result = self.function(*arguments, **dict(self.keywords))
        shape = shape_of(extents, output)
        return result if getattr(result, "shape", ()) == shape else np.broadcast_to(result, shape)


@dataclass(frozen=True, slots=True)
class Rearrange:
    """The same values with axes moved, dropped, inserted or repeated.

    >>> Rearrange()((("i", "j"),), ("j", "i"), {"i": 1, "j": 2}, np.array([[4, 5]]))
    array([[4],
           [5]])
    """

    def __call__(self, operands: Operands, output: Labels, extents: Extents, *blocks: Array) -> Array:
        """Rearrange one cell."""
        return spread(blocks[0], operands[0], output, extents)


@dataclass(frozen=True, slots=True)
class Creation:
    """Values made from a shape.

    >>> Creation(np.full, (("fill_value", 7),))((), ("i",), {"i": 2})
    array([7, 7])
    """

    function: Callable[..., Any]
    """Called with the shape of a tile."""
    keywords: tuple[tuple[str, Any], ...] = ()
    """Its keyword arguments."""

    def __call__(self, operands: Operands, output: Labels, extents: Extents, *blocks: Array) -> Array:
        """Make one cell."""
        return self.function(shape_of(extents, output), **dict(self.keywords))


@dataclass(frozen=True, slots=True)
class Reduction:
    """The first step of a reduction by functions that follow Dask's protocol.

    >>> blocks = [np.array([[1, 5]]), np.array([[4, 2]])]
    >>> greatest = lambda lines: np.max(lines, axis=0)
    >>> Reduction(np.max, ("i",), greatest).tile("max", ("i", "j"), ((1, 1), (2,)), blocks)
    array([[4, 5]])
    """

    chunk: Callable[..., Any]
    """Reduces one block; called with ``axis`` and ``keepdims``."""
    labels: Labels
    """What is reduced."""
    combine: Callable[..., Any] | None = None
    """Takes nested lists of what `chunk` gives, one level a reduced axis; None to merge pieces first."""

    def tile(self, expression: str, labels: Labels, pieces: Pieces, blocks: list[Array]) -> Any:
        """Reduce a tile given as a grid of pieces."""
        axes = tuple(map(labels.index, self.labels))
        apart = () if self.combine is None else tuple(sorted(axes))
        groups: dict[tuple[int, ...], list[Array]] = {}
        for index, block in zip(product(*(range(len(axis)) for axis in pieces)), blocks):
            groups.setdefault(tuple(index[axis] for axis in apart), []).append(block)
        partials = []
        for place, group in groups.items():
            mine = list(pieces)
            for axis, number in zip(apart, place):
                mine[axis] = (pieces[axis][number],)
            partials.append(self.chunk(_merged(expression, tuple(mine), group), axis=axes, keepdims=True))
        if self.combine is None or len(partials) == 1:
            return partials[0]
        return self.combine(_nested(partials, tuple(len(pieces[axis]) for axis in apart)))


CellStep = Contraction | Elementwise | Rearrange | Creation | Fold


def _nested(flat: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """Nested lists of this shape from a row-major list."""
    if not shape:
        return flat[0]
    size = len(flat) // shape[0]
    return [_nested(flat[start : start + size], shape[1:]) for start in range(0, len(flat), size)]


def _merged(expression: str, pieces: Pieces, blocks: list[Array]) -> Array:
    """One block of a row-major grid of pieces."""
    if len(blocks) == 1:
        return blocks[0]
    labels = tuple(map(str, range(len(pieces))))
    extents = tuple(zip(labels, map(sum, pieces)))
    return Join(expression, (labels,), labels, extents, (pieces,), Rearrange())(blocks)


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
    operands: Operands
    """Labels of each operand's axes."""
    output: Labels
    """Labels of the result's axes."""
    extents: tuple[tuple[str, int], ...]
    """Length of every label inside this tile."""
    pieces: tuple[Pieces, ...]
    """For each operand and axis the lengths of the pieces along it."""
    step: CellStep | Reduction
    """How one cell is computed, or the whole tile reduced."""
    finish: Callable[..., Any] | None = None
    """Applied to the result; for a reduction, Dask's aggregate function, which takes nested lists."""

    def __call__(self, *blocks: Any) -> Any:
        """Compute the tile; an operand of several pieces comes as a list, row-major.

        Raises
        ------
        ValueError
            If a block is not an array of the shape the graph gave it.
        """
        assert len(blocks) == len(self.operands), f"{len(blocks)} operands for {self.expression!r}"
        alone = [prod(map(len, axes)) == 1 for axes in self.pieces]
        operands = [[block] if single else block for block, single in zip(blocks, alone)]
        operands = self._checked(operands)
        if isinstance(self.step, Reduction):
            result = self.step.tile(self.expression, self.operands[0], self.pieces[0], operands[0])
            result = result if self.finish is None else _nested([result], (1,) * len(self.step.labels))
        else:
            result = self._tile(self.step, operands)
        return result if self.finish is None else self.finish(result)

    def _checked(self, operands: list[list[Array]]) -> list[list[Array]]:
        """Blocks that are what the graph said of them; numbers and tuples of arrays become arrays, as NumPy takes them."""
        found = []
        for number, (blocks, axes) in enumerate(zip(operands, self.pieces)):
            shapes = list(product(*axes))
            assert len(blocks) == len(shapes), f"operand {number} in {len(blocks)} blocks, not {len(shapes)}"
            found.append([_as_array(block, shape) for block, shape in zip(blocks, shapes)])
            for block, shape in zip(found[-1], shapes):
                if not hasattr(block, "shape") or not hasattr(block, "dtype"):
                    raise ValueError(
                        f"operand {number} of {self.expression!r} has a block that is no array but a "
                        f"{type(block).__name__}; expected an array of shape {shape}"
                    )
                if block.shape != shape:
                    raise ValueError(
                        f"operand {number} of {self.expression!r} has a block of shape {block.shape}; "
                        f"expected {shape}"
                    )
        return found

    def _tile(self, step: CellStep, operands: list[list[Array]]) -> Array:
        """Compute every cell, into one result if there are several."""
        if isinstance(step, Contraction) and any(
            map(_is_masked, (one for blocks in operands for one in blocks))
        ):
            if step.heeds_masks:
                return self._masked(step, operands)
            operands = [list(map(np.ma.getdata, blocks)) for blocks in operands]
        stretches = self._stretches()
        count = prod(map(len, stretches.values()))
        extents = dict(self.extents)
        if isinstance(step, Contraction) and count > 1 and (whole := self._worth_merging(count)):
            merged = [
                [_merged(self.expression, axes, blocks)] if number in whole else blocks
                for number, (axes, blocks) in enumerate(zip(self.pieces, operands))
            ]
            pieces = tuple(
                tuple((sum(axis),) for axis in axes) if number in whole else axes
                for number, axes in enumerate(self.pieces)
            )
            return replace(self, pieces=pieces)._tile(step, merged)
        cells = self._cells(step, operands, stretches)
        result = next(cells)[-1] if count == 1 else _assembled(cells, shape_of(extents, self.output), step)
        if not isinstance(step, Contraction):
            return result
        if isinstance(result, np.generic):  # NumPy's product of arrays without axes is no array
            result = np.array(result)
        return result.astype(step.result, copy=False)

    def _masked(self, step: Contraction, operands: list[list[Array]]) -> Array:
        """A contraction of blocks that are masked though the graph did not say so: masked values are not added up."""
        values = [[np.ma.filled(one, 0) for one in blocks] for blocks in operands]
        valid = [[~np.ma.getmaskarray(one) for one in blocks] for blocks in operands]
        return np.ma.array(self._tile(step, values), mask=~self._tile(Contraction("bool"), valid))

    def _worth_merging(self, cells: int) -> list[int]:
        """Operands in pieces that are better copied into one block before they are multiplied."""
        several = [number for number, axes in enumerate(self.pieces) if prod(map(len, axes)) > 1]
        sizes = [prod(map(sum, axes)) for axes in self.pieces]
        if sum(sizes[number] for number in several) < SMALL_CELL * cells:
            return several
        found = []
        for number in several:
            # for each piece along a label that another operand lacks all of that operand is read again
            again = 0
            for other, labels in enumerate(self.operands):
                apart = zip(self.operands[number], self.pieces[number])
                times = prod(len(axis) for label, axis in apart if label not in labels)
                again += sizes[other] * (times - 1)
            if again > READ_AGAIN * sizes[number]:
                found.append(number)
        return found

    def _stretches(self) -> dict[str, list[Stretch]]:
        """For every label the stretches between boundaries of any operand's pieces."""
        marks = {label: {0, extent} for label, extent in self.extents}
        for labels, axes in zip(self.operands, self.pieces):
            for label, lengths in zip(labels, axes):
                marks[label].update(accumulate(lengths))
        return {label: [*pairwise(sorted(found))] or [(0, 0)] for label, found in marks.items()}

    def _cells(
        self, step: CellStep, operands: list[list[Array]], stretches: Mapping[str, list[Stretch]]
    ) -> Iterator[Cell]:
        """Compute one cell after the other, all that go to one place in a row; each is gone when the next is there."""
        compute = partial(step, multiply=_InTurn()) if isinstance(step, Contraction) else step
        places = [
            [_places(lengths, stretches[label]) for label, lengths in zip(labels, axes)]
            for labels, axes in zip(self.operands, self.pieces)
        ]
        labels = (*self.output, *(label for label in stretches if label not in self.output))
        for numbers in product(*(range(len(stretches[label])) for label in labels)):
            cell = dict(zip(labels, numbers))
            bounds = {label: stretches[label][number] for label, number in cell.items()}
            extents = {label: stop - start for label, (start, stop) in bounds.items()}
            views = []
            for blocks, mine, axes, found in zip(operands, self.operands, self.pieces, places):
                position, inside = 0, []
                for label, lengths, where in zip(mine, axes, found):
                    number, part = where[cell[label]]
                    position = position * len(lengths) + number
                    inside.append(part)
                block = blocks[position]
                views.append(block if block.shape == shape_of(extents, mine) else block[tuple(inside)])
            place = tuple(slice(*bounds[label]) for label in self.output)
            yield place, not any(numbers[len(place) :]), compute(self.operands, self.output, extents, *views)


def _is_masked(block: Any) -> bool:
    return isinstance(block, np.ma.MaskedArray)


def _as_array(block: Any, shape: tuple[int, ...]) -> Any:
    """A block that is a number, or a tuple of arrays as of Dask's histograms, as an array; any other as it is."""
    # NumPy's own scalars, some of which are Python's numbers, too, are as good as arrays, and Dask's functions keep them
    if isinstance(block, (int, float, complex, tuple)) and not isinstance(block, np.generic):
        with suppress(ValueError):  # what is ragged is no array
            array = np.asarray(block)
            return array if array.shape == shape and array.dtype.kind in "biufc" else block
    return block


def _places(lengths: tuple[int, ...], stretches: list[Stretch]) -> list[tuple[int, slice]]:
    """For every stretch the number of the piece that holds it, and where in that piece it is."""
    stops = [*accumulate(lengths)]
    places = []
    for start, stop in stretches:
        number = bisect_left(stops, stop)
        first = stops[number] - lengths[number]
        places.append((number, slice(start - first, stop - first)))
    return places


def _assembled(cells: Iterator[Cell], shape: tuple[int, ...], step: CellStep) -> Array:
    """One array of all cells; those that go to the same place are added, or combined as the step says."""
    result: Array = None
    for place, first, value in cells:
        if result is None:
            plain = value.data if _is_masked(value) else value
            result = np.empty_like(plain, shape=shape, order="C")
        if _is_masked(value) and not _is_masked(result):
            result = np.ma.array(result)  # what is masked in one cell only stays so
        elif value.dtype != result.dtype:  # strings of another length, or metadata that was wrong
            result = result.astype(np.promote_types(result.dtype, value.dtype), copy=False)
        if first:
            result[place] = value
        else:
            part = result[(*place, ...)]  # an array even without axes: scalars warn where they wrap around
            if isinstance(step, Fold):
                step.add(part, value)
            else:
                part += value
    return result


@dataclass(frozen=True, slots=True)
class Sum:
    """Adds partial results of one tile; none of them is changed.

    >>> Sum("float64")([np.ones(2), np.ones(2)])
    array([2., 2.])
    """

    dtype: str
    """Element type of the result."""
    finish: Callable[..., Any] | None = None
    """Applied to the result."""

    def __call__(self, partials: list[Array]) -> Array:
        """Add them up; of logical values, whether any is true; of masked ones those that are not."""
        if any(map(_is_masked, partials)):
            values = replace(self, finish=None)([np.ma.filled(one, 0) for one in partials])
            masks = np.logical_and.reduce([np.ma.getmaskarray(one) for one in partials])
            result = np.ma.array(values, mask=masks)
            return result if self.finish is None else self.finish(result)
        total, *rest = partials
        for number, one in enumerate(rest):
            if number:
                total += one
            else:  # a new array: the first partial result is someone else's
                total = np.add(total, one, dtype=_working(self.dtype))[...]
        result = total.astype(self.dtype, copy=False)
        return result if self.finish is None else self.finish(result)


def scalar(array: Array) -> Any:
    """The one element of an array without axes, as the array's library gives it.

    >>> type(scalar(np.array(1.0))).__name__
    'float64'
    """
    return array[()]


@dataclass(frozen=True, slots=True)
class TreeReduce:
    """Hands partial results to a function of Dask's reduction protocol.

    >>> TreeReduce(lambda nested: nested, (2, 2))([1, 2, 3, 4])
    [[1, 2], [3, 4]]
    """

    function: Callable[..., Any]
    """Takes nested lists, one level a reduced axis."""
    shape: tuple[int, ...]
    """Number of partial results along each reduced axis."""

    def __call__(self, partials: list[Any]) -> Any:
        """Combine them; they come row-major."""
        return self.function(_nested(partials, self.shape))


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a block.

    >>> Cut(((1, 3),))(np.arange(4))
    array([1, 2])
    """

    bounds: tuple[Stretch, ...]
    """For each axis the first element and the one past the last."""

    def __call__(self, block: Array) -> Array:
        """The part; a copy if it is small, so that the block is not kept for its sake."""
        part = block[tuple(slice(*bound) for bound in self.bounds)]
        return part.copy() if 2 * part.size < block.size else part
