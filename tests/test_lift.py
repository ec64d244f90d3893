"""Whatever is lifted gives what NumPy gives for any partition of every expression; whatever is not stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.core import flatten
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dask_eindecomp import EinDecomp, Topology
from dask_eindecomp.contract import contract
from dask_eindecomp.estimate import price
from dask_eindecomp.hook import apply
from dask_eindecomp.lift import Lifted, ShapeError, lift
from dask_eindecomp.partition import Cut, Partition

FLOATS = "float32 float64 complex128"
PLAIN = "int64 " + FLOATS
REAL = "int64 float32 float64"
EXACT = "bool int8 uint8 int32 int64 "
PRODUCTS = EXACT + "float16 " + FLOATS
TOLERANCE = {"float16": 2e-2, "float32": 1e-4, "complex64": 1e-4}


# drawing inputs and plans


def cuts(extent: int) -> st.SearchStrategy[Cut]:
    """Any way to cut an axis, most often not a balanced one."""
    edges = st.sets(st.integers(1, extent - 1), max_size=3) if extent > 1 else st.just(set())
    return edges.map(lambda found: tuple(int(n) for n in np.diff([0, *sorted(found), extent])))


def values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Few distinct small values, so that sums of products are exact in every type but float16."""
    rng = np.random.default_rng(seed + sum(shape))
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.random(shape) < 0.4
    whole = rng.integers(0 if kind == "u" else -3, 4, shape)
    return (whole + 1j * rng.integers(-3, 4, shape) if kind == "c" else whole).astype(dtype)


def as_dask(draw: Any, array: np.ndarray, axes: str = "") -> da.Array:
    """A Dask array cut at random; axes of one letter alike, for Dask cannot write out a diagonal of others."""
    found: dict[str, Cut] = {}
    names = axes or "abcdefgh"[: array.ndim]
    for axis, extent in zip(names, array.shape):
        found[axis] = found[axis] if axis in found else draw(cuts(extent))
    return da.from_array(array, chunks=tuple(found[axis] for axis in names))


class AnyPlan:
    """An optimiser that cuts every expression as it is told to."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Cut]], Cut]) -> None:
        self.draw = draw

    def __call__(self, dsk: Any, keys: Any, **_: Any) -> Any:
        lifted = lift(dsk, keys)
        graph = contract(lifted.graph)
        partitions = {
            node.name: Partition(tuple((label, self.draw(cuts(extent))) for label, extent in node.extents))
            for node in graph.nodes.values()
        }
        plan = price(graph, partitions, Topology(workers=3))
        return apply(dsk, keys, lifted, graph, plan)


def lifted(*arrays: Any) -> Lifted:
    graph = da.core.HighLevelGraph.merge(*(array.dask for array in arrays))
    return lift(graph, [array.__dask_keys__() for array in arrays])


def same(result: Any, expected: Any, dtype: Any) -> None:
    """Results are equal: exactly for whole numbers, up to rounding else."""
    expected = np.asarray(expected)
    assert result.shape == expected.shape
    assert result.dtype == dtype
    if np.dtype(dtype).kind in "biu":
        np.testing.assert_array_equal(result, expected)
    else:
        off = max(TOLERANCE.get(np.dtype(one).name, 1e-10) for one in (dtype, expected.dtype))
        np.testing.assert_allclose(result, expected, rtol=off, atol=off)


def any_plan_gives(draw: Any, array: da.Array, expected: Any) -> None:
    """Any plan gives the expected values under the keys, in the chunks and of the types Dask promises."""
    keys = list(flatten(array.__dask_keys__()))
    with dask.config.set(array_optimize=AnyPlan(draw), scheduler="synchronous"):
        result = array.compute()
        persisted = array.persist()
    same(result, expected, array.dtype)
    try:
        plain = array.compute(scheduler="synchronous", optimize_graph=False)
    except ValueError:  # plain Dask cannot write out a diagonal whose two axes are cut differently
        plain = expected
    assert type(result) is type(plain)
    assert persisted.name == array.name and persisted.chunks == array.chunks
    assert set(persisted.dask) == set(keys)
    blocks = dict(persisted.dask)
    shapes = list(np.ndindex(*array.numblocks))
    for key, index in zip(keys, shapes):
        block = dask.get(blocks, key)
        assert block.shape == tuple(chunks[i] for chunks, i in zip(array.chunks, index))
        assert block.dtype == array.dtype
        assert isinstance(block, np.ndarray) or not block.shape
    same(persisted.compute(scheduler="synchronous"), expected, array.dtype)


# the operations


@dataclass(frozen=True)
class Case:
    """One operation, for NumPy and for Dask."""

    name: str
    """What the test is called."""
    shapes: str
    """Axes of each operand; a letter is any extent, a digit is that extent."""
    call: Callable[..., Any]
    """Takes ``numpy`` or ``dask.array``, and the operands."""
    dtypes: str = PLAIN
    """Element types to try."""
    reference: Callable[..., Any] | None = None
    """NumPy's way where it is another."""
    empty: bool = True
    """Whether extents may be 0."""


def einsum(subscripts: str, shapes: str | None = None, dtypes: str = PRODUCTS, **keywords: Any) -> Case:
    """A case of einsum; keywords that only Dask knows are kept from NumPy."""
    known = {name: value for name, value in keywords.items() if name != "split_every"}
    words = "".join(f" {name}={value}" for name, value in keywords.items())
    return Case(
        f"einsum {subscripts}{words}{' of ' + shapes if shapes else ''}",
        shapes or subscripts.partition("->")[0],
        lambda xp, *operands: xp.einsum(subscripts, *operands, **keywords),
        dtypes,
        lambda xp, *operands: xp.einsum(subscripts, *operands, **known),
    )


def tensordot(shapes: str, axes: Any) -> Case:
    return Case(
        f"tensordot {shapes} {axes}",
        shapes,
        lambda xp, a, b: xp.tensordot(a, b, axes=axes),
        "int64 " + FLOATS,
    )


def reduction(name: str, keywords: dict[str, Any], dtypes: str = REAL, **rest: Any) -> Case:
    known = {word: value for word, value in keywords.items() if word != "split_every"}
    return Case(
        f"{name} {keywords}",
        "ijk",
        lambda xp, a: getattr(xp, name)(a, **keywords),
        dtypes,
        lambda xp, a: getattr(xp, name)(a, **known),
        empty=False,
        **rest,
    )


EINSUMS = (
    *map(einsum, ("ij->ji", "ii->i", "ii->", "ii", "ij->j", "ij->", "iij->j", "i->i", "ijk->kij", "ba")),
    *map(
        einsum,
        (
            "ij,jk->ik", "ij,jk", "ij,jk->ki", "ij,ij->", "ij,ji->i", "i,j->ij", "ij,j->i", "i,i->", "ij,kl->",
            "bij,bjk->bik", "bshd,bthd->bhst", "ii,ij->j", "ij,i->", "ij,ij->ij", "ijk,kj->i", "iji,ij->j",
        ),
    ),
    *map(einsum, ("ij,jk,kl->il", "i,i,i->i", "ab,bc,cd->ad", "ij,j,k->ik", "ii,ij,jk->k", "i,j,k,l->lkji")),
    einsum("ijk,ia,jb,kc->abc", "22k,2a,2b,kc"),
    einsum("...ij,...jk->...ik", "bij,bjk"),
    einsum("...ij,...jk->...ik", "bij,1jk"),
    einsum("...ij,...jk->...ik", "aij,bajk"),
    einsum("...i->...", "abi"),
    einsum("...", "ab"),
    einsum("i...,i...", "iab,iab"),
    einsum("ij...,jk...->ik...", "ij,jkb"),
    einsum("i...i->...", "iabi"),
    einsum(",ij->ij", ",ij"),
    einsum("ij,jk->ik", "i1,jk"),
    einsum("ij,jk->ik", "ij,1k"),
    einsum("ij,ij->ij", "1j,i1"),
    einsum("ij,ij->j", "1j,ij"),
    einsum("ij,jk,k->i", "i1,jk,1"),
    einsum("ij,jk->ik", dtypes="int64 float32", dtype="float64"),
    einsum("ij,jk->ik", dtypes="int8 int32", dtype="int64"),
    einsum("ij,jk,kl->il", dtypes="float32", dtype="float64"),
    einsum("ij,jk->ik", dtypes="float64", dtype="float32", casting="same_kind"),
    einsum("ij,jk->ik", optimize=True),
    einsum("ij,jk->ik", optimize=False),
    einsum("ij,jk,kl->il", optimize="optimal"),
    einsum("ij,jk,kl->il", optimize="greedy"),
    einsum("ij,jk->ik", split_every=2),
    einsum("ij,ijk->", split_every=2),
    einsum("ij,ijk->k", split_every=5),
    Case("einsum lists", "ij,jk", lambda xp, a, b: xp.einsum(a, [0, 1], b, [1, 2], [0, 2]), PRODUCTS),
    Case("einsum lists without output", "ij,jk", lambda xp, a, b: xp.einsum(a, [0, 7], b, [7, 2])),
    Case(
        "einsum lists with ellipsis",
        "bij,bjk",
        lambda xp, a, b: xp.einsum(a, [..., 0, 1], b, [..., 1, 2], [..., 0, 2]),
    ),
    Case("einsum of itself", "ii", lambda xp, a: xp.einsum("ij,jk->ik", a, a)),
    Case("einsum of its transpose", "ij", lambda xp, a: xp.einsum("ij,jk->ik", a, a.T)),
)  # fmt: skip
PRODUCT_CASES = (
    tensordot("ij,jk", 1),
    tensordot("ij,kl", 0),
    tensordot("ijk,jkl", 2),
    tensordot("ij,jk", ([1], [0])),
    tensordot("ij,jk", (1, 0)),
    tensordot("ijk,kja", ((1, 2), (1, 0))),
    tensordot("ijk,kja", ((-2, -1), (-2, 0))),
    tensordot("ij,ij", ((0, 1), (0, 1))),
    tensordot("ij,kj", (-1, -1)),
    tensordot("i,i", 1),
    tensordot("ijk,j", ((1,), (0,))),
    Case("dot 1 1", "i,i", lambda xp, a, b: xp.dot(a, b)),
    Case("dot 2 1", "ij,j", lambda xp, a, b: xp.dot(a, b)),
    Case("dot 2 2", "ij,jk", lambda xp, a, b: xp.dot(a, b)),
    Case("dot 3 2", "hij,jk", lambda xp, a, b: xp.dot(a, b)),
    Case("dot method", "ij,jk", lambda xp, a, b: a.dot(b)),
    Case("vdot 1", "i,i", lambda xp, a, b: xp.vdot(a, b)),
    Case("vdot 2", "ij,ij", lambda xp, a, b: xp.vdot(a, b), empty=False),
    Case("outer 1 1", "i,j", lambda xp, a, b: xp.outer(a, b)),
    Case("outer 2 1", "ij,k", lambda xp, a, b: xp.outer(a.ravel() if xp is np else a, b), REAL, empty=False),
    Case("matmul 1 1", "i,i", lambda xp, a, b: a @ b),
    Case("matmul 2 1", "ij,j", lambda xp, a, b: a @ b),
    Case("matmul 1 2", "i,ij", lambda xp, a, b: a @ b),
    Case("matmul 2 2", "ij,jk", lambda xp, a, b: a @ b, EXACT.replace("bool ", "") + FLOATS),
    Case("matmul function", "ij,jk", lambda xp, a, b: xp.matmul(a, b)),
    Case("matmul 3 3", "bij,bjk", lambda xp, a, b: a @ b),
    Case("matmul 3 1", "bij,j", lambda xp, a, b: a @ b),
    Case("matmul 1 3", "i,bij", lambda xp, a, b: a @ b),
    Case("matmul 3 2", "bij,jk", lambda xp, a, b: a @ b),
    Case("matmul 2 3", "ij,bjk", lambda xp, a, b: a @ b),
    Case("matmul 4 3", "cbij,bjk", lambda xp, a, b: a @ b),
    Case("matmul batch 1", "1ij,bjk", lambda xp, a, b: a @ b),
    Case("matmul batch 1 on both sides", "c1ij,1bjk", lambda xp, a, b: a @ b),
    Case("matmul of views", "ji,kj", lambda xp, a, b: a.T @ b.T),
    Case("matmul of float16", "ij,jk", lambda xp, a, b: a @ b, "float16"),
    Case("matmul of two types", "ij,jk", lambda xp, a, b: a @ b.astype("float32"), "int8 int64 float64"),
    Case("a product inside a product", "ij,jk,kl", lambda xp, a, b, c: (a @ b) @ c),
    Case("a scaled product", "ij,jk,ik", lambda xp, a, b, c: 2 * (a @ b) + c),
    Case("softmax of a product", "ij,jk", lambda xp, a, b: xp.exp(a @ b - (a @ b).max(axis=-1, keepdims=True)),
         REAL, empty=False),
)  # fmt: skip
MAP_CASES = (
    *(
        Case(name, "ij", lambda xp, a, name=name: getattr(xp, name)(a), FLOATS)
        for name in ("exp", "sin", "tanh", "square", "absolute", "negative", "conj", "real", "imag", "angle")
    ),
    *(
        Case(name, "ij,ij", lambda xp, a, b, name=name: getattr(xp, name)(a, b), REAL)
        for name in ("add", "maximum", "minimum", "subtract", "multiply", "greater", "logical_and", "hypot")
    ),
    Case("isnan", "ij", lambda xp, a: xp.isnan(a)),
    Case("round", "ij", lambda xp, a: xp.round(a / 3, 1), FLOATS),
    Case("nan_to_num", "ij", lambda xp, a: xp.nan_to_num(a), FLOATS),
    Case("a + b", "ij,ij", lambda xp, a, b: a + b, PRODUCTS),
    Case("a - b of other ranks", "ij,j", lambda xp, a, b: a - b),
    Case("a * b broadcast", "i1,1j", lambda xp, a, b: a * b),
    Case("a / b", "ij,ij", lambda xp, a, b: a / (abs(b) + 1)),
    Case("a // 2", "ij", lambda xp, a: a // 2, REAL),
    Case("a % 3", "ij", lambda xp, a: a % 3, REAL),
    Case("a ** 2", "ij", lambda xp, a: a**2),
    Case("2 + a", "ij", lambda xp, a: 2 + a),
    Case("2 - a", "ij", lambda xp, a: 2 - a),
    Case("2 / a", "ij", lambda xp, a: 2 / (abs(a) + 1)),
    Case("a * 0.5", "ij", lambda xp, a: a * 0.5),
    Case("a * float32", "ij", lambda xp, a: a * np.float32(0.5)),
    Case("2.0 ** a", "ij", lambda xp, a: 2.0**a, REAL),
    Case("-a", "ij", lambda xp, a: -a),
    Case("abs(a)", "ij", lambda xp, a: abs(a)),
    Case("~a", "ij", lambda xp, a: ~a, "bool int64"),
    Case("a & b", "ij,ij", lambda xp, a, b: a & b, "bool int64"),
    Case("a | 1", "ij", lambda xp, a: a | 1, "int64"),
    Case("a ^ b", "ij,ij", lambda xp, a, b: a ^ b, "bool int64"),
    Case("a << 1", "ij", lambda xp, a: a << 1, "int64"),
    Case("a > b", "ij,ij", lambda xp, a, b: a > b, REAL),
    Case("a == 1", "ij", lambda xp, a: a == 1),
    Case("a != b", "ij,j", lambda xp, a, b: a != b),
    Case("where", "ij,ij,ij", lambda xp, a, b, c: xp.where(a > 0, b, c), REAL),
    Case("where with scalars", "ij", lambda xp, a: xp.where(a > 0, a, 0), REAL),
    Case("where broadcast", "i1,j", lambda xp, a, b: xp.where(a > 0, b, 1.5), REAL),
    Case("clip", "ij", lambda xp, a: xp.clip(a, -1, 2), REAL),
    Case("clip method", "ij", lambda xp, a: a.clip(-1, 2), REAL),
    Case("astype", "ij", lambda xp, a: a.astype("float32"), "int64 float64 bool"),
    Case("astype int", "ij", lambda xp, a: a.astype("int8"), "int64 float64 bool"),
    Case(".real", "ij", lambda xp, a: a.real, "complex128"),
    Case(".imag", "ij", lambda xp, a: a.imag, "complex128"),
    Case(".conj()", "ij", lambda xp, a: a.conj(), "complex128"),
    Case("a chain", "ij,ij", lambda xp, a, b: xp.exp(-((a - b) ** 2)).astype("float32") + 1, REAL),
    Case("a diamond", "ij", lambda xp, a: (a + 1) * (a - 1)),
)
VIEW_CASES = (
    Case("transpose", "ijk", lambda xp, a: xp.transpose(a, (2, 0, 1)) + 1),
    Case(".T", "ijk", lambda xp, a: a.T * 2),
    Case("swapaxes", "ijk", lambda xp, a: xp.swapaxes(a, 0, 2) * 2),
    Case("moveaxis", "ijk", lambda xp, a: xp.moveaxis(a, 0, -1) * 2),
    Case("[:, None]", "ij", lambda xp, a: a[:, None] * 2),
    Case("[..., None, :] joined", "ij,kj", lambda xp, a, b: a[:, None, :] - b[None, :, :]),
    Case("squeeze", "i1j", lambda xp, a: xp.squeeze(a, 1) * 2),
    Case("squeeze of all", "1i1", lambda xp, a: xp.squeeze(a, (0, 2)) + 1),
    Case("expand_dims", "ij", lambda xp, a: xp.expand_dims(a, 1) + 1),
    Case("reshape of ones", "ij", lambda xp, a: a.reshape((*a.shape, 1)) + 1, empty=False),
    Case("broadcast_to", "i1", lambda xp, a: xp.broadcast_to(a, (2, a.shape[0], 3)) + 1),
    Case("broadcast_to then product", "1j,jk", lambda xp, a, b: xp.broadcast_to(a, (4, a.shape[1])) @ b),
    Case("a sum kept", "ij,ij", lambda xp, a, b: b / (1 + abs(a.sum(axis=1, keepdims=True))), empty=False),
    Case("norms", "ij,kj", lambda xp, a, b: (a**2).sum(1)[:, None] - 2 * a @ b.T + (b**2).sum(1)[None, :],
         REAL, empty=False),
    Case("rechunk", "ij", lambda xp, a: a * 2 if xp is np else (a + 1).rechunk(2) * 2, reference=lambda xp, a: (a + 1) * 2),
    Case("rechunk then product", "ij,jk", lambda xp, a, b: (a if xp is np else a.rechunk(2)) @ b),
)  # fmt: skip
AXES = (
    {},
    {"axis": 0},
    {"axis": -1},
    {"axis": (0, 2)},
    {"axis": 1, "keepdims": True},
    {"axis": (1, 2), "split_every": 2},
)
REDUCTIONS = (
    *(reduction(name, axes) for name in ("sum", "max", "mean") for axes in AXES),
    *(reduction(name, {"axis": (0, 1)}) for name in ("min", "prod", "any", "all", "var", "std")),
    *(
        reduction(name, {"axis": 1, "keepdims": True, "split_every": 2})
        for name in ("min", "any", "var", "std")
    ),
    reduction("sum", {"axis": 1, "dtype": "float32"}, "int64 float64"),
    reduction("sum", {"axis": 1}, "bool int8 float16"),
    reduction("sum", {"axis": (0, 1), "dtype": "int8"}, "int64"),
    reduction("mean", {"axis": 1, "dtype": "float64"}, "float32 int8"),
    reduction("var", {"axis": 1, "ddof": -1}, "float64"),
    reduction("std", {"axis": (0, 2)}, "float32 float64"),
    reduction("mean", {"axis": 2}, "complex128"),
)
CREATIONS = {
    "ones": lambda xp, b, **chunks: xp.ones((5, b.shape[0]), **chunks) @ b,
    "zeros": lambda xp, b, **chunks: xp.zeros((5, b.shape[0]), **chunks) @ b,
    "full": lambda xp, b, **chunks: xp.full((5, b.shape[0]), 3, **chunks) @ b,
    "full of int8": lambda xp, b, **chunks: xp.full((5, b.shape[0]), 3, dtype="int8", **chunks) @ b,
}
"""Arrays made from a shape."""
CONTRACTIONS = (*EINSUMS, *PRODUCT_CASES)
"""Operations that multiply and add up."""
RAVELLED = {"vdot 2", "outer 2 1"}
"""Operations in which Dask flattens an operand, which is left alone."""
CASES = (*EINSUMS, *PRODUCT_CASES, *MAP_CASES, *VIEW_CASES, *REDUCTIONS)
"""Every operation that is lifted."""


def operands(case: Case, draw: Any, low: int = 0) -> list[np.ndarray]:
    """NumPy arrays that fit a case."""
    dtype = draw(st.sampled_from(case.dtypes.split()))
    lowest = low if case.empty else max(low, 1)
    extents: dict[str, int] = {}
    arrays = []
    for number, axes in enumerate(case.shapes.split(",")):
        for axis in axes:
            if axis not in extents:
                extents[axis] = int(axis) if axis.isdigit() else draw(st.integers(lowest, 5))
        arrays.append(values(tuple(extents[axis] for axis in axes), dtype, number))
    return arrays


def ids(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_an_operation_is_lifted_whole(case: Case) -> None:
    extents: dict[str, int] = {}
    arrays = []
    for axes in case.shapes.split(","):
        shape = tuple(int(a) if a.isdigit() else extents.setdefault(a, 4 + len(extents)) for a in axes)
        arrays.append(da.from_array(values(shape, case.dtypes.split()[0]), chunks=3))
    found = lifted(case.call(da, *arrays))
    assert found.graph.nodes
    if case.name in RAVELLED:
        assert {name.split("-")[0] for name, _ in found.graph.left_alone} <= {"reshape", "rechunk"}
    else:
        assert found.graph.left_alone == ()
        assert [output.name for output in found.graph.outputs] == [case.call(da, *arrays).name]
    assert case.call(da, *arrays).name in {output.name for output in found.graph.outputs}


@pytest.mark.parametrize("case", CASES, ids=ids)
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_plan_of_an_operation_gives_what_numpy_gives(case: Case, data: st.DataObject) -> None:
    arrays = operands(case, data.draw)
    with np.errstate(all="ignore"):
        axes = case.shapes.split(",")
        lazy = case.call(da, *(as_dask(data.draw, array, names) for array, names in zip(arrays, axes)))
        if case in CONTRACTIONS and lazy.dtype.kind in "iu":
            # whole numbers are added up in the type the lazy array declares, whatever the cut
            arrays = [array.astype(lazy.dtype) for array in arrays]
        expected = (case.reference or case.call)(np, *arrays)
        any_plan_gives(data.draw, lazy, expected)


@pytest.mark.parametrize("name", CREATIONS)
@settings(max_examples=4)
@given(data=st.data())
def test_arrays_made_from_a_shape_are_cut_like_any_other(name: str, data: st.DataObject) -> None:
    b = values((3, 4), "int64")
    lazy = CREATIONS[name](da, as_dask(data.draw, b), chunks=2)
    assert not lifted(lazy).graph.left_alone
    any_plan_gives(data.draw, lazy, CREATIONS[name](np, b))


@settings(max_examples=4)
@given(data=st.data())
def test_any_plan_of_a_whole_model_layer_gives_what_numpy_gives(data: st.DataObject) -> None:
    """Attention: contractions, a softmax of Dask's own reductions, views and maps between them."""

    def attention(xp: Any, x: Any, *weights: Any) -> Any:
        q, k, v = (xp.einsum("bsd,hde->bhse", x, w) for w in weights)
        scores = xp.einsum("bhse,bhte->bhst", q, k) / 4
        scores = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        scores = scores / scores.sum(axis=-1, keepdims=True)
        mixed = xp.einsum("bhst,bhte->bshe", scores, v)
        return mixed - mixed.mean(axis=(0, 1))[None, None]

    arrays = [values((2, 3, 4), "float64"), *(values((2, 4, 3), "float64", n) / 3 for n in range(3))]
    lazy = attention(da, *(as_dask(data.draw, array) for array in arrays))
    any_plan_gives(data.draw, lazy, attention(np, *arrays))


@settings(max_examples=5)
@given(data=st.data())
def test_chunks_of_length_zero_are_read_and_promised(data: st.DataObject) -> None:
    a, b = values((4, 3), "int64"), values((3, 2), "int64")
    x = da.from_array(a, chunks=((0, 2, 2, 0), (3, 0)))
    y = da.from_array(b, chunks=((3, 0), (0, 2)))
    any_plan_gives(data.draw, x @ y + 1, a @ b + 1)


@settings(max_examples=5)
@given(data=st.data())
def test_arrays_wanted_together_are_planned_together(data: st.DataObject) -> None:
    a, b = values((4, 5), "int64"), values((5, 3), "int64")
    x, y = as_dask(data.draw, a), as_dask(data.draw, b)
    product = x @ y
    with dask.config.set(array_optimize=AnyPlan(data.draw), scheduler="synchronous"):
        first, second, total = dask.compute(product, product.T + 1, product.sum())
    same(first, a @ b, "int64")
    same(second, (a @ b).T + 1, "int64")
    assert total == (a @ b).sum()


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16"])
@settings(max_examples=5)
@given(data=st.data())
def test_narrow_numbers_wrap_as_numpys_do(dtype: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.integers(0, 200, shape).astype(dtype) for shape in ((4, 9), (9, 3)))
    x, y = as_dask(data.draw, a), as_dask(data.draw, b)
    for lazy in (da.einsum("ij,jk->ik", x, y), da.tensordot(x, y, axes=1)):  # einsum declares a wider type
        one, two = a.astype(lazy.dtype), b.astype(lazy.dtype)
        any_plan_gives(data.draw, lazy, np.tensordot(one, two, axes=1))


def test_a_planned_graph_is_not_planned_again() -> None:
    a = da.from_array(np.arange(16.0).reshape(4, 4), chunks=2)
    hook = EinDecomp(force=True, topology=Topology(workers=2))
    with dask.config.set(array_optimize=hook, scheduler="synchronous"):
        (once,) = dask.optimize(a @ a)
        assert not lifted(once).graph.nodes
        np.testing.assert_array_equal(once.compute(), a.compute() @ a.compute())
        held = (a @ a).persist()
        assert [given.name for given in lifted(held @ a).graph.inputs.values()] == [held.name, a.name]


def test_a_transposition_a_rechunk_and_a_new_axis_are_no_expressions() -> None:
    a = da.ones((4, 6), chunks=2, dtype="int64").map_blocks(lambda block: block)
    graph = lifted((a.T.rechunk(3)[:, None] * 2)[:, 0].rechunk(1) @ a.T.rechunk(1)[:4]).graph
    assert len(graph.nodes) <= 2 or graph.left_alone


# what stays as it is


def a_square(chunks: int = 2) -> da.Array:
    return da.from_array(np.arange(16.0).reshape(4, 4) - 8, chunks=chunks)


def structured() -> da.Array:
    return da.from_array(np.zeros((4, 4), dtype=[("x", "f8")]), chunks=2)


def masked_product() -> da.Array:
    """One whose blocks Dask takes for plain ones."""
    return da.tensordot(da.ma.masked_greater(a_square(), 3), a_square(), axes=1)


def annotated() -> da.Array:
    with dask.annotate(priority=3):
        return a_square() + 1


def ranged() -> da.Array:
    return da.reduction(
        a_square(),
        chunk=lambda block, axis, keepdims: block.max(axis=axis, keepdims=keepdims),
        aggregate=lambda block, axis, keepdims: block.max(axis=axis, keepdims=keepdims),
        dtype="float64",
        axis=0,
    )


STAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "map_blocks": (lambda: a_square().map_blocks(lambda block: block * 2), "block function"),
    "map_blocks of a known name": (lambda: a_square().map_blocks(np.cumsum, axis=0), "block function cumsum"),
    "unknown chunks": (lambda: a_square()[a_square()[:, 0] > 0] + 1, "unknown"),
    "objects": (lambda: a_square().astype(object) + 1, "elements of type object"),
    "structured": (lambda: structured()[:, None], "elements of type"),
    "datetimes": (lambda: a_square().astype("M8[s]") + np.timedelta64(1, "s"), "elements of type"),
    "masked": (lambda: da.ma.masked_greater(a_square(), 3) + 1, "blocks of type"),
    "outer of a masked product": (lambda: da.outer(masked_product(), a_square()), "no plain array"),
    "annotated": (annotated, "annotated with priority"),
    "cumsum": (lambda: a_square().cumsum(axis=0), ""),
    "cumprod": (lambda: da.cumprod(a_square(), axis=1, method="blelloch"), ""),
    "fft": (lambda: da.fft.fft(a_square((2, 4)), axis=1), ""),
    "overlap": (lambda: a_square().map_overlap(lambda block: block, depth=1, boundary="none"), ""),
    "slice": (lambda: a_square()[1:3], "tasks of its own"),
    "fancy": (lambda: a_square()[[3, 0]], ""),
    "concatenate": (lambda: da.concatenate([a_square(), a_square() + 1]), "tasks of its own"),
    "user's reduction": (ranged, ""),
    "argmax": (lambda: a_square().argmax(axis=0), ""),
    "topk": (lambda: da.topk(a_square(), 2, axis=0), ""),
    "diagonal": (lambda: da.diag(a_square()), ""),
    "apply_along_axis": (
        lambda: da.apply_along_axis(np.sort, 0, a_square((4, 2)), shape=(4,), dtype="f8"),
        "",
    ),
    "gufunc": (lambda: da.apply_gufunc(np.linalg.det, "(i,j)->()", a_square(4)), ""),
    "delayed": (lambda: da.from_delayed(dask.delayed(np.ones)((4, 4)), (4, 4), "f8")[1:], ""),
}


def equal(one: Any, two: Any) -> None:
    assert type(one) is type(two) and one.dtype == two.dtype
    np.testing.assert_array_equal(one, two)
    if isinstance(one, np.ma.MaskedArray):
        np.testing.assert_array_equal(one.mask, two.mask)


@pytest.mark.parametrize("name", STAYS)
def test_what_is_not_understood_is_left_alone_with_a_reason(name: str) -> None:
    make, reason = STAYS[name]
    array = make()
    alone = dict(lifted(array).graph.left_alone)
    assert array.name in alone
    assert all(alone.values())
    assert reason in " ".join(alone.values())
    with dask.config.set(scheduler="synchronous"):
        plain = array.compute()
        with dask.config.set(array_optimize=EinDecomp(force=True, topology=Topology(workers=2))):
            equal(array.compute(), plain)


@pytest.mark.parametrize(
    "name", [name for name in STAYS if name not in ("structured", "datetimes", "argmax")]
)
def test_a_product_beside_what_is_left_alone_is_right(name: str) -> None:
    array = STAYS[name][0]()
    if array.ndim != 2 or array.dtype.kind == "O":
        array = array.astype("f8") if array.ndim == 2 else array.reshape((-1, 1)) * 1.0
    with dask.config.set(scheduler="synchronous"):
        joined = da.einsum("ij,kj->ik", array, array) + 1 if name != "masked" else da.dot(array, array.T)
        plain = joined.compute()
        with dask.config.set(array_optimize=EinDecomp(force=True, topology=Topology(workers=2))):
            planned = joined.compute()
    assert type(planned) is type(plain)
    np.testing.assert_allclose(planned, plain)


def test_sparse_blocks_are_left_alone() -> None:
    sparse = pytest.importorskip("sparse")
    a = a_square().map_blocks(sparse.COO, dtype="float64", meta=sparse.COO(np.zeros((0, 0))))
    product = da.tensordot(a, a, axes=1)
    assert product.name in dict(lifted(product).graph.left_alone)
    with dask.config.set(array_optimize=EinDecomp(force=True), scheduler="synchronous"):
        found = product.compute()
    assert isinstance(found, sparse.COO)
    np.testing.assert_array_equal(found.todense(), a_square().compute() @ a_square().compute())


def test_only_the_annotated_layer_is_left_alone() -> None:
    array = annotated()
    graph = lifted(array @ array).graph
    assert [name for name, _ in graph.left_alone] == [array.name]
    assert [given.name for given in graph.inputs.values()] == [array.name]
    assert len(graph.nodes) == 1


@pytest.mark.parametrize("index", [np.s_[:2, :2], np.s_[0], np.s_[3, 3], np.s_[:, 1:2]])
def test_a_slice_of_a_product_is_not_computed_whole(index: Any) -> None:
    seen: set[bytes] = set()

    def noted(block: np.ndarray) -> np.ndarray:
        seen.add(block.tobytes())
        return block

    a = a_square()
    array = a.map_blocks(noted, dtype=a.dtype, meta=a._meta)
    product = (array @ a)[index]
    with dask.config.set(array_optimize=EinDecomp(force=True), scheduler="synchronous"):
        found = product.compute()
    np.testing.assert_array_equal(found, (a.compute() @ a.compute())[index])
    assert len(seen) == (4 if isinstance(index, tuple) and index[0] == slice(None) else 2)


# mistakes


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: a @ b,
        lambda a, b: da.matmul(b.T, a.T),
        lambda a, b: da.tensordot(a, b, axes=1),
        lambda a, b: da.tensordot(a, b, axes=((1,), (0,))),
        lambda a, b: da.dot(a, b),
    ],
)
@pytest.mark.parametrize("hook", [EinDecomp(), EinDecomp(force=True), EinDecomp(strict=False)])
def test_an_extent_of_one_against_another_is_refused_with_both(make: Any, hook: EinDecomp) -> None:
    array = make(da.ones((4, 1), chunks=2), da.ones((7, 3), chunks=7))
    with (
        pytest.raises(ShapeError, match=r"1 long.*7|7 long.*1") as refused,
        dask.config.set(array_optimize=hook),
    ):
        array.compute(scheduler="synchronous")
    assert "matmul-" in str(refused.value) or "tensordot-" in str(refused.value)
    assert "expected" in str(refused.value)


def test_a_tensordot_over_one_axis_twice_is_refused() -> None:
    a = da.ones((4, 4), chunks=2)
    array = da.tensordot(a, a, axes=((0, 0), (0, 1)))
    with (
        pytest.raises(ShapeError, match=r"left operand twice: axes=.*expected once each"),
        dask.config.set(array_optimize=EinDecomp()),
    ):
        array.compute(scheduler="synchronous")
    with pytest.raises(ShapeError, match="right operand twice"):
        lifted(da.tensordot(a, a, axes=((0, 1), (1, 1))))
