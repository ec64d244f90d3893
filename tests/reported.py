"""The gallery of reported cases: small programs that users of Dask, NumPy and their kin found wrong, slow or too large.

A case is written as its reporter wrote it, beside what NumPy gives and, where one is known, the best way to write it
by hand.  It is made where it is run: what delayed functions take is optimised when they are called.

>>> case = GALLERY["empty_chunks"]()
>>> case.tracker, wrong(case, dask.compute(*case.collections))
('dask PR#8375', '')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import dask
import dask.array as da
import numpy as np
import opt_einsum
from dask.base import collections_to_expr

__all__ = ["GALLERY", "Case", "lacking", "wrong"]


@dataclass(frozen=True, eq=False)
class Case:
    """Lazy collections, what they should hold, and what else is asked of them."""

    collections: tuple[Any, ...]
    """What is computed, together."""
    expected: tuple[Any, ...] = ()
    """What NumPy gives for each, in the element type that the lazy array declares."""
    better: tuple[da.Array, ...] = ()
    """The same as written by hand for few tasks and bytes; empty if nobody knows."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the hook must be told so that a plan has no more tasks and bytes than that."""
    rtol: float = 1e-9
    """Relative tolerance of double precision; single and half precision have 1e-4 and 5e-3 at least."""
    raises: type[Exception] | None = None
    """What is raised instead, since NumPy refuses, too."""
    message: str | None = None
    """Pattern of what the exception says."""
    check: Callable[[], str] | None = None
    """Says what is wrong once everything is computed; empty if nothing is."""
    name: str = ""
    """The key in the gallery."""
    tracker: str = ""
    """Where it was reported."""


GALLERY: dict[str, Callable[[], Case]] = {}
"""How to make each case, by name."""
NEEDS: dict[str, tuple[str, ...]] = {}
"""Optional packages that a case needs, by its name."""


def reported(
    tracker: str = "", needs: tuple[str, ...] = ()
) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Put a function that makes a case into the gallery."""

    def enter(make: Callable[[], Case]) -> Callable[[], Case]:
        @wraps(make)
        def made() -> Case:
            return replace(make(), name=make.__name__, tracker=tracker)

        GALLERY[make.__name__], NEEDS[make.__name__] = made, needs
        return made

    return enter


def lacking(name: str) -> tuple[str, ...]:
    """Packages that a case needs and that are not installed."""
    return tuple(package for package in NEEDS[name] if find_spec(package) is None)


def wrong(case: Case, results: tuple[Any, ...]) -> str:
    """How results differ from what a case expects, in values, shapes, masks or element types; empty if they do not."""
    for number, (lazy, result, expected) in enumerate(
        zip(case.collections, results, case.expected, strict=True)
    ):
        if problem := _differs(lazy, result, expected, case.rtol):
            return f"result {number}: {problem}"
    return case.check() if case.check else ""


def _differs(lazy: Any, result: Any, expected: Any, rtol: float) -> str:
    if hasattr(result, "todense"):
        result = result.todense()
    result, expected = np.ma.asanyarray(result), np.ma.asanyarray(expected)
    declared = lazy.dtype if isinstance(lazy, da.Array) else result.dtype
    if not result.dtype == expected.dtype == declared:
        return f"dtype {result.dtype}, declared {declared}, expected {expected.dtype}"
    if result.shape != expected.shape:
        return f"shape {result.shape}, expected {expected.shape}"
    if not np.array_equal(np.ma.getmaskarray(result), np.ma.getmaskarray(expected)):
        return "another mask"
    result, expected = result.filled(0), expected.filled(0)
    if expected.dtype.kind not in "fc":
        return "" if np.array_equal(result, expected) else "other values"
    rtol = max(rtol, {"float16": 5e-3, "float32": 1e-4}.get(expected.dtype.name, 0))
    close = np.allclose(result, expected, rtol=rtol, atol=rtol / 100, equal_nan=True)
    return "" if close else "other values"


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape)


cut = da.from_array


# element types


@reported("dask/dask#11985")
def boolean_tensordot() -> Case:
    a, b = np.ones((4, 6), bool), np.ones((6, 2), bool)
    lazy = da.tensordot(cut(a, (2, 3)), cut(b, (3, 1)), axes=1)
    return Case((lazy,), (np.tensordot(a.astype(lazy.dtype), b.astype(lazy.dtype), axes=1),))


@reported("numpy/numpy#22484, dask/dask#5162")
def narrow_integers() -> Case:
    a, b = (np.random.default_rng(0).integers(0, 100, shape).astype("i1") for shape in ((3, 40), (40, 2)))
    A, B = cut(a, (3, 10)), cut(b, (10, 2))
    lazy = A @ B, da.tensordot(A, B, 1), da.einsum("ij,jk->ik", A, B), da.dot(A, B)
    return Case(lazy, tuple(a.astype(one.dtype) @ b.astype(one.dtype) for one in lazy))


@reported("numpy/numpy#21012")
def detector_mask() -> Case:
    """Sums under a mask that do not fit into the detector's 16 bits."""
    stack, mask = np.full((3, 2, 8, 8), 60000, "u2"), np.zeros((8, 8), bool)
    mask[2:6, 2:6] = True
    lazy = da.einsum("abxy,xy->ab", cut(stack, (1, 2, 4, 4)), cut(mask, 4), dtype="u8")
    return Case((lazy,), (np.full((3, 2), 16 * 60000, "u8"),))


@reported("numpy/numpy#11060")
def element_type_beside_a_path() -> Case:
    a, b = numbers(6, 4).astype("f4"), numbers(4, 5).astype("f4")
    A, B = cut(a, (3, 2)), cut(b, (2, 5))
    wide = da.einsum("ij,jk->ik", A, B, dtype="f8", optimize=True)
    narrow = da.einsum("ij,jk->ik", A.astype("f8"), B.astype("f8"), dtype="f4", casting="same_kind")
    return Case((wide, narrow), (np.matmul(a, b, dtype="f8"), a @ b))


@reported("numpy/numpy#22208, numpy/numpy#7933")
def half_precision() -> Case:
    """Sums of 6,000 ones, which stall at 2,048 in half precision."""
    a = cut(np.ones((2, 6000), "f2"), (2, 500))
    sums = np.full((2, 2), 6000, "f2")
    return Case((a @ a.T, da.einsum("ik,jk->ij", a, a), a.mean(1)), (sums, sums, np.ones(2, "f2")))


@reported("dask PR#3662")
def fractions() -> Case:
    a = np.array([[Fraction(i, j) for j in range(2, 6)] for i in range(1, 5)], object)
    A = cut(a, 2)
    return Case((A @ A, da.tensordot(A, A, 1), da.einsum("ij,jk->ik", A, A)), (a @ a,) * 3)


@reported("pydata/xarray#4482")
def nan_and_infinity() -> Case:
    a = np.arange(20.0).reshape(4, 5)
    b = a.T.copy()
    a[0, 1], a[2, 4], b[0, 0], b[4, 3] = np.nan, np.inf, np.inf, 0
    A, B = cut(a, (3, 2)), cut(b, (2, 3))
    with np.errstate(invalid="ignore"):
        product, skipping = a @ b, np.nansum(a[:, :, None] * b, 1)
    skipped = da.nansum(A[:, :, None] * B[None], 1)
    return Case((A @ B, da.einsum("ij,jk->ik", A, B), skipped), (product, product, skipping))


# ways to write a contraction


@reported("dask/dask#5472, dask PR#2186")
def axes_of_tensordot() -> Case:
    p, q, s = numbers(2, 3, 4), numbers(4, 3, 5, seed=1), numbers(3, 4, 5, seed=2)
    P, Q, S = cut(p, (1, 2, 2)), cut(q, (2, 2, 3)), cut(s, (2, 3, 5))
    pair = np.array([1, 2]), np.array([1, 0])
    forms: tuple[Any, ...] = (1, 0, ([2, 1], [0, 1]), (2, 0), ((1, 2), (1, 0)), ([], []), pair)
    lazy = (da.tensordot(P, S, 2), *(da.tensordot(P, Q, axes) for axes in forms))
    return Case(lazy, (np.tensordot(p, s, 2), *(np.tensordot(p, q, axes) for axes in forms)))


@reported("dask/dask#8131")
def itself_through_where() -> Case:
    x = numbers(5, 3)
    lazy = cut(x, ((2, 3), (3,)))
    same = da.where(lazy > 99, lazy, lazy)
    return Case((da.einsum("pk,qk->pq", same, same), same @ same.T), (x @ x.T,) * 2)


@reported("dask/dask#8535")
def products_with_itself() -> Case:
    x = np.arange(12.0).reshape(4, 3)
    X = cut(x, 2) * 2
    gram, expected = X @ X.T, 4 * x @ x.T
    lazy = gram, da.einsum("ij,jk,kl->il", gram, gram, gram), (gram + gram.T) @ gram, da.tensordot(X, X, 2)
    square = expected @ expected
    return Case(lazy, (expected, square @ expected, 2 * square, 4 * (x**2).sum()))


@reported("dask/dask#8948")
def one_against_four() -> Case:
    """Contracted extents that differ, one of which is 1."""
    lazy = cut(np.ones((2, 4)), (2, 1)) @ cut(np.ones((1, 5)), (1, 5))
    return Case((lazy,), raises=ValueError, message=r"\b4\b.*\b1\b")


@reported("numpy PR#30700")
def axis_contracted_twice() -> Case:
    a, b = cut(np.ones((2, 3)), (1, 3)), cut(np.ones((3, 2)), (3, 1))
    return Case((da.tensordot(a, b, axes=([1, 1], [0, 0])),), raises=ValueError, message="twice")


@reported("numpy/numpy#5667")
def two_diagonals() -> Case:
    x, y = numbers(4, 3, 3, 2, 2), numbers(4, 2, seed=1)
    X, Y = cut(x, (3, 2, 2, 1, 1)), cut(y, (2, 1))
    diagonals = x[:, range(3), range(3)][:, :, range(2), range(2)]
    lazy = da.einsum("tiijj->ij", X), da.einsum("tiijj,tj->i", X, Y)
    return Case(lazy, (diagonals.sum(0), (diagonals * y[:, None]).sum((0, 2))))


@reported("dgasmith/opt_einsum#22, cupy/cupy#1214, numpy/numpy#11548")
def extents_of_one() -> Case:
    """An axis of 1 stands for one of any extent, contracted or not."""
    a, b, c = numbers(6, 1), numbers(4, 5, seed=1), numbers(6, 4, seed=2)
    A, B = cut(a, (3, 1)), cut(b, (2, 5))
    lazy = (
        da.einsum("ij,jk->ik", A, B),
        da.einsum("ij,ij->ij", A, cut(c, 2)),
        da.einsum("i,i", cut(a[:, 0], 4), cut(b[0, :1], 1)),
    )
    return Case(lazy, (a * b.sum(0), a * c, a.sum() * b[0, 0]))


@reported("numpy PR#30568")
def dropped_ellipsis() -> Case:
    x = numbers(3, 5, 4)
    return Case((da.einsum("i...->i", cut(x, (2, 2, 3))),), (x.sum((1, 2)),))


@reported("dask PR#3412, numpy/numpy#7741, numpy/numpy#11938")
def numbers_as_labels() -> Case:
    """A chain of 31 labels, of which NumPy 1 takes no more than 32, and labels in and out of order."""
    chain = [numbers(2, 2, seed=seed) for seed in range(30)]
    operands: list[Any] = []
    for place, matrix in enumerate(chain):
        operands += [cut(matrix, {0: (1, 2), 1: (2, 1)}.get(place, 2)), [place, place + 1]]
    a, b = numbers(6, 4), numbers(4, 5)
    A = cut(a, (3, 2))
    lazy = (
        da.einsum(*operands, [0, 30], optimize=True),
        da.einsum(A, [1, 0], cut(b, (2, 5)), [0, 2]),
        da.einsum("ba", A),
    )
    return Case(lazy, (np.linalg.multi_dot(chain), a @ b, a.T), rtol=1e-7)


@reported("dask PR#2349")
def dot_and_matmul() -> Case:
    a, b = numbers(3, 4, 5), numbers(3, 5, 2, seed=1)
    A, B = cut(a, (2, 2, 3)), cut(b, (1, 3, 2))
    lazy = da.dot(A, B), A @ B, da.outer(A[0, 0], B[0, :, 0]), da.einsum("bij->bji", A)
    return Case(lazy, (np.dot(a, b), a @ b, np.outer(a[0, 0], b[0, :, 0]), a.swapaxes(1, 2)))


@reported("dask PR#3412, dask-glm PR#86")
def operands_in_memory() -> Case:
    a, b = numbers(6, 4), numbers(4, 5, seed=1)
    A, B = cut(a, (3, 2)), cut(b, (2, 5))
    lazy = A @ b, a @ B, A @ b.tolist(), np.dot(A, b), np.einsum("ij,jk->ik", a, B), np.tensordot(A, b, 1)
    return Case(lazy, (a @ b,) * 6)


@reported("dgasmith/opt_einsum#146, xarray PR#2106")
def paths_and_orders() -> Case:
    a, b = numbers(6, 4), numbers(4, 5, seed=1)
    A, B = cut(a, (3, 2)), cut(b, (2, 5))
    paths = True, False, "greedy", "optimal", ["einsum_path", (0, 1), (0, 1)], ("greedy", 100)
    lazy = [da.einsum("ij,jk,kl->il", A, B, B.T, optimize=path) for path in paths]
    column_major = da.einsum("ij,jk->ik", A, B, order="F")
    return Case((*lazy, column_major), (*[a @ b @ b.T] * len(paths), a @ b))


@reported("dask/dask#3471")
def split_every() -> Case:
    """How many partial sums are added up at a time is the user's to say."""
    x, w = numbers(5, 400), numbers(400, seed=1)
    X, W = cut(x, (5, 10)), cut(w, 10)
    return Case(tuple(da.einsum("ab,b->a", X, W, split_every=most) for most in (2, 40)), (x @ w,) * 2)


if hasattr(np, "vecdot"):  # since NumPy 2

    @reported("cubed-dev/cubed#30, data-apis/array-api-extra#134")
    def inner_products_of_rows() -> Case:
        """In one chunk along the rows, since Dask takes no other."""
        x = numbers(6, 4)
        X = cut(x, (3, 4))
        return Case((np.vecdot(X, X),), ((x**2).sum(1),))


# blocks unlike others


@reported("dask PR#11488")
def empty_operands() -> Case:
    e, f, g, b = np.ones((6, 0)), np.ones((0, 5)), np.ones((0, 4)), np.ones((4, 5))
    E, F, G, B = cut(e, (3, 0)), cut(f, (0, 5)), cut(g, (0, 2)), cut(b, (2, 5))
    lazy = da.einsum("ij,jk->ik", E, F), E @ F, da.tensordot(G, B, 1), da.einsum("ij,jk->ik", G, B)
    return Case(lazy, (*[np.zeros((6, 5))] * 2, *[np.zeros((0, 5))] * 2))


@reported("dask PR#8375")
def empty_chunks() -> Case:
    a, b = numbers(6, 4), numbers(4, 5, seed=1)
    A, B = cut(a, ((3, 0, 3), (2, 0, 2))), cut(b, ((2, 0, 2), (5,)))
    lazy = A @ B, da.einsum("ij,jk->ik", A, B), da.tensordot(A, B, 1), (A[:, :, None] * B[None]).sum(1)
    return Case(lazy, (a @ b,) * 4)


@reported("dask PR#1838, dask/dask#3584")
def unknown_rows() -> Case:
    """Rows chosen by their values, as many as there are."""
    x = numbers(12, 4)
    X = cut(x, (4, 2))
    X, x = X[X[:, 0] > 0.3], x[x[:, 0] > 0.3]
    lazy = X.T @ X, da.einsum("ki,kj->ij", X, X), da.tensordot(X, X, ([0], [0])), X @ cut(np.eye(4), 2)
    return Case(lazy, (*[x.T @ x] * 3, x))


@reported("dask PR#2301, dask/dask#1928")
def masked_dot() -> Case:
    a, b = np.ma.masked_greater(numbers(6, 4), 0.6), numbers(4, 5, seed=1)
    a[1] = np.ma.masked
    return Case((da.dot(cut(a, (3, 2)), cut(b, (2, 5))),), (np.ma.dot(a, b),))


@reported("neurostuff/PyMARE#44, astropy PR#16725")
def masked_sums_of_products() -> Case:
    a, b = np.ma.masked_greater(numbers(6, 4), 0.6), numbers(4, 6, seed=1)
    A, B = cut(a, (3, 2)), cut(b, (2, 3))
    lazy = (A * A).sum(1), (A[:, :, None] * B[None]).sum(1)
    return Case(lazy, ((a * a).sum(1), (a[:, :, None] * b).sum(1)))


@reported("pydata/xarray#9934", needs=("sparse", "xarray"))
def product_with_sparse() -> Case:
    """A Dask vector times a sparse matrix; the other way round opt_einsum refuses before there is a graph."""
    sparse, xarray = import_module("sparse"), import_module("xarray")
    matrix, vector = np.diag([1.0, 0, 3, 0]) + np.eye(4, k=1), np.array([2.0, 1, 4, 3])
    columns = xarray.DataArray(sparse.COO.from_numpy(matrix), dims=("row", "column"))
    return Case(((xarray.DataArray(cut(vector, 2), dims="column") @ columns).data,), (matrix @ vector,))


@reported("pydata/sparse#589", needs=("sparse",))
def sparse_weights() -> Case:
    x, weights = numbers(6, 4), np.eye(6)[2] + np.eye(6)[5]
    blocks = cut(import_module("sparse").COO.from_numpy(weights), chunks=2, asarray=False)
    return Case((np.einsum("rc,r->c", cut(x, (2, 4)), blocks),), (weights @ x,))


@reported("dask/dask#7126, dask/dask#4898, xarray-contrib/xarray-spatial#2525")
def types_of_blocks() -> Case:
    """Blocks are of the type that the lazy array declares."""
    a = numbers(6, 6).astype("f4")
    A = cut(a, 3)
    lazy = A @ A, da.einsum("ij,jk->ik", A, A), da.tensordot(A, A, 1), (A * A).sum(0)

    def others() -> str:
        kept = dask.persist(*lazy, scheduler="synchronous")
        strange = {type(block) for one in kept for block in dict(one.dask).values()} - {np.ndarray}
        return f"blocks of {strange}" if strange else ""

    return Case(lazy, (*[a @ a] * 3, (a * a).sum(0)), check=others)


# more tasks, bytes or memory than it takes


@reported("dask/dask#10053, dask PR#11464")
def outer_product_of_tensors() -> Case:
    a = numbers(16, 4, 4, 4, 4)
    A = cut(a, (4, 2, 2, 2, 2))
    whole = A.rechunk({0: -1})
    better = da.tensordot(whole, whole, ([0], [0]))
    expected = np.tensordot(a, a, ([0], [0]))
    return Case((da.einsum("zabcd,zefgh->abcdefgh", A, A),), (expected,), better=(better,))


@reported("dask/dask#9502")
def trace_of_a_product_of_tensors() -> Case:
    t = numbers(*(2,) * 8)
    T, whole = cut(t, 1), cut(t, 2)
    product = da.einsum("pqrsabcd,tuvwbadc->ptqurvsw", T, T)
    better = da.einsum("pqrsabcd,pqrsbadc->", whole, whole)
    trace = (t * t.transpose(0, 1, 2, 3, 5, 4, 7, 6)).sum()
    return Case((da.einsum("xxyyzzww", product),), (trace,), better=(better,))


@reported("dask/dask#2225, dask PR#7950, dask/dask#3587")
def many_chunks_inside() -> Case:
    x, y = numbers(60, 60, 60), numbers(60, 20, seed=1)
    X, Y = cut(x, 10), cut(y, 10)
    better = da.tensordot(X.rechunk((20, 60, 20)), Y.rechunk(-1), ([1], [0]))
    return Case((da.tensordot(X, Y, ([1], [0])),), (np.tensordot(x, y, ([1], [0])),), better=(better,))


@reported("dask/dask#6874, dask/dask#3732, dask/dask#3776")
def square_product() -> Case:
    """Partial products pile up although operands and result fit."""
    a = numbers(320, 320)
    A = cut(a, 40)
    better = A.rechunk((80, -1)) @ (A * 2).rechunk((-1, 80))
    return Case((A @ (A * 2),), (2 * a @ a,), better=(better,))


@reported("pangeo-data/pangeo#756")
def stores_with_other_chunks() -> Case:
    """Weights in many small chunks, data in few large ones, cut elsewhere."""
    w, v = numbers(220, 120), numbers(120, 3000, seed=1)
    W, V = cut(w, (20, 7)), cut(v, (50, 600))
    return Case((da.dot(W, V),), (w @ v,), better=(da.dot(W.rechunk((220, 50)), V),))


@reported("pydata/xarray#8017, pydata/xarray#7764")
def four_operands() -> Case:
    a, b, c, d = (numbers(30, 8, seed=seed) for seed in range(4))
    A, B, C, D = (cut(one, (10, 4)) for one in (a, b, c, d))
    better = da.einsum("ad,bc->abcd", da.einsum("xa,xd->ad", A, D), da.einsum("yb,yc->bc", B, C))
    expected = np.multiply.outer(a.T @ d, b.T @ c).transpose(0, 2, 3, 1)
    return Case((da.einsum("xa,yb,yc,xd->abcd", A, B, C, D),), (expected,), better=(better,))


@reported("jcmgray/cotengra#10, dgasmith/opt_einsum#6")
def chain_in_one_einsum() -> Case:
    a = numbers(96, 96)
    A = cut(a, 16)
    return Case((da.einsum("ij,jk,kl->il", A, A, A, optimize=True),), (a @ a @ a,), better=(A @ A @ A,))


@reported("nv-legate/cupynumeric#1070")
def weighted_gram() -> Case:
    x, w = numbers(4000, 20), numbers(4000, seed=1)
    X, W = cut(x, (200, 10)), cut(w, 500)
    rows, scaled = X.rechunk({1: -1}) * W.rechunk(200)[:, None], x * w[:, None]
    return Case(
        (da.einsum("ni,n,nj,n->ij", X, W, X, W),),
        (scaled.T @ scaled,),
        better=(rows.T @ rows,),
        settings={"objective": "bytes"},
    )


@reported("dask/dask#4763, dask/dask#7711")
def plus_its_transpose() -> Case:
    """Strips of columns and strips of rows meet in slivers."""
    a = numbers(96, 96)
    A = cut(a, (96, 4))
    squares = A.rechunk(24)
    return Case((A + A.T,), (a + a.T,), better=(squares + squares.T,), settings={"force": True})


@reported("sgkit-dev/sgkit#375, sgkit PR#447")
def distances_by_broadcasting() -> Case:
    p = numbers(300, 24)
    P = cut(p, (100, 8))
    lazy = ((P[:, None, :] - P[None, :, :]) ** 2).sum(-1)
    return Case((lazy,), (np.stack([((p - row) ** 2).sum(1) for row in p]),))


@reported("dask/dask#5859")
def two_reductions_of_one_product() -> Case:
    """Together they hold what either alone need not."""
    x = numbers(24, 16, 16)
    X = cut(x, (8, 16, 16))
    products, expected = ((one[:, None] * one[None]).reshape(24, 24, 256) for one in (X, x))
    return Case((da.argmax(products, -1), products.max(-1)), (expected.argmax(-1), expected.max(-1)))


@reported("dask/dask#874, dask/dask#5359")
def centred_in_two_passes() -> Case:
    b = numbers(32, 60, 60)
    B = cut(b, (2, 60, 60)).map_blocks(np.positive, dtype=float)
    return Case((abs(B - B.mean(0)).mean(),), (abs(b - b.mean(0)).mean(),))


@reported("pydata/xarray#6709, pangeo-data/distributed-array-examples#2")
def quadratic_means() -> Case:
    u, v = numbers(200, 4, 50), numbers(200, 4, 50, seed=1)
    U, V = cut(u, (10, 4, 50)), cut(v, (10, 4, 50))
    means = (U**2).mean(0), (V**2).mean(0), (U * V).mean(0)
    return Case(means, ((u**2).mean(0), (v**2).mean(0), (u * v).mean(0)))


@reported("dask/distributed#2602")
def anomalies_from_group_means() -> Case:
    x, one_hot = numbers(120, 40), np.eye(6)[np.arange(120) % 6]
    X, H = cut(x, (10, 40)), cut(one_hot, (10, 6))
    means, expected = H.T @ X / 20, x.reshape(20, 6, 40).mean(0)
    anomalies = abs(x.reshape(20, 6, 40) - expected).mean((0, 1))
    return Case((means, abs(X - H @ means).mean(0)), (expected, anomalies))


@reported("sgkit-dev/sgkit#390")
def residuals_of_a_projection() -> Case:
    x, c = numbers(600, 300), numbers(600, 6, seed=1)
    X, C = cut(x, (100, 60)), cut(c, (600, 6))
    residuals = X - C @ (np.linalg.inv(c.T @ c) @ (C.T @ X))
    expected = x - c @ np.linalg.lstsq(c, x, rcond=None)[0]
    return Case((residuals, (residuals**2).sum(0)), (expected, (expected**2).sum(0)), rtol=1e-7)


@reported("dask/dask#3419, dask PR#5041, dask/dask-ml#604")
def compressed_svd() -> Case:
    x = numbers(400, 8) @ numbers(8, 40, seed=1)
    u, s, v = da.linalg.svd_compressed(cut(x, (50, 40)), 8, n_power_iter=2, seed=0)
    return Case((s, (u * s) @ v), (np.linalg.svd(x, compute_uv=False)[:8], x), rtol=1e-6)


@reported("rapidsai/dask-cuda#1162")
def correlations_of_many_rows() -> Case:
    x = numbers(300, 24)
    X = cut(x, (60, 24))
    return Case((da.corrcoef(X), da.cov(X.T)), (np.corrcoef(x), np.cov(x.T)), rtol=1e-7)


@reported("dask/distributed#8326")
def corner_of_a_product() -> Case:
    """A corner takes less than a quarter of the tasks of the whole."""
    a = numbers(80, 80)
    A = cut(a, 10)
    product = A @ A
    corner = product[:5, :5]

    def not_culled() -> str:
        part, whole = (len(dict(dask.optimize(one)[0].dask)) for one in (corner, product))
        return f"{part} of {whole} tasks" if 4 * part >= whole else ""

    return Case((corner,), ((a @ a)[:5, :5],), check=not_culled)


@reported()
def chain_with_a_vector() -> Case:
    a, v = numbers(240, 240), numbers(240, 1, seed=1)
    A, V = cut(a, 40), cut(v, (40, 1))
    return Case(((A @ A) @ V,), (a @ (a @ v),), better=(A @ (A @ V),), settings={"reassociate": True})


@reported("dask/dask#7124")
def growing_outer_products() -> Case:
    a = numbers(1000)
    A = cut(a, 500)
    lazy = da.outer(A, A), A[:, None] * A[None], da.tensordot(A, A, 0), da.einsum("i,j->ij", A, A)
    return Case(lazy, (np.outer(a, a),) * 4)


@reported("pydata/xarray#3883, xarray PR#2922, pydata/xarray#4482", needs=("xarray",))
def weighted_mean_without_nan() -> Case:
    xarray = import_module("xarray")
    x, w = numbers(60, 40), numbers(60, seed=1)
    x[x < 0.2] = np.nan
    values = xarray.DataArray(cut(x, (15, 20)), dims=("time", "place"))
    lazy = values.weighted(xarray.DataArray(cut(w, 20), dims="time")).mean("time")
    masked = np.ma.masked_invalid(x)
    return Case((lazy.data,), (np.ma.average(masked, axis=0, weights=w).filled(),))


@reported("numpy/numpy#11825, dask/dask#3795")
def four_index_transform() -> Case:
    t, c = numbers(8, 8, 8, 8), numbers(8, 8, seed=1)
    subscripts, C = "pi,qj,ijkl,rk,sl->pqrs", cut(c, 4)
    operands = C, C, cut(t, 4), C, C
    expected = t
    for _ in range(4):
        expected = np.tensordot(expected, c, (0, 1))  # the first axis, transformed, goes last
    better = opt_einsum.contract(subscripts, *operands)
    return Case((da.einsum(subscripts, *operands),), (expected,), better=(better,))


@reported("sgkit-dev/sgkit#1333, sgkit-dev/sgkit#1213")
def factor_of_rank_one() -> Case:
    k, p = numbers(300, 300), numbers(300, seed=1)
    K, P = cut(k, 60), cut(p, 60)
    lazy = K * (p[:, None] * p[None]), (K * (P[:, None] * P[None])).sum(0)
    expected = k * np.outer(p, p)
    return Case(
        lazy,
        (expected, expected.sum(0)),
        better=(K * P[:, None] * P[None], (P @ K) * P),
        settings={"force": True},
    )


@reported("dask-ml PR#152")
def vector_by_broadcasting() -> Case:
    b, v, w = numbers(50, 4000), numbers(4000, seed=1), numbers(50, seed=2)
    B = cut(b, (50, 500))
    return Case(
        ((B * v).sum(1), (w[:, None] * B).sum(0)), (b @ v, w @ b), better=(B @ cut(v, 500), cut(w, 50) @ B)
    )


@reported("dask PR#822, dask PR#8423")
def stacked_products() -> Case:
    a, b = numbers(8, 40, 60), numbers(8, 60, 40, seed=1)
    A, B = cut(a, (2, 10, 15)), cut(b, (2, 15, 10))
    better = A.rechunk((1, -1, -1)) @ B.rechunk((1, -1, -1))
    return Case((A @ B,), (a @ b,), better=(better,))


# what surrounds the arrays


@reported("dask/dask#7036, dask/dask#10325, dask PR#9402")
def annotations() -> Case:
    """All that is to run on a GPU says so when it is optimised."""
    a = numbers(6, 6)
    A = cut(a, 3)
    with dask.annotate(resources={"GPU": 1}):
        product = A @ A

    def lost() -> str:
        graph = collections_to_expr(product)
        tasks = graph.__dask_graph__().keys() - A.dask.keys()
        bare = tasks - graph.__dask_annotations__().get("resources", {}).keys()
        return f"{len(bare)} of {len(tasks)} tasks without resources" if bare else ""

    return Case((product,), (a @ a,), check=lost)


def counted() -> tuple[Callable[[Any], Any], list[int]]:
    """A function that gives what it takes, and a list as long as it was called often."""
    calls: list[int] = []

    def read(block: Any) -> Any:
        calls.append(len(calls))
        return block

    return read, calls


@reported("dask/dask#12318, dask/dask#11854, dask/dask#12062")
def two_sinks_of_one_source() -> Case:
    """Delayed functions optimise what they take one by one, so that the source is read once for each, but not more."""
    x = np.arange(36.0).reshape(6, 6)
    read, calls = counted()
    source = da.from_delayed(dask.delayed(read, pure=True)(x), x.shape, x.dtype)
    sinks = dask.delayed(np.sum)(source @ source), dask.delayed(np.max)(source + 1)

    def more() -> str:
        return f"read {len(calls)} times for 2 sinks" if len(calls) > 2 else ""

    return Case(sinks, ((x @ x).sum(), 36.0), check=more)


@reported("dask/dask#12318, dask/dask#11854, dask/dask#12062")
def two_arrays_of_one_source() -> Case:
    x = np.arange(36.0).reshape(6, 6)
    read, calls = counted()
    source = da.from_delayed(dask.delayed(read, pure=True)(x), x.shape, x.dtype)

    def more() -> str:
        return f"read {len(calls)} times" if len(calls) != 1 else ""

    return Case((source @ source, source + 1), (x @ x, x + 1), check=more)


@reported("dask PR#9732, dask PR#11859")
def shared_by_several_results() -> Case:
    x = np.arange(36.0).reshape(6, 6)
    read, calls = counted()
    X = cut(x, 3).map_blocks(read, dtype=float, meta=np.empty((0, 0)))
    product = X @ X

    def more() -> str:
        return f"4 blocks read {len(calls)} times" if len(calls) != 4 else ""

    lazy = product, product.sum(), product.max(0), X.sum()
    return Case(lazy, (x @ x, (x @ x).sum(), (x @ x).max(0), x.sum()), check=more)


@reported("dask PR#903, distributed PR#587")
def promised_blocks() -> Case:
    """Persisted, delayed or mapped, blocks have the keys and shapes that were promised."""
    a = numbers(10, 7)
    A, expected = cut(a, (3, 2)), a.T @ a
    gram = A.T @ A
    sums = gram.map_blocks(lambda block: block.sum(keepdims=True), chunks=(1, 1), dtype=float)
    edges = range(0, 7, 2)

    def broken() -> str:
        kept = gram.persist(scheduler="synchronous")
        if kept.__dask_keys__() != gram.__dask_keys__():
            return "other keys"
        blocks = {key[1:]: block.shape for key, block in dict(kept.dask).items()}
        promised = {
            place: tuple(chunks[i] for chunks, i in zip(gram.chunks, place))
            for place in np.ndindex(*gram.numblocks)
        }
        return "" if blocks == promised else f"blocks of {blocks}"

    corner = gram.to_delayed()[0, 3]
    blockwise = np.add.reduceat(np.add.reduceat(expected, edges, 0), edges, 1)
    return Case((gram, sums, corner), (expected, blockwise, expected[:2, 6:]), check=broken)


@reported("dask/dask#7587, dask/dask#6219")
def delayed_on_both_sides() -> Case:
    x = np.arange(24.0).reshape(4, 6)
    half = dask.delayed(lambda i: x[:, 3 * i : 3 * i + 3])
    X = da.concatenate([da.from_delayed(half(i), (4, 3), float) for i in range(2)], 1)
    return Case((dask.delayed(np.trace)(X @ X.T), X @ X.T), ((x**2).sum(), x @ x.T))


@reported()
def shared_product() -> Case:
    shapes = (40, 6), (6, 40), (40, 4), (40, 3)
    a, b, c, d = (numbers(*shape, seed=seed) for seed, shape in enumerate(shapes))
    A, B, C, D = (cut(one, tuple(extent // 2 for extent in one.shape)) for one in (a, b, c, d))
    product = opt_einsum.contract("ij,jk->ik", A, B)
    lazy = opt_einsum.contract("ik,km->im", product, C), opt_einsum.contract("ik,kn->in", product, D)
    return Case((*lazy, product.sum()), (a @ b @ c, a @ b @ d, (a @ b).sum()))


@reported("dask/dask#874")
def random_sources() -> Case:
    """Random numbers stay the same whoever reads them, in whatever chunks."""
    R = da.random.default_rng(7).random((24, 24), chunks=6)
    r = R.compute(scheduler="synchronous", optimize_graph=False)
    return Case((R @ R, da.einsum("ij,kj->ik", R, R), R.sum(0)), (r @ r, r @ r.T, r.sum(0)))
