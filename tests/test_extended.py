"""Extended summation: what NumPy says of any join, aggregate and element type, whatever the chunks and the plan."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_eindecomp import Aggregate, EinDecomp, Topology, einsum, explain
from dask_eindecomp.contract import contract
from dask_eindecomp.estimate import price
from dask_eindecomp.expression import AGGREGATES, JOINS, Expression, ExpressionError
from dask_eindecomp.hook import apply
from dask_eindecomp.lift import lift
from tests import oracle, strategies
from tests.standin import StandIn

# so slow, on a network so fast, that even a small problem is worth sharing
EAGER = Topology(4, bandwidth=1e12, latency=0, flops=1e5, task_overhead=0)
FORCED = EinDecomp(force=True, topology=EAGER)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTEGERS, "float16", "float32", "float64", "complex64", "complex128")

NUMPY_JOINS: dict[str, Callable[..., Any]] = {
    "multiply": np.multiply,
    "add": np.add,
    "subtract": np.subtract,
    "divide": np.true_divide,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "squared_difference": lambda x, y: np.square(np.subtract(x, y)),
    "absolute_difference": lambda x, y: (
        np.maximum(x, y) - np.minimum(x, y) if x.dtype.kind == "u" else np.abs(np.subtract(x, y))
    ),
    "equal": np.equal,
    "less": np.less,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "power": np.power,
    "hypot": np.hypot,
    "exp_difference": lambda x, y: np.exp(np.subtract(x, y)),
}
NUMPY_AGGREGATES: dict[str, Callable[..., Any]] = {
    "sum": np.sum,
    "prod": np.prod,
    "max": np.max,
    "min": np.min,
    "any": np.any,
    "all": np.all,
    "logsumexp": lambda values, axis: np.logaddexp.reduce(values, axis=axis),
    "mean": np.mean,
    "count": np.count_nonzero,
}


def values(dtype: str, *shape: int, seed: int = 0) -> Any:
    """Small values, so that integers and half precision do not overflow at once; some of them equal."""
    random = np.random.default_rng((seed, *shape))
    kind = np.dtype(dtype).kind
    if kind == "b":
        return random.random(shape) < 0.6
    if kind in "iu":
        return random.integers(0 if kind == "u" else -3, 4, shape).astype(dtype)
    found = random.integers(-6, 7, shape) / 4
    return (found + 1j * random.integers(-2, 3, shape) if kind == "c" else found).astype(dtype)


def tolerance(*dtypes: Any) -> float:
    eps = [np.finfo(dtype).eps for dtype in dtypes if np.dtype(dtype).kind in "fc"]
    return 40 * float(max(eps, default=0))


def numpy_result(join: str, aggregate: str, x: Any, y: Any) -> Any:
    """What NumPy's broadcasting makes of ``ik,jk->ij``; products are summed by its einsum."""
    if (join, aggregate) == ("multiply", "sum"):
        return np.einsum("ik,jk->ij", x, y)
    return NUMPY_AGGREGATES[aggregate](NUMPY_JOINS[join](x[:, None], y[None]), axis=-1)


def computed(array: Any, optimizer: Any) -> Any:
    with dask.config.set(array_optimize=optimizer, scheduler="synchronous"):
        return array.compute()


def plain(array: Any) -> Any:
    return computed(array, da.optimization.optimize)


def check(found: Any, expected: Any, limit: float) -> None:
    assert found.dtype == np.asarray(expected).dtype
    assert found.shape == np.asarray(expected).shape
    np.testing.assert_allclose(found, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("join", JOINS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_join_and_any_aggregate_are_those_of_numpy(join: str, dtype: str) -> None:
    X, Y = values(dtype, 7, 9), values(dtype, 5, 9, seed=1)
    if join == "power" and np.dtype(dtype).kind == "i":
        Y = np.abs(Y)  # NumPy refuses negative powers of integers when it meets them
    x, y = da.from_array(X, chunks=(4, 5)), da.from_array(Y, chunks=(5, 9))
    arrays, expected = [], []
    for aggregate in AGGREGATES:
        try:
            wanted = numpy_result(join, aggregate, X, Y)
        except TypeError:
            with pytest.raises(TypeError, match=r"takes no .*; expected"):
                einsum("ik,jk->ij", x, y, join=join, aggregate=aggregate)
            continue
        arrays.append(einsum("ik,jk->ij", x, y, join=join, aggregate=aggregate))
        expected.append(wanted)
    if arrays:
        plan = explain(*arrays, hook=FORCED)
        assert [choice.tiles >= 4 for choice in plan.choices] == [True] * len(arrays)
        assert not plan.left_alone
    for optimizer in (da.optimization.optimize, FORCED):
        with dask.config.set(array_optimize=optimizer, scheduler="synchronous"):
            for array, found, wanted in zip(arrays, dask.compute(*arrays), expected, strict=True):
                assert array.dtype == wanted.dtype
                check(found, wanted, tolerance(dtype, wanted.dtype))


def test_every_join_and_aggregate_has_an_oracle() -> None:
    assert NUMPY_JOINS.keys() == JOINS.keys()
    assert NUMPY_AGGREGATES.keys() == AGGREGATES.keys()


@pytest.mark.parametrize(("join", "aggregate"), [("subtract", "sum"), ("hypot", "max")])
def test_what_a_join_does_not_take_is_refused_with_what_it_does(join: str, aggregate: str) -> None:
    dtype, taken = (
        ("bool", "integer or real or complex")
        if join == "subtract"
        else ("complex64", "bool or integer or real")
    )
    x = da.ones((4, 4), dtype=dtype)
    with pytest.raises(
        TypeError, match=rf"join '{join}' takes no {dtype} and {dtype} values; expected {taken}"
    ):
        einsum("ik,jk->ij", x, x, join=join, aggregate=aggregate)


@given(st.data())
def test_any_viable_partition_gives_what_numpy_gives(data: st.DataObject) -> None:
    join, aggregate = (
        data.draw(st.sampled_from(sorted(JOINS))),
        data.draw(st.sampled_from(sorted(AGGREGATES))),
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = [data.draw(st.integers(1, 9)) for _ in range(3)]
    X, Y = (values(dtype, shape[n], shape[2], seed=n) for n in range(2))
    Y = np.abs(Y) if join == "power" and Y.dtype.kind == "i" else Y
    x, y = (
        da.from_array(X, chunks=data.draw(st.integers(1, 4))),
        da.from_array(Y, chunks=data.draw(st.integers(1, 4))),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            expected = numpy_result(join, aggregate, X, Y)
        except TypeError:
            return
        array = einsum("ik,jk->ij", x, y, join=join, aggregate=aggregate)
        lifted = lift(array.dask, array.__dask_keys__())
        graph = contract(lifted.graph)
        partitions = {name: data.draw(strategies.partitions(node)) for name, node in graph.nodes.items()}
        plan = price(graph, partitions, EAGER)
        planned = apply(array.dask, array.__dask_keys__(), lifted, graph, plan)
        found = da.Array(planned, array.name, array.chunks, array.dtype)
        check(
            found.compute(scheduler="synchronous", optimize_graph=False),
            expected,
            tolerance(dtype, expected.dtype),
        )


@given(strategies.expressions(), st.data())
def test_any_subscripts_give_what_their_definition_says(
    drawn: tuple[Expression, dict[str, int]], data: st.DataObject
) -> None:
    expression, extents = drawn
    arrays = [
        values("float64", *(extents[label] for label in labels), seed=n)
        for n, labels in enumerate(expression.operands)
    ]
    lazy = [da.from_array(array, chunks=data.draw(st.integers(1, 4))) for array in arrays]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if not all(extents.values()) and AGGREGATES[str(expression.aggregate)].identity is None:
            return
        expected = oracle.evaluate_expression(expression, arrays, extents)
        options = {"join": expression.join, "aggregate": expression.aggregate}
        array = einsum(expression.einsum, *lazy, **options)
        assert array.shape == tuple(extents[label] for label in expression.output)
        for found in (plain(array), computed(array, FORCED)):
            np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


@given(st.data())
def test_any_plan_gives_what_numpy_gives(data: st.DataObject) -> None:
    join, aggregate = (
        data.draw(st.sampled_from(sorted(JOINS))),
        data.draw(st.sampled_from(sorted(AGGREGATES))),
    )
    shape = [data.draw(st.integers(1, 9)) for _ in range(3)]
    X, Y = (values("float64", shape[n], shape[2], seed=n) for n in range(2))
    cuts = [data.draw(st.integers(1, max(extent, 1))) for extent in (*shape, shape[2])]
    x, y = da.from_array(X, chunks=(cuts[0], cuts[2])), da.from_array(Y, chunks=(cuts[1], cuts[3]))
    workers = data.draw(st.integers(1, 7))
    objective = data.draw(st.sampled_from(["seconds", "bytes", "paper"]))
    hook = EinDecomp(
        force=True,
        objective=objective,
        topology=Topology(workers, bandwidth=1e12, latency=0, flops=1e4, task_overhead=0),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = numpy_result(join, aggregate, X, Y)
        array = einsum("ik,jk->ij", x, y, join=join, aggregate=aggregate)
        check(plain(array), expected, 1e-12)
        check(computed(array, hook), expected, 1e-12)


@pytest.mark.parametrize("optimizer", [da.optimization.optimize, FORCED], ids=["plain", "planned"])
@pytest.mark.parametrize("join", ["squared_difference", "absolute_difference", "add", "minimum", "equal"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_infinities_and_what_is_not_a_number_are_as_in_numpy(
    join: str, aggregate: str, optimizer: Any
) -> None:
    X, Y = values("float64", 6, 10), values("float64", 5, 10, seed=1)
    X[0, 3], X[1, 9], X[2, 0], Y[3, 2], Y[4, 5] = np.nan, np.inf, -np.inf, np.inf, -np.inf
    X[5], Y[0] = -np.inf, np.nan
    expected = numpy_result(join, aggregate, X, Y)
    x, y = da.from_array(X, chunks=(4, 3)), da.from_array(Y, chunks=(2, 10))
    found = computed(einsum("ik,jk->ij", x, y, join=join, aggregate=aggregate), optimizer)
    check(found, expected, tolerance("float64", expected.dtype))


# subscripts


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("ij,jk", [(3, 4), (4, 5)]),
        ("ij->ji", [(3, 4)]),
        ("ii->i", [(4, 4)]),
        ("ij->", [(3, 4)]),
        (",i->i", [(), (5,)]),
        ("...k,jk->...j", [(2, 3, 4), (5, 4)]),
        ("...k,...k", [(3, 4), (2, 3, 4)]),
        ("ij,jk,kl->il", [(3, 4), (4, 5), (5, 2)]),
        ("i,j,k->", [(3,), (4,), (5,)]),
        ("ij,jk->ik", [(3, 1), (6, 5)]),
        ("bij,bjk->bik", [(1, 3, 4), (6, 4, 5)]),
        ("ij,j", [(3, 4), (4,)]),
    ],
)
def test_products_are_those_of_numpys_einsum(subscripts: str, shapes: list[tuple[int, ...]]) -> None:
    arrays = [values("float64", *shape, seed=n) for n, shape in enumerate(shapes)]
    expected = np.einsum(subscripts, *arrays)
    lazy = einsum(subscripts, *(da.from_array(array, chunks=2) for array in arrays))
    check(plain(lazy), expected, 1e-12)
    check(computed(lazy, FORCED), expected, 1e-12)


def test_labels_may_be_numbers_and_more_than_the_alphabet_has() -> None:
    X, Y = values("float64", 3, 4), values("float64", 4, 5)
    check(plain(einsum(X, [900, 7], Y, [7, 12], [900, 12])), X @ Y, 1e-12)
    check(plain(einsum(X, [1, 0], Y, [0, 2])), np.einsum(X, [1, 0], Y, [0, 2]), 1e-12)
    # 60 labels, one operand each
    vectors = [np.array([1.0, number / 60]) for number in range(60)]
    pairs = [one for number, vector in enumerate(vectors) for one in (vector, [number])]
    assert float(plain(einsum(*pairs, []))) == pytest.approx(np.prod([vector.sum() for vector in vectors]))


def test_an_expression_without_contraction_joins_alone() -> None:
    X, Y = values("float64", 6), values("float64", 5)
    lazy = einsum("i,j->ij", da.from_array(X, chunks=4), Y, join="hypot")
    check(plain(lazy), np.hypot(X[:, None], Y), 1e-12)
    check(computed(lazy @ np.ones((5, 2)), FORCED), np.hypot(X[:, None], Y) @ np.ones((5, 2)), 1e-12)


def test_a_ufunc_a_function_and_one_operand_join_as_they_do() -> None:
    X, Y = values("float64", 6, 8), values("float64", 8)
    x = da.from_array(X, chunks=3)
    expected = np.arctan2(X, Y).max(axis=1)
    for join in (np.arctan2, lambda a, b: np.arctan2(a, b)):
        lazy = einsum("ik,k->i", x, Y, join=join, aggregate="max")
        check(plain(lazy), expected, 1e-12)
        check(computed(lazy, FORCED), expected, 1e-12)
    check(computed(einsum("ik->k", x, join=np.abs, aggregate="prod"), FORCED), np.abs(X).prod(axis=0), 1e-12)
    check(computed(einsum("ik->i", x, aggregate="logsumexp"), FORCED), np.logaddexp.reduce(X, axis=1), 1e-12)
    as_named = einsum("ik,k->i", x, Y, join=np.multiply)
    assert as_named.name == einsum("ik,k->i", x, Y).name
    three = einsum("i,i,j->j", X[:, 0], X[:, 1], Y, join="add", aggregate="min")
    check(computed(three, FORCED), (X[:, 0] + X[:, 1] + Y[:, None]).min(axis=1), 1e-12)


def test_operands_that_are_no_dask_arrays_become_some_and_keep_their_library() -> None:
    X = values("float64", 6, 5)
    for optimizer in (
        da.optimization.optimize,
        EinDecomp(force=True, topology=EAGER, array_types=frozenset({"tests.standin.StandIn"})),
    ):
        lazy = einsum("ik,jk->ij", StandIn(X), StandIn(X[:4]), join="absolute_difference", aggregate="max")
        found = computed(lazy, optimizer)
        assert isinstance(found, StandIn)
        np.testing.assert_allclose(found.values, np.abs(X[:, None] - X[None, :4]).max(axis=-1))


def test_a_result_has_the_chunks_asked_for() -> None:
    x = da.ones((8, 6), chunks=3)
    lazy = einsum("ik,jk->ij", x, x, join="add", aggregate="max", out_chunks=(8, 2))
    assert lazy.chunks == ((8,), (2, 2, 2, 2))
    assert computed(lazy, FORCED).max() == 2


@pytest.mark.parametrize(
    ("aggregate", "dtype", "result"),
    [
        ("sum", "float32", "float32"),
        ("max", "float64", "float64"),
        ("mean", "float64", "float64"),
        ("count", "int32", "int32"),
        ("any", "int8", "int8"),
    ],
)
def test_values_are_combined_in_the_element_type_asked_for(aggregate: str, dtype: str, result: str) -> None:
    X = values("float32", 5, 7)
    lazy = einsum(
        "ik,jk->ij", da.from_array(X, chunks=3), X, join="subtract", aggregate=aggregate, dtype=dtype
    )
    expected = NUMPY_AGGREGATES[aggregate](X[:, None] - X[None], axis=-1).astype(result)
    check(computed(lazy, FORCED), expected, 1e-5)
    narrow = values("int8", 5, 400)
    wide = einsum("ik,jk->ij", narrow, narrow, dtype="int64")
    check(computed(wide, FORCED), np.einsum("ik,jk->ij", narrow, narrow, dtype="int64"), 0)


def test_an_element_type_that_cannot_hold_the_values_is_refused() -> None:
    x = da.ones((4, 4))
    with pytest.raises(
        TypeError, match="values of type float64 cannot become int32; expected dtype=None or a wider one"
    ):
        einsum("ik,jk->ij", x, x, join="add", aggregate="max", dtype="int32")
    with pytest.raises(TypeError, match="elements of type float64 cannot become int8"):
        einsum("ik,kj->ij", x, x, dtype="int8")
    with pytest.raises(TypeError, match="aggregate 'mean' gives no int64; expected real or complex"):
        einsum("ik->i", da.ones((4, 4), dtype=int), aggregate="mean", dtype="int64")


# what is empty or unknown


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_values_are_combined_to_what_numpy_says(aggregate: str) -> None:
    X = np.ones((3, 0))
    if aggregate in ("max", "min"):
        with pytest.raises(
            ValueError,
            match=rf"label 'k' of 'ik,jk->ij' is 0 long and aggregate '{aggregate}' has no identity",
        ):
            einsum("ik,jk->ij", X, X, join="add", aggregate=aggregate)
        return
    lazy = einsum("ik,jk->ij", X, X, join="add", aggregate=aggregate)
    for found in (plain(lazy), computed(lazy, FORCED)):
        check(found, numpy_result("add", aggregate, X, X), 0)


def test_chunks_of_no_elements_have_nothing_to_give() -> None:
    X = values("float64", 3, 4)
    x = da.from_array(X, chunks=((0, 3), (0, 2, 0, 2)))
    for aggregate in ("max", "sum", "logsumexp"):
        lazy = einsum("ik,jk->ij", x, x, join="add", aggregate=aggregate)
        for found in (plain(lazy), computed(lazy, FORCED)):
            check(found, numpy_result("add", aggregate, X, X), 1e-12)


def test_axes_of_unknown_length_are_combined_but_have_no_mean() -> None:
    X = values("float64", 6, 4)
    x = da.from_array(X, chunks=(2, 4))
    x = x[x[:, 0] > -9]
    check(plain(einsum("nk->k", x, aggregate="max")), X.max(axis=0), 0)
    check(plain(einsum("nk,nl->kl", x, x)), X.T @ X, 1e-12)
    with pytest.raises(ValueError, match="a mean over 'n', of unknown length; expected known chunks"):
        einsum("nk->k", x, aggregate="mean")


# aggregates of one's own


def test_an_aggregate_of_ones_own_combines_and_finishes() -> None:
    X, Y = values("float64", 5, 9), values("float64", 6, 9, seed=1)
    norm = Aggregate(None, np.hypot)
    root = Aggregate(0, lambda a, b: a + b, np.sqrt, name="root")
    for aggregate, expected in (
        (norm, np.hypot.reduce(X[:, None] - Y, axis=-1)),
        (root, np.sqrt(((X[:, None] - Y) ** 2).sum(axis=-1))),
    ):
        join = "subtract" if aggregate is norm else "squared_difference"
        lazy = einsum(
            "ik,jk->ij",
            da.from_array(X, chunks=2),
            da.from_array(Y, chunks=4),
            join=join,
            aggregate=aggregate,
        )
        check(plain(lazy), expected, 1e-12)
        check(computed(lazy, FORCED), expected, 1e-12)
    assert f"{join} root" in explain(lazy, hook=FORCED).choices[0].einsum


def test_bits_meet_in_an_aggregate_of_ones_own() -> None:
    X = values("uint8", 5, 9)
    lazy = einsum("ik->i", da.from_array(X, chunks=2), aggregate=Aggregate(0, np.bitwise_xor))
    for found in (plain(lazy), computed(lazy, FORCED)):
        check(found, np.bitwise_xor.reduce(X, axis=1), 0)


@pytest.mark.parametrize(
    ("aggregate", "said"),
    [
        (Aggregate(0, np.subtract), "aggregate 'subtract' is not commutative: of .* expected the same"),
        (Aggregate(None, lambda a, b: (a + b) / 2, name="middle"), "aggregate 'middle' is not associative"),
        (Aggregate(1, np.add), "identity 1 of aggregate 'add' makes .* expected that it changes nothing"),
    ],
)
def test_an_aggregate_that_fails_on_samples_is_refused(aggregate: Aggregate, said: str) -> None:
    with pytest.raises(ExpressionError, match=said):
        einsum("ik->i", da.ones((3, 4)), aggregate=aggregate)


def test_an_aggregate_that_changes_the_shape_is_refused() -> None:
    with pytest.raises(TypeError, match=r"it made \(1,\) of arrays of shape \(3,\)"):
        einsum("ik->i", da.ones((3, 4)), aggregate=Aggregate(None, lambda a, b: (a + b)[:1]))


def test_a_function_that_fails_on_a_worker_says_so_itself() -> None:
    def picky(a: Any, b: Any) -> Any:
        if a.size > 3:
            raise KeyError("too many for me")
        return a + b

    lazy = einsum("ik,jk->ij", np.ones((9, 4)), np.ones((8, 4)), join=picky, aggregate="max")
    with pytest.raises(KeyError, match="too many for me"):
        computed(lazy, FORCED)


def test_a_join_that_gives_another_shape_is_named_with_both() -> None:
    def wrong(a: Any, b: Any) -> Any:
        return a + b if a.ndim == 1 else (a + b)[..., :1]

    lazy = einsum("ik,jk->ij", np.ones((9, 4)), np.ones((8, 4)), join=wrong, aggregate="max")
    with pytest.raises(ValueError, match=r"join wrong made .* of arrays of shapes .*; expected"):
        plain(lazy)


# errors at the door


@pytest.mark.parametrize(
    ("arguments", "options", "error", "said"),
    [
        (("i1,j->i", 1, 2), {}, ExpressionError, "character '1' in 'i1,j->i' is no label"),
        (("ij,jk->iz", np.ones((2, 2)), np.ones((2, 2))), {}, ExpressionError, "cannot be read"),
        (("ij,jk->ik", np.ones((2, 2))), {}, ExpressionError, "cannot be read"),
        (("ij,jk->ik", np.ones((2, 3)), np.ones((4, 2))), {}, ExpressionError, "label 'j' is 3 long in operand 0 but 4"),
        (("ij->i", np.ones(2)), {}, ExpressionError, "operand 0 of 'ij->i' has 1 axes but 2 labels"),
        (("ii->i", np.ones((2, 3))), {}, ExpressionError, "label 'i' is 2 long"),
        (("i,i->", 1, 1), {"join": "times"}, ExpressionError, "operand 0"),
        (("i,i->", np.ones(2), np.ones(2)), {"join": "times"}, ExpressionError, "unknown join 'times'; expected one of multiply, add"),
        (("i,i->", np.ones(2), np.ones(2)), {"aggregate": "median"}, ExpressionError, "unknown aggregate 'median'"),
        (("i->", np.ones(2)), {"join": "subtract"}, ExpressionError, "join 'subtract' takes 2 operands but was given 1"),
        (("i,i,i->", *[np.ones(2)] * 3), {"join": "divide"}, ExpressionError, "join 'divide' takes 2 operands but was given 3"),
        (("i,i->", np.ones(2), np.ones(2)), {"join": np.sqrt}, ExpressionError, "ufunc 'sqrt' takes 1 arrays and gives 1, but 2"),
        (("i,i->", np.ones(2), np.ones(2)), {"join": 3}, TypeError, "join is 3; expected one of"),
        (("i,i->", np.ones(2), np.ones(2)), {"aggregate": 3}, TypeError, "aggregate is 3; expected one of"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_what_would_be_accepted(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        einsum(*arguments, **options)


def test_a_function_that_cannot_be_pickled_is_refused() -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"unpicklable cannot be pickled: .*; expected a function that can"):

        def unpicklable(a: Any, b: Any) -> Any:
            return a + b if lock else None

        einsum("i,i->", np.ones(2), np.ones(2), join=unpicklable)


# keys


def test_keys_are_the_same_each_time_and_tell_joins_apart() -> None:
    x = da.ones((6, 4), chunks=2)
    names = {
        einsum("ik,jk->ij", x, x, join=join, aggregate=aggregate).name
        for join in ("add", "subtract", "equal")
        for aggregate in ("max", "sum")
        for _ in range(2)
    }
    assert len(names) == 6


def test_a_graph_with_functions_of_a_user_is_pickled_and_their_module_is_not_needed_on_the_way() -> None:
    lazy = einsum("ik,jk->ij", np.ones((4, 3)), np.ones((5, 3)), join=lambda a, b: a + b, aggregate="max")
    again = pickle.loads(pickle.dumps(lazy))
    assert again.name == lazy.name
    assert plain(again).max() == 2
