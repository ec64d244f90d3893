"""Extended Einstein summation as Dask layers: what ``einsum`` builds, plan or no plan.

Each block is joined and combined along the contracted axes by itself, then Dask's own reduction tree combines what
blocks gave::

    operands ──FoldBlocks──▶ (output…, 1, 1) a block ──FoldTree──▶ result

``lift`` knows both functions, so that the hook plans the whole as one expression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, prod
from typing import Any

import dask.array as da
import numpy as np
import opt_einsum
from dask.array.utils import meta_from_array
from dask.base import tokenize

from dask_eindecomp.combining import Combine, Counting, Finish, Kept, LogSumExp, Repeated
from dask_eindecomp.config import setting
from dask_eindecomp.element_types import castable, check_own, joined_type, types_of, types_of_own
from dask_eindecomp.expression import (
    AGGREGATES,
    JOINS,
    REPEATABLE,
    Aggregate,
    Expression,
    ExpressionError,
    Labels,
)
from dask_eindecomp.folds import Fold, FoldBlocks, FoldTree, passed
from dask_eindecomp.grams import PAIRWISE
from dask_eindecomp.kernels import Contraction

__all__ = ["build"]

NAMES = {function: name for name, function in JOINS.items() if isinstance(function, np.ufunc)}
"""Names of NumPy's functions among the joins."""


def build(
    subscripts: Any,
    operands: Sequence[Any],
    join: str | Callable[..., Any],
    aggregate: str | Aggregate,
    dtype: Any,
    out_chunks: Any,
) -> da.Array:
    """The Dask array of an extended summation; see ``dask_eindecomp.einsum``."""
    arrays, labels, output = _read(subscripts, operands)
    arrays, labels = _without_broadcast(arrays, labels)
    expression = Expression(labels, output)
    extents = _extents(expression, arrays)
    wanted = None if dtype is None else np.dtype(dtype)
    join = NAMES.get(join, join) if len(arrays) == 2 and isinstance(join, np.ufunc) else join
    _check_aggregate(aggregate, expression)
    if join == "multiply" and aggregate == "sum":
        result = _products(arrays, expression, wanted)
    else:
        function, title = _joining(join, len(arrays))
        joined = joined_type(function, title, [array.dtype for array in arrays])
        how = _Joining(function, title, joined, isinstance(join, str))
        if expression.contracted:
            result = _fold(arrays, expression, extents, how, aggregate, wanted)
        else:
            result = _elementwise(arrays, expression, how, wanted)
    return result if out_chunks is None else result.rechunk(out_chunks)


# what is asked for


def _read(subscripts: Any, operands: Sequence[Any]) -> tuple[list[da.Array], tuple[Labels, ...], Labels]:
    """Operands as Dask arrays, the labels of each, and those of the result; both of NumPy's spellings."""
    given = (subscripts, *operands)
    if isinstance(subscripts, str):
        strange = sorted({one for one in subscripts if not (one.isalpha() or one in " ,->.")})
        if strange:
            raise ExpressionError(f"character {strange[0]!r} in {subscripts!r} is no label; expected letters")
        given = (subscripts, *map(_as_dask, operands))
    else:
        # an array, its labels, and so on; then perhaps those of the result
        last = len(given) - len(given) % 2
        given = tuple(_as_dask(one) if n < last and n % 2 == 0 else one for n, one in enumerate(given))
    try:
        left, right, arrays = opt_einsum.parser.parse_einsum_input(given)
    except (ValueError, IndexError) as error:
        raise ExpressionError(f"{subscripts!r} cannot be read: {error}") from error
    return list(arrays), tuple(tuple(part) for part in left.split(",")), tuple(right)


def _as_dask(operand: Any) -> da.Array:
    """An operand as a Dask array; arrays of other libraries keep their type."""
    if isinstance(operand, da.Array):
        return operand
    if hasattr(operand, "__array_function__") and not isinstance(operand, np.generic):
        return da.from_array(operand, asarray=False)
    return da.from_array(np.asarray(operand))


def _without_broadcast(
    arrays: list[da.Array], labels: tuple[Labels, ...]
) -> tuple[list[da.Array], tuple[Labels, ...]]:
    """Without axes of length 1 that meet longer ones, and with both axes of a diagonal cut alike."""
    longest: dict[str, float] = {}
    for array, mine in zip(arrays, labels):
        for label, extent in zip(mine, array.shape):
            if longest.get(label, 1) == 1:
                longest[label] = extent
    found, kept = [], []
    for array, mine in zip(arrays, labels):
        if len(mine) == array.ndim:
            drops = [extent == 1 != longest[label] for label, extent in zip(mine, array.shape)]
            array = array[tuple(0 if drop else slice(None) for drop in drops)] if any(drops) else array
            mine = tuple(label for label, drop in zip(mine, drops) if not drop)
            cuts = {label: array.chunks[axis] for axis, label in reversed([*enumerate(mine)])}
            alike = tuple(cuts[label] for label in mine)
            if alike != array.chunks and len(set(mine)) < len(mine):
                _extents(Expression((mine,), ()), [array])  # before Dask refuses to cut unequal axes alike
                array = array.rechunk(alike)
        found.append(array)
        kept.append(mine)
    return found, tuple(kept)


def _extents(expression: Expression, arrays: Sequence[da.Array]) -> dict[str, int]:
    """Length of every label; an unknown length, which is not a number, fits any."""
    shapes = [array.shape for array in arrays]
    known: dict[str, Any] = {}
    for labels, shape in zip(expression.operands, shapes):
        for label, extent in zip(labels, shape):
            if isnan(known.get(label, float("nan"))):
                known[label] = extent
    filled = (
        tuple(known[label] if isnan(extent) else extent for label, extent in zip(labels, shape))
        if len(labels) == len(shape)
        else shape
        for labels, shape in zip(expression.operands, shapes)
    )
    expression.extents(tuple(tuple(-1 if isnan(extent) else extent for extent in shape) for shape in filled))
    return known


# sums of products


def _products(arrays: list[da.Array], expression: Expression, dtype: np.dtype[Any] | None) -> da.Array:
    """NumPy's einsum, two operands at a time in the order opt_einsum finds."""
    found = np.result_type(*(array.dtype for array in arrays)) if dtype is None else dtype
    for array in arrays:
        if not np.can_cast(array.dtype, found, "same_kind"):
            raise TypeError(
                f"elements of type {array.dtype} cannot become {found}; expected dtype=None or a wider one"
            )
    cast = None if all(array.dtype == found for array in arrays) else found.name
    # operands are cast once; what is in the result's type already stays so
    step = Contraction(found.name, cast, partial=found == np.float16)
    pending = list(zip(arrays, expression.operands))
    for picked in _path(arrays, expression):
        chosen = [pending.pop(position) for position in sorted(picked, reverse=True)][::-1]
        part = _part([labels for _, labels in chosen], [labels for _, labels in pending], expression)
        blocks = FoldBlocks(*_labels(part), step, finish=Finish(found.name))
        made = _layers([array for array, _ in chosen], part, blocks, Combine(np.add, 0))
        pending.append((made, part.output))
    return pending[0][0]


def _path(arrays: Sequence[da.Array], expression: Expression) -> list[tuple[int, ...]]:
    """Which two operands meet, one step after the other, each result going to the end; an only operand by itself."""
    if len(arrays) < 3:
        return [tuple(range(len(arrays)))]
    shapes = [tuple(1 if isnan(extent) else extent for extent in array.shape) for array in arrays]
    path, _ = opt_einsum.contract_path(expression.einsum, *shapes, shapes=True, optimize="auto")
    # opt_einsum leaves a last product of many whose order does not matter
    return [two for picked in path for two in ([picked] if len(picked) < 3 else [(0, 1)] * (len(picked) - 1))]


def _part(chosen: Sequence[Labels], rest: Sequence[Labels], whole: Expression) -> Expression:
    """The product of some operands, with the labels that the rest or the result still need."""
    if not rest:
        return Expression(tuple(chosen), whole.output)
    needed = {*whole.output}.union(*rest)
    every = dict.fromkeys(label for labels in chosen for label in labels)
    return Expression(tuple(chosen), tuple(label for label in every if label in needed))


# any join and aggregate


@dataclass(frozen=True)
class _Joining:
    """A join."""

    function: Callable[..., Any] | None
    """Takes an array of each operand; None for the values of one."""
    title: str
    """What a plan calls it."""
    dtype: np.dtype[Any]
    """Element type of joined values."""
    named: bool
    """Whether it is one of those known by name."""


def _check_aggregate(aggregate: Any, expression: Expression) -> None:
    """Refuse what is no aggregate."""
    wanted = f"expected one of {', '.join(AGGREGATES)} or an Aggregate"
    if not isinstance(aggregate, (str, Aggregate)):
        raise TypeError(f"aggregate is {aggregate!r}; {wanted}")
    if isinstance(aggregate, str) and aggregate not in AGGREGATES:
        raise ExpressionError(f"unknown aggregate {aggregate!r} in {expression.einsum!r}; {wanted}")


def _elementwise(
    arrays: list[da.Array], expression: Expression, join: _Joining, dtype: np.dtype[Any] | None
) -> da.Array:
    """Joined values where nothing is contracted, so that no aggregate has anything to do."""
    result = join.dtype if dtype is None else castable(join.dtype, dtype)
    step = Fold(join.function, Combine(np.add, 0), join.dtype.name, result.name)
    finish = None if expression.output else Finish(result.name)
    blocks = FoldBlocks(*_labels(expression), step, join.title, "sum", finish)
    return _layers(arrays, expression, blocks, step.combine)


def _fold(
    arrays: list[da.Array],
    expression: Expression,
    extents: Mapping[str, int],
    join: _Joining,
    aggregate: str | Aggregate,
    dtype: np.dtype[Any] | None,
) -> da.Array:
    """Joined values combined along contracted axes."""
    known = AGGREGATES[aggregate] if isinstance(aggregate, str) else aggregate
    _check_lengths(known, expression, extents)
    function, joined, named = join.function, join.dtype, aggregate
    if isinstance(aggregate, str):
        types = types_of(aggregate, joined, dtype)
        combine = (LogSumExp if aggregate == "logsumexp" else Combine)(known.combine, known.identity)
    else:
        types = types_of_own(aggregate, joined, dtype)
        check_own(aggregate, types.combined)
        combine = Combine(_kept(known.combine), known.identity)
        named = replace(known, combine=combine.function, finalize=_kept(known.finalize))
    if aggregate == "count":
        function, joined = Counting(function), np.dtype(bool)
    names = (join.title, known.name)
    pairwise = names if join.named and isinstance(aggregate, str) and names in PAIRWISE else None
    step = Fold(function, combine, joined.name, types.combined.name, pairwise, setting("scratch-bytes"))
    count = prod(extents[label] for label in expression.contracted) if aggregate == "mean" else None
    finish = Finish(types.result.name, _kept(known.finalize), count)
    if known.identity is None:
        # a block of no elements has nothing to give
        arrays = [_without_empty(*each, expression.contracted) for each in zip(arrays, expression.operands)]
    return _layers(
        arrays, expression, FoldBlocks(*_labels(expression), step, join.title, named, finish), combine
    )


def _kept(function: Any) -> Any:
    """A user's function, pickled until it is called; NumPy's own, and none, as they are."""
    return function if function is None or isinstance(function, np.ufunc) else Kept(function)


def _check_lengths(aggregate: Aggregate, expression: Expression, extents: Mapping[str, int]) -> None:
    """Refuse an aggregate that has no value of nothing, or needs to know of how much."""
    for label in expression.contracted:
        if extents[label] == 0 and aggregate.identity is None:
            raise ValueError(
                f"label {label!r} of {expression.einsum!r} is 0 long and aggregate {aggregate.name!r} has no "
                "identity; expected at least 1"
            )
        if isnan(extents[label]) and aggregate is AGGREGATES["mean"]:
            raise ValueError(
                f"a mean over {label!r}, of unknown length; expected known chunks, as compute_chunk_sizes() gives"
            )


def _without_empty(array: da.Array, labels: Labels, contracted: Labels) -> da.Array:
    """An array without chunks of no elements along contracted axes."""
    chunks = (
        tuple(length for length in axis if length) or axis if label in contracted else axis
        for label, axis in zip(labels, array.chunks)
    )
    return array.rechunk(tuple(chunks))


def _joining(join: str | Callable[..., Any], count: int) -> tuple[Callable[..., Any] | None, str]:
    """The join as a function of ``count`` arrays, None for the values of one, and its name."""
    if isinstance(join, str):
        if join not in JOINS:
            raise ExpressionError(
                f"unknown join {join!r}; expected one of {', '.join(JOINS)}, a NumPy ufunc or a function of arrays"
            )
        if count == 1 and join == "multiply":
            return None, "identity"
        if count < 2 or (count > 2 and join not in REPEATABLE):
            raise ExpressionError(f"join {join!r} takes 2 operands but was given {count}")
        return (JOINS[join] if count == 2 else Repeated(JOINS[join])), join
    if isinstance(join, np.ufunc):
        if join.nin != count or join.nout != 1 or join.signature is not None:
            raise ExpressionError(
                f"ufunc {join.__name__!r} takes {join.nin} arrays and gives {join.nout}, but {count} operands are "
                "to give one; expected an elementwise ufunc of as many"
            )
        return join, join.__name__
    if not callable(join):
        raise TypeError(
            f"join is {join!r}; expected one of {', '.join(JOINS)}, a NumPy ufunc or a function of arrays"
        )
    kept = Kept(join)
    return kept, kept.name


# layers


def _labels(expression: Expression) -> tuple[tuple[Labels, ...], Labels, Labels]:
    return expression.operands, expression.output, expression.contracted


def _layers(
    arrays: Sequence[da.Array], expression: Expression, blocks: FoldBlocks, combine: Combine
) -> da.Array:
    """The layers of one summation."""
    contracted, output = expression.contracted, expression.output
    met = blocks.aggregate if isinstance(blocks.aggregate, str) else blocks.aggregate.name
    title = (
        "einsum"
        if isinstance(blocks.step, Contraction)
        else f"{blocks.join}-{met}"
        if contracted
        else blocks.join
    )
    name = f"{title}-join-{tokenize(blocks, *(array.name for array in arrays), combine)}"
    result = blocks.step.dtype if blocks.finish is None else blocks.finish.dtype
    combined = blocks.step.result if isinstance(blocks.step, Contraction) else blocks.step.dtype
    pairs = [one for array, labels in zip(arrays, expression.operands) for one in (array, labels)]
    meta = meta_from_array(
        arrays[0]._meta, len(output) + len(contracted), dtype=combined if contracted else result
    )
    joined = da.blockwise(
        blocks, (*output, *contracted), *pairs, name=name, dtype=meta.dtype, meta=meta, concatenate=False,
        adjust_chunks=dict.fromkeys(contracted, _one),
    )  # fmt: skip
    if not contracted:
        return joined
    axes = tuple(range(len(output), len(output) + len(contracted)))
    return da.reduction(
        joined, chunk=passed, combine=FoldTree(combine), aggregate=FoldTree(combine, blocks.finish), axis=axes,
        dtype=np.dtype(result), concatenate=False, name=title, meta=meta_from_array(meta, len(output), dtype=result),
    )  # fmt: skip


def _one(length: int) -> int:
    """What is left of an axis along which a block is combined."""
    return 1
