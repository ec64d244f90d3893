"""Joins of all rows of two matrices that compiled libraries do: products of matrices, and SciPy's loops.

The sum of squared differences is |x|² + |y|² - 2 x·y.  Far from the origin the three cancel, so points are moved to
where their middle is the origin, which changes no difference, and everything is in double precision.  What is left of
the error is about √k eps (|x|² + |y|²) for k coordinates; pairs for which that is too much of their distance, those of
points close to each other, are computed anew from the differences themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["BLAS", "PAIRWISE", "ever_both", "manhattan_distances", "squared_distances"]

Array = Any

ERRORS = {"float16": 1e-4, "float32": 1e-7, "float64": 1e-13}
"""Relative error allowed, by element type of the differences."""
DIRECT = 0.1
"""Share of pairs to be computed anew from which on all are computed from differences."""
SMALL = 8
"""Coordinates below which differences are as fast."""


def squared_distances(one: Array, two: Array, joined: str, dtype: str, scratch: int) -> Array | None:
    """Sums of squared differences of each pair of rows, or None where a Gram matrix does not give them.

    Parameters
    ----------
    one, two
        Points in rows, stacks of matrices: (stack, m, k) and (stack, n, k).
    joined, dtype
        Element types of the differences and of the sums.
    scratch
        Bytes to work in.

    Returns
    -------
    array, shape (stack, m, n)
    """
    if joined not in ERRORS or one.dtype.kind not in "fiub" or two.dtype.kind not in "fiub":
        return None
    if not np.isfinite(one).all() or not np.isfinite(two).all():
        return None  # infinities would cancel in a Gram matrix, where their difference is infinite
    result = np.empty((len(one), one.shape[1], two.shape[1]), dtype)
    depth = one.shape[2]
    far = 4 * np.sqrt(depth) * np.finfo(float).eps / ERRORS[joined] if depth >= SMALL else None
    for x, y, out in zip(one, two, result):
        rows = max(scratch // 4 // (8 * max(len(y), depth, 1)), 1)
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            _fill(out[part], x[part], y, far, scratch)
    return result


def _fill(out: Array, x: Array, y: Array, far: float | None, scratch: int) -> None:
    """Squared distances of the rows of two matrices; ``far`` says from which distance on a product will do."""
    if far is None or not out.size:
        out[...] = _directly(x, y)
        return
    middle = y.mean(axis=0, dtype=float)
    here, there = x - middle, y - middle
    lengths = [np.einsum("ij,ij->i", points, points) for points in (here, there)]
    with np.errstate(over="ignore", invalid="ignore"):
        found = (-2 * here) @ there.T
        sizes = np.add.outer(*lengths)
        found += sizes
        sizes *= far
        close = ~(found >= sizes)
    at, other = close.nonzero()
    if len(at) > DIRECT * close.size:
        out[...] = _directly(x, y)
        return
    out[...] = found
    several = max(scratch // 4 // (8 * x.shape[1]), 1)
    for start in range(0, len(at), several):
        pairs = at[start : start + several], other[start : start + several]
        differences = np.subtract(x[pairs[0]], y[pairs[1]], dtype=float)
        out[pairs] = np.einsum("ij,ij->i", differences, differences)


def _directly(x: Array, y: Array) -> Array:
    """Squared distances from the differences themselves: SciPy's loop, else one coordinate after the other."""
    try:
        from scipy.spatial.distance import cdist
    except ImportError:
        return _one_by_one(x, y)
    return cdist(x, y, "sqeuclidean")


def _one_by_one(x: Array, y: Array) -> Array:
    """Squared distances, one coordinate after the other.

    >>> _one_by_one(np.array([[0.0, 3.0]]), np.array([[4.0, 0.0]]))
    array([[25.]])
    """
    total = np.zeros((len(x), len(y)))
    for a, b in zip(x.T, y.T):
        difference = np.subtract.outer(a.astype(float), b.astype(float))
        difference *= difference
        total += difference
    return total


def manhattan_distances(one: Array, two: Array, joined: str, dtype: str, scratch: int) -> Array | None:
    """Sums of absolute differences of each pair of rows, or None where SciPy does not give them."""
    if joined not in ERRORS or one.dtype.kind not in "fiub" or two.dtype.kind not in "fiub":
        return None
    try:
        from scipy.spatial.distance import cdist
    except ImportError:
        return None
    result = np.empty((len(one), one.shape[1], two.shape[1]), dtype)
    rows = max(scratch // 4 // (8 * max(two.shape[1:])), 1) if two.size else 1
    for x, y, out in zip(one, two, result):
        for start in range(0, len(x), rows):
            out[start : start + rows] = cdist(x[start : start + rows], y, "cityblock")
    return result


def ever_both(one: Array, two: Array, joined: str, dtype: str, scratch: int) -> Array:
    """Whether two rows are ever true at the same place: sums of ones, none of which is lost in single precision.

    >>> ever_both(np.array([[[1, 0]]]), np.array([[[0, 2], [3, 0]]]), "bool", "bool", 1 << 20)
    array([[[False,  True]]])
    """
    result = np.empty((len(one), one.shape[1], two.shape[1]), bool)
    for x, y, out in zip(one, two, result):
        right = (y != 0).astype(np.float32).T
        rows = max(scratch // 4 // (4 * max(right.shape)), 1) if right.size else len(x) or 1
        for start in range(0, len(x), rows):
            left = (x[start : start + rows] != 0).astype(np.float32)
            np.greater(left @ right, 0, out=out[start : start + rows])
    return result


PAIRWISE = {
    ("squared_difference", "sum"): squared_distances,
    ("absolute_difference", "sum"): manhattan_distances,
    ("logical_and", "any"): ever_both,
}
"""What there is, by names of join and aggregate.

Each takes points in rows, stacks of matrices (stack, m, k) and (stack, n, k), element types of joined values and of the
result, and bytes to work in; gives (stack, m, n), or None where it would not be right.
"""
BLAS = frozenset({("squared_difference", "sum"), ("logical_and", "any")})
"""Those that are as fast as products of matrices."""
