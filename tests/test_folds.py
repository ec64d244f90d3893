"""Kernels of the extended summation: bounded memory, products where they are exact enough, functions that stay pickled."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_eindecomp import folds, fused, grams
from dask_eindecomp.combining import Combine, Finish, Kept, LogSumExp, Merge
from dask_eindecomp.expression import AGGREGATES, JOINS, squared_difference
from dask_eindecomp.folds import Fold, FoldTree
from dask_eindecomp.kernels import Join

PAIRS = (("i", "k"), ("j", "k"))


def fold(join: Any, combine: Combine, x: Any, y: Any, dtype: str = "float64", **options: Any) -> Any:
    """``ik,jk->ij`` of two arrays."""
    extents = {"i": x.shape[0], "j": y.shape[0], "k": x.shape[1]}
    return Fold(join, combine, dtype, dtype, **options)(PAIRS, ("i", "j"), extents, x, y)


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng((seed, *shape)).normal(size=shape)


# memory


@pytest.mark.parametrize("join", [np.add, lambda a, b: a + b], ids=["ufunc", "function"])
def test_the_joined_cube_is_never_there(join: Any) -> None:
    x, y = numbers(300, 80), numbers(400, 80)
    cube = 300 * 400 * 80 * 8
    tracemalloc.start()
    found = fold(join, Combine(np.maximum, None), x, y)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_allclose(found[:7], (x[:7, None] + y).max(axis=-1))
    assert peak < found.nbytes + x.nbytes + y.nbytes + 4 * folds.BLOCK_NBYTES < cube / 10


@pytest.mark.parametrize("scratch", [1 << 12, 1 << 16])
def test_scratch_is_bounded_by_what_is_allowed(scratch: int) -> None:
    x, y = numbers(200, 50), numbers(210, 50)
    tracemalloc.start()
    fold(np.add, Combine(np.maximum, None), x, y, scratch=scratch)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 * 210 * 8 + x.nbytes + y.nbytes + scratch + (1 << 17)  # NumPy's own buffers


@given(st.data())
def test_blocks_of_any_size_give_the_same(data: st.DataObject) -> None:
    extents = {label: data.draw(st.integers(1, 40)) for label in "ijk"}
    x, y = (np.round(4 * numbers(extents[a], extents["k"], seed=n)) for n, a in enumerate("ij"))
    scratch = data.draw(st.sampled_from([1, 600, 5000, 1 << 20]))
    found = fold(np.subtract, Combine(np.add, 0), x, y, scratch=scratch)
    np.testing.assert_array_equal(found, (x[:, None] - y).sum(axis=-1))


# combining


def test_values_without_a_ufunc_are_combined_by_halves() -> None:
    calls = []

    def longer(one: Any, other: Any) -> Any:
        calls.append(len(one))
        return np.where(np.abs(one) >= np.abs(other), one, other)

    found = Combine(Kept(longer), None).along(np.array([[1.0], [-9.0], [3.0], [4.0], [5.0]]), "float64")
    assert found.tolist() == [-9.0]
    assert calls == [2, 1, 1]


def test_a_combine_function_of_another_shape_is_named_with_both() -> None:
    with pytest.raises(
        ValueError, match=r"combine function .* made \(1,\) of two arrays of shape \(2,\); expected"
    ):
        Merge(Combine(Kept(lambda a, b: (a + b)[:1]), None))([np.ones(2), np.ones(2)])


def test_nothing_has_a_value_only_where_there_is_an_identity() -> None:
    empty = np.ones((2, 0))
    assert fold(np.add, Combine(np.add, 0), empty, empty).tolist() == [[0, 0], [0, 0]]
    with pytest.raises(
        ValueError, match="has no identity and combines no values; expected an axis of 1 or more"
    ):
        fold(np.add, Combine(np.maximum, None), empty, empty)


def test_partial_results_are_not_changed_when_they_are_merged() -> None:
    partials = [np.array([1.0, 5.0]), np.array([4.0, 2.0]), np.array([3.0, 3.0])]
    kept = [one.copy() for one in partials]
    assert Merge(Combine(np.maximum, None))(partials).tolist() == [4, 5]
    assert FoldTree(Combine(np.maximum, None))(
        [[one[:, None]] for one in partials], (1,), False
    ).tolist() == [4, 5]
    for one, before in zip(partials, kept):
        np.testing.assert_array_equal(one, before)


def test_exponentials_beyond_any_number_have_a_logarithm() -> None:
    values = np.array([[1000.0, -1000.0, -np.inf, np.inf, np.nan], [1000.0, -999.0, -np.inf, 0.0, 1.0]])
    found = LogSumExp(np.logaddexp, -np.inf).along(values, "float64")
    np.testing.assert_allclose(found, np.logaddexp.reduce(values, axis=0), rtol=1e-14)


def test_a_finish_of_another_shape_is_named_with_both() -> None:
    with pytest.raises(ValueError, match=r"finalize function .* made \(\) of an array of shape \(2,\)"):
        Finish("float64", Kept(lambda total: total.sum()))(np.ones(2))


def test_cells_of_a_tile_are_combined_and_not_added() -> None:
    x, y = numbers(4, 9), numbers(5, 9)
    step = Fold(np.add, Combine(np.maximum, None), "float64", "float64")
    extents = (("i", 4), ("j", 5), ("k", 9))
    tile = Join("ik,jk->ij", PAIRS, ("i", "j"), extents, (((4,), (2, 7)), ((3, 2), (9,))), step)
    found = tile([x[:, :2], x[:, 2:]], [y[:3], y[3:]])
    np.testing.assert_array_equal(found, (x[:, None] + y).max(axis=-1))
    own = Fold(np.add, Combine(Kept(np.fmax), None), "float64", "float64")
    np.testing.assert_array_equal(
        Join("ik,jk->ij", PAIRS, ("i", "j"), extents, (((4,), (2, 7)), ((3, 2), (9,))), own)(
            [x[:, :2], x[:, 2:]], [y[:3], y[3:]]
        ),
        found,
    )


# functions that stay pickled


def test_a_kept_function_is_equal_to_itself_and_called_after_a_journey() -> None:
    kept = Kept(np.arctan2)
    again = pickle.loads(pickle.dumps(kept))
    assert (again, hash(again), repr(again)) == (kept, hash(kept), "arctan2")
    assert again(1.0, 1.0) == pytest.approx(np.pi / 4)
    assert kept != np.arctan2


def test_a_module_that_is_missing_is_not_missed_until_the_function_is_called(tmp_path: Any) -> None:
    (tmp_path / "only_on_workers.py").write_text("def join(a, b):\n    return a + b\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import only_on_workers

        pickled = pickle.dumps(Kept(only_on_workers.join))
    finally:
        sys.path.remove(str(tmp_path))
    code = f"import pickle; kept = pickle.loads({pickled!r}); print(kept, pickle.dumps(kept) == {pickled!r}); kept(1, 2)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "join True"
    assert "ModuleNotFoundError: No module named 'only_on_workers'" in run.stderr


# products instead of differences


def exact(x: Any, y: Any) -> Any:
    """Squared distances in extended precision."""
    difference = x[:, None].astype(np.longdouble) - y[None].astype(np.longdouble)
    return (difference * difference).sum(axis=-1)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 3e-7), ("float64", 1e-12)])
@pytest.mark.parametrize("offset", [0, 1e4, 1e6])
@pytest.mark.parametrize("kind", ["far apart", "in clusters", "some equal"])
def test_squared_distances_keep_their_relative_error(
    dtype: str, limit: float, offset: float, kind: str
) -> None:
    x, y = numbers(60, 64), numbers(70, 64, seed=1)
    if kind == "in clusters":
        x, y = x * 1e-3 + 9 * (np.arange(60) % 3)[:, None], y * 1e-3 + 9 * (np.arange(70) % 4)[:, None]
    x, y = (x + offset).astype(dtype), (y + offset).astype(dtype)
    if kind == "some equal":
        y[:40] = x[:40]
        y[40:50] = np.nextafter(x[40:50], np.inf, dtype=dtype)
    found = fold(
        squared_difference, Combine(np.add, 0), x, y, dtype=dtype, pairwise=("squared_difference", "sum")
    )
    expected = exact(x, y)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected.astype(float), rtol=limit, atol=0)


def test_distances_of_far_points_come_from_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grams, "_directly", None)  # calling it would fail
    x, y = numbers(200, 64), numbers(300, 64, seed=1)
    found = grams.squared_distances(x[None], y[None], "float64", "float64", 1 << 20)[0]
    np.testing.assert_allclose(found, exact(x, y).astype(float), rtol=1e-12)


def test_distances_without_scipy_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = numbers(20, 5), numbers(30, 5, seed=1)
    with_scipy = grams.squared_distances(x[None], y[None], "float64", "float64", 1 << 20)
    monkeypatch.setitem(sys.modules, "scipy.spatial.distance", None)
    without = grams.squared_distances(x[None], y[None], "float64", "float64", 1 << 20)
    assert with_scipy is not None and without is not None
    np.testing.assert_allclose(without, with_scipy, rtol=1e-13)


@pytest.mark.parametrize("scratch", [1, 1 << 14, 1 << 22])
def test_stacks_of_points_are_taken_in_any_scratch(scratch: int) -> None:
    x, y = numbers(3, 40, 16), numbers(3, 50, 16, seed=1)
    y[:, :9] = x[:, :9]
    found = Fold(
        squared_difference, Combine(np.add, 0), "float64", "float64", ("squared_difference", "sum"), scratch
    )((("b", "i", "k"), ("b", "j", "k")), ("j", "b", "i"), {"b": 3, "i": 40, "j": 50, "k": 16}, x, y)
    expected = ((x[:, :, None] - y[:, None]) ** 2).sum(axis=-1).transpose(2, 0, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("names", grams.PAIRWISE)
def test_what_is_not_all_pairs_of_rows_goes_block_by_block(names: tuple[str, str]) -> None:
    x, y = np.abs(numbers(5, 6)), np.abs(numbers(6, seed=1))
    join, aggregate = JOINS[names[0]], AGGREGATES[names[1]]
    dtypes = ("bool", "bool") if names[1] == "any" else ("float64", "float64")
    # i is contracted and in one operand alone
    step = Fold(join, Combine(aggregate.combine, aggregate.identity), *dtypes, names)
    found = step((("i", "k"), ("k",)), ("k",), {"i": 5, "k": 6}, x, y)
    np.testing.assert_allclose(found, aggregate.combine.reduce(join(x, y), axis=0))


@pytest.mark.parametrize("scratch", [1, 1 << 20])
def test_manhattan_distances_are_scipys_or_go_block_by_block(
    scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = numbers(2, 20, 5), numbers(2, 30, 5, seed=1)
    x[0, 3, 1], y[1, 4, 2], x[1, 7, 2] = np.nan, np.inf, np.inf
    with np.errstate(invalid="ignore"):
        expected = np.abs(x[:, :, None] - y[:, None]).sum(axis=-1)
    found = grams.manhattan_distances(x, y, "float64", "float64", scratch)
    np.testing.assert_allclose(found, expected, rtol=1e-13)
    assert grams.manhattan_distances(x[:, :0], y, "float64", "float64", 1).shape == (2, 0, 30)
    whole = x.real.astype(complex)
    assert grams.manhattan_distances(whole, y, "float64", "float64", 1) is None
    monkeypatch.setitem(sys.modules, "scipy.spatial.distance", None)
    assert grams.manhattan_distances(x, y, "float64", "float64", 1) is None


def test_whether_two_are_ever_true_at_once_is_a_product() -> None:
    x, y = numbers(40, 30) > 1.2, numbers(50, 30, seed=1) > 1.2
    expected = (x[:, None] & y).any(axis=-1)
    assert 0 < expected.sum() < expected.size
    for scratch in (1, 1 << 20):
        np.testing.assert_array_equal(grams.ever_both(x[None], y[None], "bool", "bool", scratch)[0], expected)
    assert grams.ever_both(x[None, :0], y[None], "bool", "bool", 1).shape == (1, 0, 50)
    weights = np.where(x, np.nan, 0.0)  # what is not a number is not zero
    np.testing.assert_array_equal(
        grams.ever_both(weights[None], y[None], "float64", "bool", 1 << 20)[0], expected
    )


# CuPy


class Compiled:
    """What stands in for ``cupy.ReductionKernel``: C expressions, read as Python's by NumPy."""

    made: ClassVar[list[str]] = []

    def __init__(
        self, inputs: str, outputs: str, mapped: str, reduced: str, post: str, identity: str, name: str
    ) -> None:
        self.mapped, self.reduced, self.identity = mapped, reduced, identity
        self.dtype = outputs.split()[0]
        assert (inputs, post) == (f"{self.dtype} x, {self.dtype} y", "z = a")
        self.made.append(name)

    def __call__(self, x: Any, y: Any, axis: tuple[int, ...]) -> Any:
        x, y = np.broadcast_arrays(x.values, y.values)
        joined = np.vectorize(
            lambda x, y: _c(self.mapped, x=np.float64(x), y=np.float64(y)), otypes=[self.dtype]
        )(x, y)
        moved = np.moveaxis(joined, axis, range(len(axis)))
        total = _c(self.identity)
        result = np.full(moved.shape[len(axis) :], total, self.dtype)
        for values in moved.reshape(-1, *result.shape):
            result = np.vectorize(lambda a, b: _c(self.reduced, a=a, b=b), otypes=[self.dtype])(
                result, values
            )
        return result


def _c(expression: str, **values: Any) -> Any:
    """The value of a C expression with at most two conditional operators."""
    condition, asked, rest = expression.partition(" ? ")
    if asked:
        first, _, last = rest.partition(" : ")
        if condition.count("(") < condition.count(")"):
            return _c(expression[1:-1], **values)
        return _c(first if _c(condition, **values) else last, **values)
    if expression.startswith("(") and expression.endswith(")") and " - y) * (" not in expression:
        return _c(expression[1:-1], **values)
    return eval(
        expression.replace("||", " or "),
        {"exp": np.exp, "fabs": np.fabs, "hypot": np.hypot, "INFINITY": np.inf, **values},
    )


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An array type that says it is CuPy's."""
    Compiled.made.clear()
    fused._kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ReductionKernel=Compiled))
    yield type("ndarray", (SimpleNamespace,), {"__module__": "cupy"})
    fused._kernel.cache_clear()


def on_gpu(kind: Any, arrays: Sequence[Any]) -> list[Any]:
    return [kind(values=array, dtype=array.dtype) for array in arrays]


@pytest.mark.parametrize("combine", [np.add, np.multiply, np.maximum, np.minimum], ids=str)
@pytest.mark.parametrize("join", sorted({*fused.JOINS} - {"true_divide"}))
def test_a_fused_kernel_says_what_numpy_does(cupy: Any, join: str, combine: Any) -> None:
    x, y = numbers(2, 3, 1), numbers(2, 1, 4)
    x[0, 1], y[1, 0, 2], y[0, 0, 3] = np.nan, np.inf, 0.0
    with np.errstate(all="ignore"):
        found = fused.fused(JOINS[join], combine, "float64", on_gpu(cupy, (x, y)), (0,))
        expected = combine.reduce(JOINS[join](x, y), axis=0)
    np.testing.assert_allclose(found, expected)
    assert len(Compiled.made) == 1


def test_what_has_no_fused_kernel_goes_block_by_block(cupy: Any) -> None:
    x, y = numbers(2, 3, 1), numbers(2, 1, 4)
    pair = on_gpu(cupy, (x, y))
    assert fused.fused(np.arctan2, np.add, "float64", pair, (0,)) is None
    assert fused.fused(np.add, np.logaddexp, "float64", pair, (0,)) is None
    assert fused.fused(np.add, np.add, "float32", pair, (0,)) is None
    assert fused.fused(lambda x, y: x + y, np.add, "float64", pair, (0,)) is None
    assert fused.fused(np.add, np.add, "float64", [x, y], (0,)) is None
    assert not Compiled.made
