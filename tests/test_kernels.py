"""What runs on a worker gives what NumPy gives, however the operands are cut and whatever library they are of."""

from __future__ import annotations

import operator
import os
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from dask.array import chunk
from dask.array.core import _concatenate2
from dask.array.reductions import mean_agg, mean_chunk, mean_combine, moment_agg, moment_chunk, moment_combine
from dask.base import tokenize
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tlz import compose

from dask_eindecomp import kernels
from dask_eindecomp.kernels import (
    Contraction,
    Creation,
    Cut,
    Elementwise,
    Join,
    Rearrange,
    Reduction,
    Slot,
    Sum,
    TreeReduce,
)  # fmt: skip
from tests.standin import StandIn

Make = Callable[[np.ndarray], Any]
Pieces = tuple[tuple[int, ...], ...]
DTYPES = ("bool", "int8", "uint8", "int64", "float16", "float32", "float64", "complex128")
each_type = pytest.mark.parametrize("make", [np.asarray, StandIn])
"""Blocks of NumPy and of a library that refuses to be mixed with it."""


def whole(array: np.ndarray) -> Pieces:
    return tuple((length,) for length in array.shape)


def cut(array: np.ndarray, pieces: Pieces, make: Make) -> Any:
    """What a task gets of an operand.  The blocks cannot be written, so that a kernel that tries fails."""
    blocks = []
    for axes in product(*(zip(axis, accumulate(axis)) for axis in pieces)):
        block = np.array(array[tuple(slice(stop - length, stop) for length, stop in axes)], order="C")
        block.flags.writeable = False
        blocks.append(make(block))
    return blocks if len(blocks) != 1 else blocks[0]


def join(
    spec: str, arrays: list[np.ndarray], step: Any, make: Make = np.asarray, *, pieces: list[Pieces] | None = None,
    finish: Any = None, **extents: int,
) -> Any:  # fmt: skip
    """Run a tile and check that its result is of the blocks' library."""
    left, output = spec.split("->")
    operands = tuple(map(tuple, left.split(","))) if arrays else ()
    for labels, array in zip(operands, arrays):
        extents |= zip(labels, array.shape)
    pieces = [whole(array) for array in arrays] if pieces is None else pieces
    tile = Join(spec, operands, tuple(output), tuple(extents.items()), tuple(pieces), step, finish)
    return plain(tile(*(cut(*one, make) for one in zip(arrays, pieces))), make)


def plain(result: Any, make: Make) -> np.ndarray:
    if make is StandIn:
        assert type(result) is StandIn
        return result.values
    assert isinstance(result, (np.ndarray, np.generic))
    return np.asarray(result)


def random(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.4
    if np.dtype(dtype).kind in "iu":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    real = rng.standard_normal(shape)
    return (real + 1j * rng.standard_normal(shape) if dtype == "complex128" else real).astype(dtype)


def einsum(spec: str, arrays: list[np.ndarray], dtype: str, **extents: int) -> np.ndarray:
    """The oracle: NumPy's loop, and labels of the output that no operand has repeated."""
    left, output = spec.split("->")
    for labels, array in zip(left.split(","), arrays):
        extents |= zip(labels, array.shape)
    working = "float32" if dtype == "float16" else dtype
    present = "".join(label for label in output if label in left)
    operands = [array.astype(dtype).astype(working) for array in arrays]
    result = np.einsum(f"{left}->{present}", *operands, dtype=working)
    shape = tuple(extents[label] if label in present else 1 for label in output)
    return np.broadcast_to(result.reshape(shape), tuple(extents[label] for label in output)).astype(dtype)


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if wanted.dtype.kind in "fc":
        close = {"float16": 1e-2, "float32": 1e-4}.get(wanted.dtype.name, 1e-10)
        np.testing.assert_allclose(found, wanted, rtol=close, atol=close)
    else:
        np.testing.assert_array_equal(found, wanted)


# the idea


@each_type
def test_a_tile_is_what_einsum_gives_on_the_whole_operands(make: Make) -> None:
    x, y = random((5, 6), "float64", 1), random((6, 4), "float64", 2)
    found = join("ij,jk->ik", [x, y], Contraction("float64"), make, pieces=[((2, 3), (4, 2)), ((1, 5), (4,))])
    assert_same(found, x @ y)


@each_type
@pytest.mark.parametrize("small", [0, 1 << 60])
def test_walking_cells_and_merging_pieces_give_the_same(make: Make, small: int) -> None:
    x, y = random((5, 6), "int64", 1), random((6, 4), "int64", 2)
    with patch.object(kernels, "SMALL_CELL", small):
        pieces = [((2, 3), (4, 2)), ((1, 5), (3, 1))]
        assert_same(join("ij,jk->ik", [x, y], Contraction("int64"), make, pieces=pieces), x @ y)


def test_cells_of_some_size_are_computed_without_a_copy_of_an_operand() -> None:
    x, y = np.ones((1024, 1024)), np.ones((1024, 4))
    blocks = cut(x, ((512, 512), (512, 512)), np.asarray)
    labels = (("i", "j"), ("j", "k"))
    pieces = (((512, 512), (512, 512)), ((1024,), (4,)))
    tile = Join(
        "ij,jk->ik", labels, ("i", "k"), (("i", 1024), ("j", 1024), ("k", 4)), pieces, Contraction("f8")
    )
    tracemalloc.start()
    result = tile(blocks, y)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.all(result == 1024)
    assert peak < x.nbytes / 8


@each_type
def test_an_elementwise_tile_broadcasts_like_numpy(make: Make) -> None:
    x, y = random((3, 4), "float64", 1), random((1, 4), "float64", 2)
    step = Elementwise(np.subtract, (Slot(1), Slot(0)))
    found = join("ij,oj->ij", [x, y], step, make, pieces=[((1, 2), (4,)), ((1,), (3, 1))])
    assert_same(found, y - x)


@each_type
def test_a_reduction_gives_a_partial_result_that_keeps_its_axes(make: Make) -> None:
    x = random((4, 6), "float64")
    fold = partial(_folded, chunk=np.sum, axis=(0,))
    step = Reduction(np.sum, ("i",), fold)
    found = join("ij->ij", [x], step, make, pieces=[((1, 3), (2, 4))])
    assert_same(found, x.sum(axis=0, keepdims=True))


@each_type
def test_partial_results_add_up_and_none_of_them_changes(make: Make) -> None:
    partials = [random((2, 3), "float64", seed) for seed in range(4)]
    blocks = [cut(one, whole(one), make) for one in partials]
    assert_same(plain(Sum("float64")(blocks), make), sum(partials))


# contractions: the edges


SPECS = {
    "matrix product": ("ij,jk->ik", (3, 4), (4, 5)),
    "its transpose": ("ij,jk->ki", (3, 4), (4, 5)),
    "rows with rows": ("ik,jk->ij", (3, 4), (5, 4)),
    "matrix and vector": ("ij,j->i", (3, 4), (4,)),
    "vector and matrix": ("j,jk->k", (4,), (4, 5)),
    "scores of attention": ("bshd,bthd->bhst", (2, 3, 4, 5), (2, 6, 4, 5)),
    "values of attention": ("bhst,bthd->bshd", (2, 4, 3, 6), (2, 6, 4, 5)),
    "two labels contracted": ("ijk,kjl->il", (2, 3, 4), (4, 3, 5)),
    "rows dotted": ("ij,ij->i", (3, 4), (3, 4)),
    "columns dotted": ("ij,ij->j", (3, 4), (3, 4)),
    "all dotted": ("ij,ij->", (3, 4), (3, 4)),
    "all dotted, one turned": ("ij,ji->", (3, 4), (4, 3)),
    "outer product": ("i,j->ji", (3,), (4,)),
    "scalars": (",->", (), ()),
    "scaled": (",ij->ij", (), (3, 4)),
    "Hadamard": ("ij,ji->ij", (3, 4), (4, 3)),
    "sum of rows": ("ij->i", (3, 4)),
    "trace": ("ii->", (3, 3)),
    "diagonal": ("ii->i", (3, 3)),
    "diagonal thrice": ("iii->i", (3, 3, 3)),
    "diagonal and product": ("iji,jk->ik", (3, 4, 3), (4, 2)),
    "summed on one side each": ("ij,kl->ik", (3, 4), (2, 5)),
    "summed on one side": ("ijk,jl->il", (3, 4, 2), (4, 5)),
    "axes of length 1": ("oij,jpk->ik", (1, 3, 4), (4, 1, 5)),
    "length 1 contracted": ("oi,oj->ij", (1, 3), (1, 4)),
    "length 1 dotted": ("io,io->i", (3, 1), (3, 1)),
    "empty contracted": ("ij,jk->ik", (3, 0), (0, 5)),
    "empty kept": ("ij,jk->ik", (0, 4), (4, 5)),
    "empty stack": ("bij,bjk->bik", (0, 2, 3), (0, 3, 4)),
    "repeated to a new axis": ("ij,j->ni", (3, 4), (4,)),
}


@each_type
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_contraction(name: str, dtype: str, make: Make) -> None:
    spec, *shapes = SPECS[name]
    arrays = [random(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    new = {"n": 2} if "n" in spec else {}
    assert_same(join(spec, arrays, Contraction(dtype), make, **new), einsum(spec, arrays, dtype, **new))


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
@pytest.mark.parametrize("name", SPECS)
def test_matmul_never_gets_strides_that_blas_refuses(name: str, dtype: str) -> None:
    spec, *shapes = SPECS[name]
    arrays = [random(shape, dtype) for shape in shapes]
    matmul = np.matmul

    def watched(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        for one in (x, y):
            rows, columns = one.shape[-2:]
            steps = [stride // one.itemsize for stride in one.strides[-2:]]
            fits = (steps[1] == 1 and steps[0] >= columns) or (steps[0] == 1 and steps[1] >= rows)
            assert fits or not one.size
        return matmul(x, y)

    with patch.object(np, "matmul", watched):
        join(spec, arrays, Contraction(dtype), **({"n": 2} if "n" in spec else {}))


def test_a_block_that_is_turned_is_not_copied_for_blas() -> None:
    x = random((3, 4), "float64")
    assert np.shares_memory(kernels._for_blas(x.T), x)
    assert np.shares_memory(kernels._for_blas(x[:, :2]), x)
    assert not np.shares_memory(kernels._for_blas(x[:, ::2]), x)
    assert not np.shares_memory(kernels._for_blas(np.broadcast_to(x[:1], (5, 4))), x)


def test_operands_are_cast_first_to_one_type_then_to_that_of_the_result() -> None:
    x = np.array([1.6, 300.7])
    assert join("i->", [x], Contraction("float64", cast="int64")) == 301
    assert join("i->", [x], Contraction("float64", cast="int64")).dtype == "float64"
    assert join("i->", [x], Contraction("float64")) == pytest.approx(302.3)


@each_type
def test_half_precision_is_added_up_in_single(make: Make) -> None:
    x = np.ones((2, 4096), "float16")
    pieces = [((2,), (1,) * 4096)]
    with patch.object(
        kernels, "SMALL_CELL", 0
    ):  # added one by one in half precision, this would stop at 2048
        found = join("ij->i", [x], Contraction("float16"), make, pieces=pieces)
    assert_same(found, np.full(2, 4096, "float16"))


def test_half_precision_rounds_what_it_reads() -> None:
    x = np.array([1 + 2.0**-12] * 2)
    assert join("i->", [x], Contraction("float16")) == 2
    assert join("i->", [x], Contraction("float16", partial=True)) == 2


@each_type
def test_partial_results_of_half_precision_stay_single_until_they_are_summed(make: Make) -> None:
    x = np.full(4, 2.0**-11, "float16")
    one = np.ones(1, "float16")
    step = Contraction("float16", partial=True)
    partials = [make(join("i->", [part], step, make)) for part in (one, x[:2], x[2:])]
    assert {part.dtype for part in partials} == {np.dtype("float32")}
    assert_same(plain(Sum("float16")(partials), make), np.float16(1 + 2.0**-9))


def test_partial_results_in_half_precision_are_added_in_single() -> None:
    parts = [np.full(1, 2048, "float16")] + [np.ones(1, "float16")] * 4
    assert Sum("float16")(parts) == np.array([2052], "float16")


def test_a_sum_of_one_partial_result_only_casts() -> None:
    one = np.ones(2, "float32")
    assert Sum("float32")([one]) is one
    assert Sum("float16")([one]).dtype == "float16"


@each_type
def test_a_sum_of_logical_values_says_whether_any_is_true(make: Make) -> None:
    parts = [np.array([False, False, True]), np.array([False, True, True]), np.array([False, False, True])]
    assert_same(
        plain(Sum("bool")([cut(one, whole(one), make) for one in parts]), make), np.any(parts, axis=0)
    )


def test_a_sum_of_scalars_is_a_scalar() -> None:
    assert Sum("int64")([np.int64(1), np.int64(2), np.int64(3)]) == 6


@each_type
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("spec", ["i->", "ij->j"])
def test_integers_wrap_around_silently_with_and_without_axes(spec: str, make: Make) -> None:
    x = np.full((3, 2)[: spec.index("-")], 60, "int8")
    with patch.object(kernels, "SMALL_CELL", 0):
        found = join(spec, [x], Contraction("int8"), make, pieces=[((1, 2), (2,))[: x.ndim]])
    assert_same(found, np.full(x.shape[1:], 180, "int64").astype("int8"))


@pytest.mark.filterwarnings("error")
def test_scalars_wrap_around_silently_when_they_are_summed() -> None:
    assert_same(np.asarray(Sum("int8")([np.int8(60)] * 3)), np.array(-76, "int8"))


@each_type
def test_an_empty_sum_is_zero_even_against_infinity(make: Make) -> None:
    x, y = np.ones((2, 0)), np.full(3, np.inf)
    assert_same(join("ij,k->ik", [x, y], Contraction("float64"), make), np.zeros((2, 3)))


@each_type
def test_a_diagonal_leaves_the_other_pieces_alone(make: Make) -> None:
    x = random((5, 5), "int64")
    x[:2, 4] = x[4, :2] = 10**9  # would be seen if it were read
    pieces = [((2, 3), (4, 1))]
    with patch.object(kernels, "SMALL_CELL", 0):
        assert_same(join("ii->i", [x], Contraction("int64"), make, pieces=pieces), x.diagonal())
        assert_same(join("ii->", [x], Contraction("int64"), make, pieces=pieces), x.trace())
    assert_same(join("ii->i", [x], Rearrange(), make, pieces=pieces), x.diagonal())


@each_type
def test_an_empty_piece_before_a_full_one_is_passed_over(make: Make) -> None:
    x = random((4,), "int64")
    for step in (Contraction("int64"), Rearrange()):
        assert_same(join("i->i", [x], step, make, pieces=[((0, 4, 0),)]), x)


def test_three_operands_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="3 operands; expected one or two"):
        join("i,i,i->i", [np.ones(1)] * 3, Contraction("float64"))


# elementwise and rearranged: the edges


@each_type
def test_a_function_gets_its_arguments_in_order_with_literals_and_keywords(make: Make) -> None:
    x = random((3,), "float64")
    step = Elementwise(np.where, (True, Slot(0), Slot(0)))
    assert_same(join("i->i", [x], step, make), x)
    step = Elementwise(np.clip, (Slot(0), -0.5), (("a_max", 0.5),))
    assert_same(join("i->i", [x], step, make), x.clip(-0.5, 0.5))


def _seen(shapes: list[tuple[int, ...]], *arrays: Any) -> Any:
    shapes.extend(array.shape for array in arrays)
    return sum(arrays)


@each_type
def test_leading_axes_are_left_to_numpy_and_scalars_stay_scalars(make: Make) -> None:
    shapes: list[tuple[int, ...]] = []
    arrays = [random(shape, "float64") for shape in ((2, 3, 4), (), (4,), (2,), (3, 2))]
    step = Elementwise(partial(_seen, shapes), tuple(map(Slot, range(5))))
    found = join("ijk,,k,i,ji->ijk", arrays, step, make)
    assert shapes == [(2, 3, 4), (), (4,), (2, 1, 1), (2, 3, 1)]
    a, b, c, d, e = arrays
    assert_same(found, a + b + c + d[:, None, None] + e.T[:, :, None])


@each_type
def test_an_operand_with_axes_keeps_one(make: Make) -> None:
    """In NumPy 1 an operand without axes would have less say in the element type of the result."""
    shapes: list[tuple[int, ...]] = []
    arrays = [random((3,), "float32"), random((1, 1), "float64")]
    step = Elementwise(partial(_seen, shapes), (Slot(0), Slot(1)))
    assert join("i,op->i", arrays, step, make).dtype == "float64"
    assert shapes == [(3,), (1,)]


def test_without_axes_in_the_output_operands_have_none() -> None:
    assert_same(join("o->", [np.ones(1)], Elementwise(np.negative, (Slot(0),))), np.float64(-1))


@each_type
def test_a_result_that_is_smaller_than_the_tile_is_broadcast(make: Make) -> None:
    x = random((3,), "float64")
    step = Elementwise(np.negative, (Slot(0),))
    assert_same(join("i->ni", [x], step, make, n=2), np.stack([-x, -x]))
    assert_same(join("i->ni", [x], step, make, pieces=[((1, 2),)], n=2), np.stack([-x, -x]))


def test_a_function_may_give_a_plain_number() -> None:
    assert_same(join("i->i", [np.ones(3)], Elementwise(lambda x: 5, (Slot(0),))), np.full(3, 5))


def test_the_users_exception_is_not_touched() -> None:
    error = ZeroDivisionError("mine")

    def fails(x: Any) -> Any:
        raise error

    with pytest.raises(ZeroDivisionError) as caught:
        join("i->i", [np.ones(4)], Elementwise(fails, (Slot(0),)), pieces=[((2, 2),)])
    assert caught.value is error
    assert caught.value.__cause__ is None


@each_type
def test_longer_strings_in_a_later_piece_are_not_cut_off(make: Make) -> None:
    blocks = [make(np.array(["a"])), make(np.array(["longer"]))]
    tile = Join("i->i", (("i",),), ("i",), (("i", 2),), (((1, 1),),), Rearrange())
    assert plain(tile(blocks), make).tolist() == ["a", "longer"]


def test_one_piece_is_rearranged_without_a_copy() -> None:
    x = random((3, 1, 4), "float64")
    tile = Join("ioj->jni", (tuple("ioj"),), tuple("jni"), (("i", 3), ("o", 1), ("j", 4), ("n", 2)),
                (((3,), (1,), (4,)),), Rearrange())  # fmt: skip
    assert np.shares_memory(tile(x), x)
    assert_same(tile(x), np.stack([x[:, 0].T] * 2, axis=1))
    contraction = Join(
        "ij->ji", (tuple("ij"),), tuple("ji"), (("i", 3), ("j", 4)), (((3,), (4,)),), Contraction("f8")
    )
    assert np.shares_memory(contraction(x[:, 0]), x)


def test_values_are_made_in_the_shape_of_the_tile() -> None:
    made = join("->ij", [], Creation(np.full, (("fill_value", 3), ("dtype", "int8"))), i=2, j=3)
    assert_same(made, np.full((2, 3), 3, "int8"))


@each_type
def test_finish_gets_the_array(make: Make) -> None:
    x = random((3, 4), "float64")
    assert_same(join("ij->i", [x], Contraction("float64"), make, finish=np.negative), -x.sum(axis=1))


@each_type
@pytest.mark.parametrize(
    ("bounds", "copied"), [((1, 3), True), ((0, 5), False), ((3, 8), False), ((4, 4), True)]
)
def test_a_small_part_of_a_block_does_not_keep_the_block(
    bounds: tuple[int, int], copied: bool, make: Make
) -> None:
    block = cut(np.arange(10), ((10,),), make)
    part = Cut((bounds,))(block)
    assert_same(plain(part, make), np.arange(*bounds))
    assert np.shares_memory(plain(part, make), plain(block, make)) is not copied


# blocks that are not what the graph said of them


def test_a_block_of_another_shape_is_refused() -> None:
    tile = Join("ij,jk->ik", (("i", "j"), ("j", "k")), ("i", "k"), (("i", 2), ("j", 3), ("k", 4)),
                (((2,), (3,)), ((1, 2), (4,))), Contraction("float64"))  # fmt: skip
    with pytest.raises(
        ValueError, match=r"operand 1 of 'ij,jk->ik' has a block of shape \(3, 4\); expected \(2, 4\)"
    ):
        tile(np.ones((2, 3)), [np.ones((1, 4)), np.ones((3, 4))])
    with pytest.raises(
        ValueError, match=r"operand 0 of 'ij,jk->ik' has a block of shape \(2,\); expected \(2, 3\)"
    ):
        tile(np.ones(2), [np.ones((1, 4)), np.ones((2, 4))])


class _OnlyShape:
    shape = (3,)


@pytest.mark.parametrize(
    ("block", "kind"), [([1, 2, 3], "list"), ({"total": 1}, "dict"), (_OnlyShape(), "_OnlyShape")]
)
def test_a_block_that_is_no_array_is_refused(block: Any, kind: str) -> None:
    tile = Join("i->i", (("i",),), ("i",), (("i", 3),), (((3,),),), Rearrange())
    message = (
        rf"operand 0 of 'i->i' has a block that is no array but a {kind}; expected an array of shape \(3,\)"
    )
    with pytest.raises(ValueError, match=message):
        tile(block)


def test_a_reduction_refuses_them_too() -> None:
    tile = Join("i->", (("i",),), ("i",), (("i", 3),), (((3,),),), Reduction(np.sum, ("i",)))
    with pytest.raises(ValueError, match=r"block of shape \(2,\); expected \(3,\)"):
        tile(np.ones(2))


def test_missing_blocks_are_our_mistake() -> None:
    tile = Join("i->i", (("i",),), ("i",), (("i", 3),), (((1, 2),),), Rearrange())
    with pytest.raises(AssertionError, match="operand 0 in 1 blocks, not 2"):
        tile([np.ones(1)])
    with pytest.raises(AssertionError, match="2 operands for 'i->i'"):
        tile(np.ones(1), np.ones(2))


# reductions: Dask's own functions


def _folded(nested: Any, *, chunk: Any, axis: tuple[int, ...], keepdims: bool = True) -> Any:
    """What Dask makes of a combine or aggregate function that wants one array."""
    return compose(partial(chunk, axis=axis, keepdims=keepdims), partial(_concatenate2, axes=sorted(axis)))(
        nested
    )


def protocol(name: str, axis: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Chunk, combine and aggregate function as Dask's reductions set them up."""
    if name in ("sum", "max"):
        step = {"sum": chunk.sum, "max": chunk.max}[name]
        fold = partial(_folded, chunk=step, axis=axis)
        return step, fold, partial(fold, keepdims=False)
    if name == "mean":
        return (
            partial(mean_chunk, dtype="f8"),
            partial(mean_combine, dtype="f8", axis=axis, keepdims=True),
            partial(mean_agg, dtype="f8", axis=axis, keepdims=False),
        )
    return (
        partial(moment_chunk, dtype="f8"),
        partial(moment_combine, dtype="f8", axis=axis, keepdims=True),
        partial(moment_agg, dtype="f8", axis=axis, keepdims=False),
    )


REDUCTIONS = {"sum": np.sum, "max": np.max, "mean": np.mean, "var": np.var}


@pytest.mark.parametrize("axis", [(0,), (1,), (0, 2), (0, 1, 2), (2, 0)])
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("merges", [False, True])
def test_a_reduction_of_pieces_is_that_of_the_whole(name: str, axis: tuple[int, ...], merges: bool) -> None:
    x = random((4, 5, 6), "float64")
    one, combine, aggregate = protocol(name, axis)
    step = Reduction(one, tuple("ijk"[n] for n in axis), None if merges else combine)
    pieces = [((1, 3), (2, 2, 1), (3, 3))]
    assert_same(join("ijk->ijk", [x], step, pieces=pieces, finish=aggregate), REDUCTIONS[name](x, axis=axis))
    assert_same(join("ijk->ijk", [x], step, finish=aggregate), REDUCTIONS[name](x, axis=axis))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_partial_reductions_of_several_tiles_are_aggregated_in_nested_lists(name: str) -> None:
    x = random((4, 5, 6), "float64")
    one, combine, aggregate = protocol(name, (0, 2))
    partials = [
        Join(name, (tuple("ijk"),), tuple("ijk"), (("i", 2), ("j", 5), ("k", 2)), (((2,), (4, 1), (1, 1)),),
             Reduction(one, ("i", "k"), combine))(cut(x[i : i + 2, :, k : k + 2], ((2,), (4, 1), (1, 1)), np.asarray))
        for i in (0, 2) for k in (0, 2, 4)
    ]  # fmt: skip
    assert_same(TreeReduce(aggregate, (2, 3))(partials), REDUCTIONS[name](x, axis=(0, 2)))


def test_combine_gets_one_level_of_lists_for_each_reduced_axis_in_the_order_of_axes() -> None:
    x = np.arange(6).reshape(2, 3)
    step = Reduction(lambda one, axis, keepdims: one.item(), ("j", "i"), lambda nested: nested)
    tile = Join("ij->", (("i", "j"),), ("i", "j"), (("i", 2), ("j", 3)), (((1, 1), (1, 1, 1)),), step)
    assert tile(cut(x, ((1, 1), (1, 1, 1)), np.asarray)) == [[0, 1, 2], [3, 4, 5]]


def test_aggregate_gets_lists_even_of_one_partial_result() -> None:
    step = Reduction(lambda one, axis, keepdims: one.sum().item(), ("i", "j"))
    tile = Join(
        "ij->", (("i", "j"),), ("i", "j"), (("i", 2), ("j", 3)), (((2,), (3,)),), step, lambda nested: nested
    )
    assert tile(np.arange(6).reshape(2, 3)) == [[15]]


def test_a_reduction_of_nothing_calls_its_functions_all_the_same() -> None:
    x = np.arange(3)
    step = Reduction(lambda one, axis, keepdims: one[::-1], (), None)
    assert_same(join("i->i", [x], step, finish=np.negative), -x[::-1])


@each_type
@pytest.mark.parametrize("function", [np.sum, np.max])
def test_a_reduction_stays_in_the_library_of_its_blocks(function: Any, make: Make) -> None:
    x = random((4, 6), "int64")
    fold = partial(_folded, chunk=function, axis=(0, 1))
    step = Reduction(function, ("i", "j"), fold)
    aggregate = partial(fold, keepdims=False)
    assert_same(join("ij->ij", [x], step, make, pieces=[((3, 1), (2, 4))], finish=aggregate), function(x))


# properties


@st.composite
def pieces_of(draw: st.DrawFn, extent: int) -> tuple[int, ...]:
    """Any lengths that add up, empty ones included."""
    marks = sorted(draw(st.lists(st.integers(0, extent), max_size=3)))
    return tuple(stop - start for start, stop in zip([0, *marks], [*marks, extent]))


@st.composite
def contractions(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]], list[Pieces], dict[str, int]]:
    extents = {label: draw(st.sampled_from([3, 2, 4, 1, 5, 0])) for label in "abcde"}
    operands = draw(st.lists(st.lists(st.sampled_from("abcd"), max_size=4), min_size=1, max_size=2))
    used = sorted({label for labels in operands for label in labels})
    output = draw(st.lists(st.sampled_from([*used, "e"]), unique=True))
    pieces = [tuple(draw(pieces_of(extents[label])) for label in labels) for labels in operands]
    shapes = [tuple(extents[label] for label in labels) for labels in operands]
    spec = f"{','.join(map(''.join, operands))}->{''.join(output)}"
    return spec, shapes, pieces, {"e": extents["e"]} if "e" in output else {}


@each_type
@settings(max_examples=300, deadline=None)
@given(contractions(), st.sampled_from(DTYPES), st.sampled_from([0, 1 << 60]), st.integers(0, 9))
def test_any_contraction_cut_anyhow_is_einsum(
    make: Make, problem: Any, dtype: str, small: int, seed: int
) -> None:
    spec, shapes, pieces, new = problem
    arrays = [random(shape, dtype, seed + n) for n, shape in enumerate(shapes)]
    with patch.object(kernels, "SMALL_CELL", small):
        found = join(spec, arrays, Contraction(dtype), make, pieces=pieces, **new)
    assert_same(found, einsum(spec, arrays, dtype, **new))


@settings(max_examples=100, deadline=None)
@given(contractions(), st.lists(st.sampled_from(["bool", "int8", "float32"]), min_size=2, max_size=2))
def test_operands_of_other_types_are_cast_to_that_of_the_result(problem: Any, dtypes: list[str]) -> None:
    spec, shapes, pieces, new = problem
    arrays = [random(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
    found = join(spec, arrays, Contraction("float64"), pieces=pieces, **new)
    assert_same(found, einsum(spec, arrays, "float64", **new))


@st.composite
def scalar_joins(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]], list[Pieces], dict[str, int]]:
    """Operands with some of the output's labels in any order and axes of length 1 that the output lacks."""
    extents = {label: draw(st.integers(0, 4)) for label in "abc"} | {"o": 1, "p": 1}
    output = draw(st.permutations("abc"))[: draw(st.integers(0, 3))]
    operands = draw(
        st.lists(st.lists(st.sampled_from([*output, "o", "p"]), unique=True), min_size=2, max_size=3)
    )
    pieces = [tuple(draw(pieces_of(extents[label])) for label in labels) for labels in operands]
    shapes = [tuple(extents[label] for label in labels) for labels in operands]
    spec = f"{','.join(map(''.join, operands))}->{''.join(output)}"
    return spec, shapes, pieces, {label: extents[label] for label in output}


def one_by_one(spec: str, arrays: list[np.ndarray], function: Any, extents: dict[str, int]) -> np.ndarray:
    """The oracle of scalar joins: every element for itself."""
    left, output = spec.split("->")
    result = np.empty(tuple(extents[label] for label in output), "int64")
    for index in np.ndindex(*result.shape):
        at = dict(zip(output, index))
        scalars = [
            array[tuple(at.get(label, 0) for label in labels)]
            for labels, array in zip(left.split(","), arrays)
        ]
        result[index] = function(scalars)
    return result


@each_type
@settings(max_examples=200, deadline=None)
@given(scalar_joins(), st.integers(0, 9))
def test_any_scalar_join_cut_anyhow_is_that_of_each_element(make: Make, problem: Any, seed: int) -> None:
    spec, shapes, pieces, extents = problem
    arrays = [random(shape, "int64", seed + n) // 16 for n, shape in enumerate(shapes)]
    step = Elementwise(lambda *slots: slots[0] - 2 * sum(slots[1:]), tuple(map(Slot, range(len(arrays)))))
    found = join(spec, arrays, step, make, pieces=pieces, **extents)
    assert_same(found, one_by_one(spec, arrays, lambda scalars: step.function(*scalars), extents))


@each_type
@settings(max_examples=200, deadline=None)
@given(contractions(), st.integers(0, 9))
def test_any_rearrangement_is_that_of_each_element(make: Make, problem: Any, seed: int) -> None:
    spec, shapes, pieces, new = problem
    left, output = spec.split("->")
    assume("," not in left and all(n == 1 or label in output for label, n in zip(left, shapes[0])))
    x = random(shapes[0], "int64", seed)
    found = join(spec, [x], Rearrange(), make, pieces=pieces, **new)
    extents = dict(zip(left, shapes[0])) | new
    assert_same(found, one_by_one(spec, [x], operator.itemgetter(0), extents))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(REDUCTIONS)), st.booleans())
def test_any_reduction_cut_anyhow_is_numpys(data: st.DataObject, name: str, merges: bool) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    axis = tuple(data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True, min_size=1)))
    pieces = tuple(tuple(n for n in data.draw(pieces_of(extent)) if n) for extent in shape)
    x = random(shape, "float64")
    one, combine, aggregate = protocol(name, axis)
    labels = "ijk"[: len(shape)]
    step = Reduction(one, tuple(labels[n] for n in axis), None if merges else combine)
    found = join(f"{labels}->{labels}", [x], step, pieces=[pieces], finish=aggregate)
    assert_same(np.asarray(found), np.asarray(REDUCTIONS[name](x, axis=axis)))


# travelling


def examples() -> list[Any]:
    """One kernel of each kind, with the values that are hardest to name."""
    matrices = (("i", "j"), ("j", "k"))
    extents = (("i", 2), ("j", 3), ("k", 2))
    pieces = (((2,), (3,)), ((3,), (2,)))
    vector = ((("i",),), ("i",), (("i", 2),), (((2,),),))
    cast = Elementwise(partial(np.ndarray.astype, order="C"), (Slot(0), np.dtype("int8")), (("copy", False),))
    return [
        Join("ij,jk->ik", matrices, ("i", "k"), extents, pieces, Contraction("float64")),
        Join("ij,jk->ik", matrices, ("i", "k"), extents, pieces, Contraction("float16", "float64", True)),
        Join("i->i", *vector, Elementwise(np.add, (Slot(0), 1.5))),
        Join("i->i", *vector, Elementwise(np.true_divide, (Slot(0), 1.5))),
        Join("i->i", *vector, cast),
        Join("i->i", *vector, Rearrange()),
        Join("i->i", *vector, Reduction(*protocol("mean", (0,))[:1], ("i",), protocol("mean", (0,))[1])),
        Join("i->i", *vector, Reduction(chunk.sum, ("i",)), protocol("sum", (0,))[2]),
        Join("->i", (), ("i",), (("i", 2),), (), Creation(np.full, (("fill_value", 1), ("dtype", "int8")))),
        Sum("float64"),
        TreeReduce(partial(_folded, chunk=chunk.sum, axis=(0,)), (2, 1)),
        Cut(((0, 2), (1, 3))),
    ]


@pytest.mark.parametrize("kernel", examples(), ids=repr)
def test_a_kernel_survives_pickling(kernel: Any) -> None:
    again = pickle.loads(pickle.dumps(kernel))
    assert tokenize(again) == tokenize(kernel)
    assert type(again) is type(kernel)


def test_kernels_are_named_alike_in_every_process_and_apart_from_each_other() -> None:
    tokens = [tokenize(kernel) for kernel in examples()]
    assert len({*tokens}) == len(tokens)
    code = "from dask.base import tokenize; from tests.test_kernels import examples; print(*map(tokenize, examples()))"
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        there = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert there.stdout.split() == tokens


def test_a_product_of_arrays_without_axes_is_an_array() -> None:
    tile = Join(",->", ((), ()), (), (), ((), ()), Contraction("int64"))
    result = tile(np.array(2), np.array(3))
    assert type(result) is np.ndarray and result == 6


def test_products_in_turn_lie_in_the_same_memory() -> None:
    x, y = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
    multiply = kernels._InTurn()
    first = multiply(x, y)
    again = multiply(2 * x, y)
    assert again is first
    np.testing.assert_array_equal(again, 2 * x @ y)
    # another shape, another type, another library
    assert multiply(y.T, x.T) is not first
    single = multiply(y.T.astype("f4"), x.T.astype("f4"))
    assert single.dtype == "f4"
    np.testing.assert_array_equal(multiply(y.T, x.T), y.T @ x.T)
    multiply = kernels._InTurn()
    first = multiply(x, y)
    assert multiply(StandIn(x), StandIn(y)) is not first


@pytest.mark.parametrize(
    ("block", "shape"),
    [(7, ()), (2.5, ()), ((np.ones(3),), (1, 3))],
    ids=["int", "float", "tuple of an array"],
)
def test_numbers_and_tuples_of_arrays_are_blocks_as_numpy_takes_them(
    block: Any, shape: tuple[int, ...]
) -> None:
    labels = tuple("ij"[: len(shape)])
    extents = tuple(zip(labels, shape))
    tile = Join("", (labels,), labels, extents, (tuple((n,) for n in shape),), kernels.Rearrange())
    np.testing.assert_array_equal(tile(block), np.asarray(block))
    assert tile(block).shape == shape


@pytest.mark.parametrize("pieces", [((5,), (7,)), ((2, 3), (3, 4))], ids=["one block", "in pieces"])
def test_masked_blocks_that_nobody_spoke_of_are_contracted_as_numpy_does(pieces: Any) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(5, 7)), random.normal(size=(7, 3))
    masked = np.ma.masked_array(x, random.random((5, 7)) < 0.5)
    masked[4] = np.ma.masked  # all of a row
    operands, extents = (("i", "j"), ("j", "k")), (("i", 5), ("j", 7), ("k", 3))
    rows, columns = (np.cumsum((0, *axis)) for axis in pieces)
    blocks = [masked[a:b, c:d] for a, b in pairwise(rows) for c, d in pairwise(columns)]
    tile = Join("ij,jk->ik", operands, ("i", "k"), extents, (pieces, ((7,), (3,))), Contraction("float64"))
    found = tile(blocks[0] if len(blocks) == 1 else blocks, y)
    expected = np.ma.dot(masked, y)
    np.testing.assert_array_equal(np.ma.getmaskarray(found), np.ma.getmaskarray(expected))
    np.testing.assert_allclose(found.filled(0), expected.filled(0))
    assert np.ma.getmaskarray(found).any() and not np.ma.getmaskarray(found).all()


def test_an_einsum_takes_what_lies_under_a_mask() -> None:
    x = np.ma.masked_array(np.arange(6).reshape(2, 3), np.eye(2, 3, dtype=bool))
    found = join("ij->i", [x], Contraction("int64", heeds_masks=False), np.ma.asarray)
    assert found.tolist() == np.einsum("ij->i", x).tolist() == [3, 12]


def test_masked_partial_results_are_added_up_where_they_are_valid() -> None:
    one = np.ma.masked_array([1.0, 2.0, 3.0], [True, False, True])
    found = Sum("float64", finish=np.negative)([one, np.ones(3), one])
    assert not np.ma.getmaskarray(found).any()
    assert found.tolist() == [-1, -5, -1]
    assert np.ma.getmaskarray(Sum("float64")([one, one])).tolist() == [True, False, True]


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_masked_in_one_piece_only_stays_masked(first: int) -> None:
    pieces = [np.array([1.0, 2.0]), np.ma.masked_array([3.0, 4.0], [True, False])]
    pieces = pieces[first:] + pieces[:first]
    double = Elementwise(np.multiply, (2, Slot(0)))
    tile = Join("i->i", (("i",),), ("i",), (("i", 4),), (((2, 2),),), double)
    found = tile(pieces)
    masked = [False, False, True, False]
    assert np.ma.getmaskarray(found).tolist() == masked[2 * first :] + masked[: 2 * first]
    assert sorted(found.compressed()) == [2, 4, 8]
