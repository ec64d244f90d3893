"""Element types of an extended summation, and what it takes of a user's own functions: both are found by trying.

A join or an aggregate has the element types that NumPy's functions of that name have on samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_eindecomp.expression import Aggregate, ExpressionError

__all__ = ["Types", "castable", "check_own", "joined_type", "types_of", "types_of_own"]

KINDS = {"bool": "bool", "int64": "integer", "float64": "real", "complex128": "complex"}
"""Element types that stand for the others of their kind."""
SAMPLES = 64
"""Values on which it is tried whether an aggregate of one's own is associative and commutative."""


@dataclass(frozen=True)
class Types:
    """Element types of one summation."""

    combined: np.dtype[Any]
    """In what values are combined."""
    result: np.dtype[Any]
    """What leaves."""


def joined_type(
    function: Callable[..., Any] | None, title: str, dtypes: Sequence[np.dtype[Any]]
) -> np.dtype[Any]:
    """Element type of joined values."""
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


def castable(dtype: np.dtype[Any], wanted: np.dtype[Any]) -> np.dtype[Any]:
    if not np.can_cast(dtype, wanted, "same_kind"):
        raise TypeError(f"values of type {dtype} cannot become {wanted}; expected dtype=None or a wider one")
    return wanted


def types_of(aggregate: str, joined: np.dtype[Any], dtype: np.dtype[Any] | None) -> Types:
    """Element types of a named aggregate, as NumPy's function of that name has them."""
    sample = np.ones(1, joined)
    if aggregate in ("any", "all", "count"):
        combined = np.dtype(np.intp if aggregate == "count" else bool)
        return Types(combined, combined if dtype is None else dtype)
    if aggregate in ("max", "min"):
        return Types(joined, joined if dtype is None else castable(joined, dtype))
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
        result = castable(joined, dtype)
        if aggregate in ("mean", "logsumexp") and result.kind in "biu":
            raise TypeError(f"aggregate {aggregate!r} gives no {result}; expected real or complex")
    # half precision is combined in single and cast once; products overflow as NumPy's do
    combined = np.dtype("float32") if result == np.float16 and aggregate != "prod" else result
    return Types(combined, result)


def types_of_own(aggregate: Aggregate, joined: np.dtype[Any], dtype: np.dtype[Any] | None) -> Types:
    """Element types of a user's aggregate, found by trying it."""
    start = joined if dtype is None else castable(joined, dtype)
    combined = _tried(aggregate.combine, [start, start])
    result = combined if aggregate.finalize is None else _tried(aggregate.finalize, [combined])
    return Types(combined, result)


def check_own(aggregate: Aggregate, dtype: np.dtype[Any]) -> None:
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
