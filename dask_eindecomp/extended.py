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

from dask_eindecomp.config import setting
from dask_eindecomp.expression import (
    AGGREGATES,
    JOINS,
    REPEATABLE,
    Aggregate,
    Expression,
    ExpressionError,
    Labels,
)
from dask_eindecomp.folds import (
    Combine,
    Counting,
    Finish,
    Fold,
    FoldBlocks,
    FoldTree,
    Kept,
    LogSumExp,
    Repeated,
    passed,
)
from dask_eindecomp.grams import PAIRWISE
from dask_eindecomp.kernels import Contraction

__all__ = ["build"]

KINDS = {"bool": "bool", "int64": "integer", "float64": "real", "complex128": "complex"}
"""Element types that stand for the others of their kind."""
SAMPLES = 64
"""Values on which it is tried whether an aggregate of one's own is associative and commutative."""


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
    if join == "multiply" and isinstance(aggregate, str) and aggregate == "sum":
        result = _products(arrays, expression, wanted)
    else:
        result = _fold(arrays, expression, extents, join, aggregate, wanted)
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
        last = (
            len(given) - len(given) % 2
        )  # an array, its labels, and so on; then perhaps those of the result
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
    found = np.result_type(*arrays) if dtype is None else dtype
    for array in arrays:
        if not np.can_cast(array.dtype, found, "same_kind"):
            raise TypeError(
                f"elements of type {array.dtype} cannot become {found}; expected dtype=None or a wider one"
            )
    cast = None if all(array.dtype == found for array in arrays) else found.name
    pending = list(zip(arrays, expression.operands))
    shapes = [tuple(1 if isnan(extent) else extent for extent in array.shape) for array in arrays]
    path = [tuple(range(len(arrays)))]
    if len(arrays) > 2:
        path, _ = opt_einsum.contract_path(f"{expression.einsum}", *shapes, shapes=True, optimize="auto")
    for picked in path:
        chosen = [pending.pop(position) for position in sorted(picked, reverse=True)][::-1]
        while True:
            two, chosen = chosen[:2], chosen[2:]
            others = [labels for _, labels in (*pending, *chosen)]
            needed = {*expression.output}.union(*others)
            labels = tuple(mine for _, mine in two)
            output = tuple(
                label for label in dict.fromkeys(one for mine in labels for one in mine) if label in needed
            )
            part = Expression(labels, output if others else expression.output)
            # operands are cast once; what is in the result's type already stays so
            step = Contraction(found.name, cast, partial=found == np.float16)
            finish = Finish(found.name)
            made = _layers(
                [array for array, _ in two],
                part,
                FoldBlocks(*_labels(part), step, finish=finish),
                Combine(np.add, 0),
            )
            if not chosen:
                break
            chosen = [(made, part.output), *chosen]
        pending.append((made, part.output))
    return pending[0][0]


# any join and aggregate


@dataclass(frozen=True)
class _Types:
    """Element types of one summation."""

    joined: np.dtype[Any]
    """What the join gives."""
    combined: np.dtype[Any]
    """In what values are combined."""
    result: np.dtype[Any]
    """What leaves."""


def _fold(
    arrays: list[da.Array],
    expression: Expression,
    extents: Mapping[str, int],
    join: str | Callable[..., Any],
    aggregate: str | Aggregate,
    dtype: np.dtype[Any] | None,
) -> da.Array:
    """Any other join and aggregate."""
    if isinstance(aggregate, str) and aggregate not in AGGREGATES:
        raise ExpressionError(
            f"unknown aggregate {aggregate!r} in {expression.einsum!r}; expected one of {', '.join(AGGREGATES)} "
            "or an Aggregate"
        )
    if not isinstance(aggregate, (str, Aggregate)):
        raise TypeError(
            f"aggregate is {aggregate!r}; expected one of {', '.join(AGGREGATES)} or an Aggregate"
        )
    function, title = _joining(join, len(arrays))
    contracted = expression.contracted
    joined = _joined_type(function, title, arrays)
    known = AGGREGATES[aggregate] if isinstance(aggregate, str) else aggregate
    if not contracted:
        result = joined if dtype is None else _castable(joined, dtype)
        step = Fold(function, Combine(np.add, 0), joined.name, result.name)
        finish = Finish(result.name) if not expression.output else None
        blocks = FoldBlocks(*_labels(expression), step, title, "sum", finish)
        return _layers(arrays, expression, blocks, step.combine)
    if isinstance(aggregate, str):
        types = _types(aggregate, joined, dtype)
        combine = _combining(aggregate, types.combined)
    else:
        types = _types_of_own(aggregate, joined, dtype)
        _check_own(aggregate, types.combined)
        own = aggregate.combine if isinstance(aggregate.combine, np.ufunc) else Kept(aggregate.combine)
        combine = Combine(own, aggregate.identity)
    empty = [label for label in contracted if extents[label] == 0]
    if empty and known.identity is None:
        raise ValueError(
            f"label {empty[0]!r} of {expression.einsum!r} is 0 long and aggregate {known.name!r} has no identity; "
            "expected at least 1"
        )
    count = None
    if aggregate == "mean":
        lengths = [extents[label] for label in contracted]
        if any(map(isnan, lengths)):
            raise ValueError(
                "a mean over axes of unknown length; expected known chunks, as compute_chunk_sizes() gives"
            )
        count = prod(lengths)
    if aggregate == "count":
        function, joined = Counting(function), np.dtype(bool)
    finalize = None if known.finalize is None else Kept(known.finalize)
    names = (title, known.name)
    named_both = isinstance(join, str) and isinstance(aggregate, str)
    pairwise = names if named_both and names in PAIRWISE else None
    step = Fold(function, combine, joined.name, types.combined.name, pairwise, setting("scratch-bytes"))
    named: Any = (
        aggregate
        if isinstance(aggregate, str)
        else replace(aggregate, combine=combine.function, finalize=finalize)
    )
    blocks = FoldBlocks(*_labels(expression), step, title, named, Finish(types.result.name, finalize, count))
    if known.identity is None:
        # a block of no elements has nothing to give
        arrays = [
            array.rechunk(_without_empty(array.chunks, labels, contracted))
            for array, labels in zip(arrays, expression.operands)
        ]
    return _layers(arrays, expression, blocks, combine)


def _without_empty(
    chunks: tuple[tuple[int, ...], ...], labels: Labels, contracted: Labels
) -> tuple[tuple[int, ...], ...]:
    """Chunks without those of no elements along contracted axes."""
    return tuple(
        tuple(length for length in axis if length) or axis if label in contracted else axis
        for axis, label in zip(chunks, labels)
    )


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


def _joined_type(
    function: Callable[..., Any] | None, title: str, arrays: Sequence[da.Array]
) -> np.dtype[Any]:
    """Element type of joined values."""
    dtypes: list[np.dtype[Any]] = [array.dtype for array in arrays]
    if function is None:
        return dtypes[0]
    try:
        return _tried(function, dtypes)
    except TypeError as error:
        accepted = []
        for name, kind in KINDS.items():
            try:
                _tried(function, [np.dtype(name)] * len(dtypes))
            except TypeError:
                continue
            accepted.append(kind)
        raise TypeError(
            f"join {title!r} takes no {' and '.join(map(str, dtypes))} values; expected "
            f"{' or '.join(accepted) or 'another join'}"
        ) from error


def _tried(function: Callable[..., Any], dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """Element type of what a function of arrays gives.

    Raises
    ------
    TypeError
        If it gives no array of their shape.
    """
    shape = (3,)
    with np.errstate(all="ignore"):
        found = function(*(np.ones(shape, dtype) for dtype in dtypes))
    if getattr(found, "shape", None) != shape:
        raise TypeError(f"it made {getattr(found, 'shape', type(found).__name__)} of arrays of shape {shape}")
    dtype: np.dtype[Any] = found.dtype
    return dtype


def _castable(dtype: np.dtype[Any], wanted: np.dtype[Any]) -> np.dtype[Any]:
    if not np.can_cast(dtype, wanted, "same_kind"):
        raise TypeError(f"values of type {dtype} cannot become {wanted}; expected dtype=None or a wider one")
    return wanted


def _types(aggregate: str, joined: np.dtype[Any], dtype: np.dtype[Any] | None) -> _Types:
    """Element types of a named aggregate, as NumPy's function of that name has them."""
    sample = np.ones(1, joined)
    if aggregate in ("any", "all", "count"):
        combined = np.dtype(np.intp if aggregate == "count" else bool)
        return _Types(joined, combined, combined if dtype is None else dtype)
    if aggregate in ("max", "min"):
        return _Types(joined, joined, joined if dtype is None else _castable(joined, dtype))
    if aggregate == "logsumexp" and joined.kind == "c":
        raise TypeError(f"aggregate 'logsumexp' takes no {joined} values; expected bool, integer or real")
    making: dict[str, Callable[..., Any]] = {
        "sum": np.sum,
        "prod": np.prod,
        "mean": np.mean,
        "logsumexp": np.exp,
    }
    result = making[aggregate](sample).dtype
    if dtype is not None:
        result = _castable(joined, dtype)
        if aggregate in ("mean", "logsumexp") and result.kind in "biu":
            raise TypeError(f"aggregate {aggregate!r} gives no {result}; expected real or complex")
    # half precision is combined in single and cast once; products overflow as NumPy's do
    combined = np.dtype("float32") if result == np.float16 and aggregate != "prod" else result
    return _Types(joined, combined, result)


def _combining(aggregate: str, dtype: np.dtype[Any]) -> Combine:
    """How the values of a named aggregate meet."""
    known = AGGREGATES[aggregate]
    return (LogSumExp if aggregate == "logsumexp" else Combine)(known.combine, known.identity)


def _types_of_own(aggregate: Aggregate, joined: np.dtype[Any], dtype: np.dtype[Any] | None) -> _Types:
    """Element types of a user's aggregate, found by trying it."""
    start = joined if dtype is None else _castable(joined, dtype)
    combined = _tried(aggregate.combine, [start, start])
    result = combined if aggregate.finalize is None else _tried(aggregate.finalize, [combined])
    return _Types(joined, combined, result)


def _check_own(aggregate: Aggregate, dtype: np.dtype[Any]) -> None:
    """Try a user's aggregate on samples.

    Raises
    ------
    ExpressionError
        If it is not associative or not commutative there, or its identity changes a value.
    """
    random = np.random.default_rng(0)
    if dtype.kind in "biu":
        low, high = (0, 2) if dtype.kind == "b" else (0 if dtype.kind == "u" else -9, 10)
        x, y, z = random.integers(low, high, (3, SAMPLES)).astype(dtype)
    else:
        x, y, z = random.normal(size=(3, SAMPLES)).astype(dtype)
    combine = aggregate.combine
    name = aggregate.name

    def differ(one: Any, other: Any) -> int | None:
        close = np.isclose(one, other, rtol=1e-2 if dtype == np.float16 else 1e-4, atol=1e-6, equal_nan=True)
        return None if close.all() else int(np.argmin(close))

    with np.errstate(all="ignore"):
        for claim, one, other in (
            ("commutative", combine(x, y), combine(y, x)),
            ("associative", combine(combine(x, y), z), combine(x, combine(y, z))),
        ):
            at = differ(one, other)
            if at is not None:
                raise ExpressionError(
                    f"aggregate {name!r} is not {claim}: of {x[at]}, {y[at]} and {z[at]} it makes {one[at]} in one "
                    f"order and {other[at]} in another; expected the same"
                )
        if aggregate.identity is not None:
            same = combine(x, np.full_like(x, aggregate.identity))
            at = differ(same, x)
            if at is not None:
                raise ExpressionError(
                    f"identity {aggregate.identity!r} of aggregate {name!r} makes {same[at]} of {x[at]}; expected "
                    "that it changes nothing"
                )


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
