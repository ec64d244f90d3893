"""Which functions of Dask and NumPy are understood, and as what.

Functions are known by identity, never by the name of a layer.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import dask.array.chunk
import dask.array.core
import dask.array.einsumfuncs
import dask.array.reductions
import dask.array.routines
import dask.array.slicing
import numpy as np

__all__ = [
    "CONTRACTIONS",
    "MOVES",
    "STALE",
    "SUMS",
    "base",
    "function_name",
    "is_map",
    "is_p2p_rechunk",
    "is_trusted",
]

CONTRACTIONS = (
    dask.array.einsumfuncs.chunk_einsum,
    dask.array.routines._tensordot,
    dask.array.routines._matmul,
)
MOVES = (np.transpose, np.swapaxes, np.squeeze)
"""What only moves or drops axes; Dask's indices say which."""
OPERATORS = frozenset(
    getattr(operator, name)
    for name in [
        *(
            "abs",
            "add",
            "and_",
            "eq",
            "floordiv",
            "ge",
            "gt",
            "inv",
            "invert",
            "le",
            "lshift",
            "lt",
            "mod",
            "mul",
        ),
        *("ne", "neg", "or_", "pos", "pow", "rshift", "sub", "truediv", "xor"),
    ]
)
"""Python's operators on arrays."""
MAPS = (
    np.where,
    np.clip,
    np.real,
    np.imag,
    np.angle,
    np.round,
    np.around,
    np.isreal,
    np.iscomplex,
    np.nan_to_num,
    np.fix,
    np.sinc,
    np.i0,
    builtins.abs,
    dask.array.reductions._sqrt,
    dask.array.reductions.divide,
    *(f for name in ("astype", "clip", "real", "imag") if (f := getattr(dask.array.chunk, name, None))),
    *(f for name in ("astype",) if (f := getattr(dask.array.core, name, None))),
)
STALE = (
    dask.array.chunk.topk,
    dask.array.chunk.argtopk,
    dask.array.slicing.getitem_variadic,
    np.bincount,
    np.unique,
    dask.array.routines._unique_internal,
)
"""Functions whose arrays get other chunk sizes after Dask has written their layer."""
TRUSTED = ("dask.array.", "numpy", "dask.utils")
"""Modules whose reduction functions work for any cut."""


SUMS = (np.sum, dask.array.chunk.sum, dask.array.routines._chunk_sum)
"""What adds up the blocks of a contraction."""


def is_p2p_rechunk(layer: Any) -> bool:
    """Whether a layer is distributed's rechunk by shuffling, known without importing distributed."""
    return (
        f"{type(layer).__module__}.{type(layer).__name__}" == "distributed.shuffle._rechunk.P2PRechunkLayer"
    )


def is_map(function: Any, keywords: Mapping[str, Any]) -> bool:
    """Whether a block function is known to work element by element."""
    if function is dask.array.core._enforce_dtype:
        return is_map(keywords.get("enforce_dtype_function"), {})
    if isinstance(function, np.ufunc):
        return function.signature is None and function.nout == 1 and not set(keywords) - {"dtype", "casting"}
    if isinstance(function, partial):
        return not function.args and is_map(function.func, {**function.keywords, **keywords})
    try:
        return function in OPERATORS or any(function is known for known in MAPS)
    except TypeError:  # not hashable
        return False


def base(function: Any) -> Any:
    """A function without what is bound to it."""
    while isinstance(function, partial):
        function = function.func
    return function


def function_name(function: Any) -> str:
    """The name of a function, what is bound to it taken off."""
    function = base(function)
    return str(getattr(function, "__name__", type(function).__name__))


def is_trusted(function: Any) -> bool:
    """Whether a reduction function is Dask's or NumPy's own, so that it works for any cut."""
    return str(getattr(base(function), "__module__", "")).startswith(TRUSTED)
