"""Whoever sets the hook can forget it: everything around the values is as plain Dask gives it."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

from dask_eindecomp import EinDecomp, Topology, einsum

HOOK = EinDecomp(force=True, topology=Topology(workers=4))
X = np.arange(48.0).reshape(6, 8) - 20


def lazy(values: np.ndarray = X, chunks: Any = 3) -> da.Array:
    return da.from_array(values, chunks=chunks)


def planned(array: Any, **options: Any) -> Any:
    """The value with every plan applied."""
    with dask.config.set(array_optimize=HOOK):
        return dask.compute(array, scheduler="sync", **options)[0]


def plain(array: Any) -> Any:
    """The value without the hook."""
    return dask.compute(array, scheduler="sync")[0]


# floating point


LOUD: dict[str, Callable[[], da.Array]] = {
    "division by zero": lambda: 1 / (lazy() * 0),
    "0 / 0": lambda: (lazy() * 0) / (lazy() * 0),
    "overflow": lambda: np.exp(lazy() * 1000),
    "root of what is negative": lambda: np.sqrt(lazy()).sum(axis=0),
    "overflow of a sum": lambda: (lazy().astype("float32") * np.float32(1e37)).sum(dtype="float32"),
    "inf - inf in a product": lambda: (lazy() * np.inf) @ lazy(X.T),
    "mean of nothing": lambda: lazy(X[:0]).mean(axis=0),
    "cast of what is no number": lambda: np.sqrt(lazy()).astype("int32"),
}
"""Expressions at which NumPy warns."""


def warned(compute: Callable[[da.Array], Any], array: da.Array) -> set[tuple[type[Warning], str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compute(array)
    return {(one.category, str(one.message)) for one in found}


@pytest.mark.parametrize("make", LOUD.values(), ids=LOUD)
def test_the_same_is_warned_of(make: Callable[[], da.Array]) -> None:
    assert warned(planned, make()) == warned(plain, make())


@pytest.mark.parametrize("make", [*LOUD.values()][:5], ids=[*LOUD][:5])
def test_the_error_state_is_heeded(make: Callable[[], da.Array]) -> None:
    with np.errstate(all="raise"):
        for compute in (plain, planned):
            with pytest.raises(FloatingPointError):
                compute(make())
    with np.errstate(all="ignore"):
        assert not warned(planned, make())


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x * -0.0,
        lambda x: -x,
        lambda x: x.sum(axis=1),
        lambda x: x.max(axis=0),
        lambda x: x.min(axis=0),
        lambda x: np.maximum(x, 0.0),
        lambda x: x.prod(axis=0),
        lambda x: da.einsum("ij->ji", x) / 3,
        lambda x: np.copysign(1.0, x),
    ],
)
def test_zeros_keep_their_signs(make: Callable[[da.Array], da.Array]) -> None:
    zeros = np.array([[0.0, -0.0, -0.0, -0.0], [-0.0, -0.0, 0.0, -0.0]])
    array = make(lazy(zeros, 2))
    np.testing.assert_array_equal(np.signbit(planned(array)), np.signbit(plain(array)))


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "int16", "uint64", "float16", "float32", "complex64"]
)
@pytest.mark.parametrize("other", ["int8", "uint32", "float16", "float64"])
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_types_are_promoted_and_wrap_around_as_in_dask(dtype: str, other: str) -> None:
    values = (np.arange(48).reshape(6, 8) % 16 * 9).astype(dtype)
    x, y = lazy(values), lazy(abs(values[::-1]).astype(other))
    for array in (x + y, x * y, x.astype(other) * y, x.sum(axis=0), x.mean(axis=1), (x - y).max(axis=0)):
        with np.errstate(all="ignore"):
            found, expected = planned(array), plain(array)
        assert found.dtype == expected.dtype
        rough = 4 * np.finfo(expected.dtype).eps if expected.dtype.kind in "fc" else 0
        np.testing.assert_allclose(found, expected, rtol=rough)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.sum().astype("float32"),
        lambda x: da.einsum("ij->", x).astype("complex64"),
        lambda x: x.mean() * 2,
        lambda x: da.vdot(x, x).astype("int64"),
        lambda x: da.where(x.max() > 0, x.max(), 0),
        lambda x: da.from_array(np.array(3.0)).astype("float32") + x.min(),
        lambda x: da.from_array(np.array(3.0)).astype("float32"),
        lambda x: x.sum().round(1)[None],
    ],
)
def test_results_without_axes_are_scalars_where_they_are_in_dask(
    make: Callable[[da.Array], da.Array],
) -> None:
    found, expected = planned(make(lazy())), plain(make(lazy()))
    assert type(found) is type(expected)
    assert found == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda x: da.einsum("ij,kj->ik", x, x),
        lambda x: da.einsum("ij->j", x) + 1,
        lambda x: da.tensordot(x, x.T, 1),
    ],
)
def test_masks_that_nobody_spoke_of_are_heeded_where_dask_does(make: Callable[[da.Array], da.Array]) -> None:
    whole = X.astype(int)
    masked = lazy(whole).map_blocks(lambda block: np.ma.masked_greater(block, 5), meta=whole[:0])
    found, expected = planned(make(masked)), plain(make(masked))
    assert type(found) is type(expected)
    np.testing.assert_array_equal(np.ma.getmaskarray(found), np.ma.getmaskarray(expected))
    np.testing.assert_array_equal(np.ma.filled(found, 0), np.ma.filled(expected, 0))


# errors


class Refused(Exception):
    """A user's own."""


def refusing(block: np.ndarray) -> np.ndarray:
    if block.size and block.max() > 20:
        raise Refused(f"{block.max():g} is beyond 20")
    return block


def joining(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.size > 1 or y.size > 1:
        refusing(np.array([21.0]))
    return x + y


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.map_blocks(refusing, meta=x._meta) @ x.T,
        lambda x: (x @ x.T).map_blocks(refusing, meta=x._meta),
        lambda x: einsum("ij,kj->ik", x, x, join=joining, aggregate="max"),
    ],
    ids=["before", "after", "join"],
)
def test_an_exception_of_a_users_function_comes_with_its_own_traceback(
    make: Callable[[da.Array], da.Array],
) -> None:
    with pytest.raises(Refused, match="is beyond 20") as error:
        planned(make(lazy()))
    assert "refusing" in [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]


# keys


class Tokenized:
    """Known by a token of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __dask_tokenize__(self) -> tuple[str, int]:
        return "Tokenized", self.number


def shifted(block: np.ndarray, by: Tokenized) -> np.ndarray:
    return block + by.number


def test_tokens_of_a_users_own_are_used() -> None:
    def made(number: int) -> da.Array:
        return lazy().map_blocks(shifted, Tokenized(number), meta=X[:0]) @ lazy(X.T)

    assert made(1).name == made(1).name != made(2).name
    np.testing.assert_array_equal(planned(made(1)), (X + 1) @ X.T)
    np.testing.assert_array_equal(planned(made(2)), (X + 2) @ X.T)


SCRIPT = """
import dask, dask.array as da, numpy as np
from dask_eindecomp import EinDecomp, Topology
x, y = (da.from_array(np.arange(64.0).reshape(8, 8) + n, chunks=3) for n in range(2))
results = [
    da.einsum("ij,jk,kl->il", x, y, x), (x @ y).sum(axis=0) / x.mean(), np.exp(x - x.max(axis=1, keepdims=True)) @ y,
    da.tensordot(x, y, axes=([0, 1], [1, 0])), (x @ y)[2:5] + x[2:5],
]
with dask.config.set(array_optimize=EinDecomp(force=True, topology=Topology(workers=4))):
    for result in results:
        print(sorted(map(str, dict(dask.optimize(result)[0].__dask_graph__()))))
"""


def test_keys_are_the_same_in_processes_of_other_hash_seeds() -> None:
    found = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env=os.environ | {"PYTHONHASHSEED": seed}, check=True,
            capture_output=True, text=True, cwd=Path(__file__).parent.parent,
        ).stdout
        for seed in ("0", "1", "271828")
    ]  # fmt: skip
    assert found[0] == found[1] == found[2]
    assert found[0].count("join-") > 5


def test_two_threads_of_two_processes_make_the_same_of_many_graphs() -> None:
    count = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 40
    command = [sys.executable, "-m", "tests.concurrent", str(count)]
    running = [
        subprocess.Popen(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parent.parent,
        )
        for seed in ("0", "1")
    ]  # fmt: skip
    found = [line.split() for process in running for line in process.communicate()[0].splitlines()]
    assert [process.returncode for process in running] == [0, 0]
    assert len(found) == 4 and all(one == found[0] for one in found)
    assert len(set(found[0])) > 0.9 * count  # some are the same product


# together with everything else


def test_computing_twice_gives_the_same() -> None:
    array = lazy() @ lazy(X.T)
    first, second = planned(array), planned(array)
    np.testing.assert_array_equal(first, X @ X.T)
    assert first.tobytes() == second.tobytes()
    first[:] = 0  # nobody else's memory
    np.testing.assert_array_equal(planned(array), X @ X.T)


def test_a_collection_may_be_part_of_several_graphs() -> None:
    product = lazy() @ lazy(X.T)
    one, two = product + 1, product.T * 2
    np.testing.assert_array_equal(planned(one), X @ X.T + 1)
    np.testing.assert_array_equal(planned(two), X @ X.T * 2)
    for found, expected in zip(planned([one, two, product]), (X @ X.T + 1, X @ X.T * 2, X @ X.T)):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.filterwarnings("ignore:Computing mixed collections")
def test_bags_dataframes_and_delayed_values_may_be_computed_beside() -> None:
    bag = pytest.importorskip("dask.bag").from_sequence(range(10), npartitions=3)
    total = dask.delayed(sum)([1, 2, 3])
    mixed: list[Any] = [
        lazy() @ lazy(X.T),
        bag.map(lambda n: n * 2),
        total,
        dask.delayed(np.add)(lazy().sum(), 1),
    ]
    pandas = pytest.importorskip("pandas")
    frames = pytest.importorskip("dask.dataframe")
    table = pandas.DataFrame({"a": range(10), "b": np.arange(10.0)})
    frame = frames.from_pandas(table, npartitions=2)
    mixed += [frame.b.sum(), frame.to_dask_array(lengths=True) @ lazy(np.ones((2, 3)), 1)]
    # Dask gives results of array and of expression collections in an order of its own
    expected = dask.compute(*mixed, scheduler="sync")
    with dask.config.set(array_optimize=HOOK):
        found = dask.compute(*mixed, scheduler="sync")
    assert len(found) == len(mixed)
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)


def test_without_optimisation_the_graph_is_the_users() -> None:
    array = lazy() @ lazy(X.T)
    np.testing.assert_array_equal(planned(array, optimize_graph=False), X @ X.T)


class Tagged(np.ndarray):
    """A subclass of NumPy's array."""


def test_blocks_of_a_subclass_stay_of_it() -> None:
    array = da.from_array(X.view(Tagged), chunks=3, asarray=False)
    for made in (array + 1, array.map_blocks(np.square), array @ array.T, array.sum(axis=0)):
        found, expected = planned(made), plain(made)
        assert type(found) is type(expected)
        np.testing.assert_array_equal(found, expected)


def test_settings_may_be_nested() -> None:
    array = lazy() @ lazy(X.T)

    def keys() -> set[str]:
        return set(map(str, dict(dask.optimize(array)[0].__dask_graph__())))

    dasks = keys()
    with dask.config.set(array_optimize=HOOK):
        ours = keys()
        with dask.config.set(array_optimize=None):
            assert keys() != ours
            with dask.config.set(array_optimize=HOOK):
                assert keys() == ours
        assert keys() == ours
    assert keys() == dasks
