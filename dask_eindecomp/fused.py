"""Joins and aggregates as one CUDA kernel, for CuPy's blocks: joined values never leave the registers.

CuPy compiles the expressions below for the element types at hand.  Anything it has no expression for goes block by
block, as on a processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

__all__ = ["fused"]

Array = Any

JOINS = {
    "multiply": "x * y",
    "add": "x + y",
    "subtract": "x - y",
    "divide": "x / y",
    "true_divide": "x / y",
    "squared_difference": "(x - y) * (x - y)",
    "absolute_difference": "fabs(x - y)",
    "minimum": "(x != x || x < y) ? x : y",
    "maximum": "(x != x || x > y) ? x : y",
    "hypot": "hypot(x, y)",
    "exp_difference": "exp(x - y)",
}
"""Joined values of ``x`` and ``y``, by name of the join; what is not a number stays so."""
AGGREGATES = {
    "add": ("a + b", "0"),
    "multiply": ("a * b", "1"),
    "maximum": ("(a != a || a > b) ? a : b", "-INFINITY"),
    "minimum": ("(a != a || a < b) ? a : b", "INFINITY"),
}
"""What becomes of ``a`` and ``b``, and of nothing, by name of the combining function."""


def fused(
    join: Callable[..., Any] | None,
    combine: Callable[..., Any],
    dtype: str,
    views: Sequence[Array],
    axes: tuple[int, ...],
) -> Array | None:
    """Arrays of two operands joined and combined along some axes; None where there is no kernel for that.

    Parameters
    ----------
    join, combine
        The functions; NumPy's and those of named joins are known.
    dtype
        Element type of the result; operands in another one have no kernel.
    views
        CuPy arrays that broadcast against each other.
    axes
        Along which values meet.
    """
    module = type(views[0]).__module__.partition(".")[0]
    names = getattr(join, "__name__", ""), getattr(combine, "__name__", "")
    known = names[0] in JOINS and names[1] in AGGREGATES and isinstance(combine, np.ufunc)
    ours = isinstance(join, np.ufunc) or getattr(join, "__module__", "") == "dask_eindecomp.expression"
    types = {str(view.dtype) for view in views}
    if module != "cupy" or not (known and ours) or len(views) != 2:
        return None
    if types != {dtype} or dtype not in ("float32", "float64"):
        return None
    return _kernel(*names, dtype)(*views, axis=axes)


@cache
def _kernel(join: str, combine: str, dtype: str) -> Any:
    """The kernel, compiled when it is called."""
    import cupy

    reduced, identity = AGGREGATES[combine]
    return cupy.ReductionKernel(
        f"{dtype} x, {dtype} y",
        f"{dtype} z",
        JOINS[join],
        reduced,
        "z = a",
        identity,
        f"{join}_{combine}_{dtype}",
    )
