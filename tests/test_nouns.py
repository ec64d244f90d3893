"""Expressions, partitions, graphs, costs, topologies and plans say what they hold and refuse what they cannot."""

from __future__ import annotations

import json
from fractions import Fraction
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_eindecomp import Topology, cost
from dask_eindecomp.contract import contract
from dask_eindecomp.decompose import decompose
from dask_eindecomp.expression import Aggregate, Expression, ExpressionError
from dask_eindecomp.graph import EinGraph
from dask_eindecomp.partition import PartitionError, boundaries, cut, viable
from dask_eindecomp.topology import TopologyError
from tests import oracle


@given(st.integers(0, 50), st.data())
def test_a_cut_is_balanced_and_adds_up(extent: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, max(extent, 1)))
    chunks = cut(extent, parts)
    assert sum(chunks) == extent and len(chunks) == parts
    assert max(chunks) - min(chunks) <= 1 and list(chunks) == sorted(chunks, reverse=True)
    assert boundaries(chunks)[-1] == extent


@pytest.mark.parametrize("parts", [0, 6])
def test_a_cut_that_cannot_be_names_both(parts: int) -> None:
    with pytest.raises(PartitionError, match=f"cannot cut 5 elements into {parts} parts; expected 1 to 5"):
        cut(5, parts)


def test_no_tiles_are_refused() -> None:
    with pytest.raises(PartitionError, match="0 tiles; expected at least 1"):
        viable({"i": 4}, 0)


def test_any_number_of_tiles_falls_back_to_what_there_is() -> None:
    assert viable({"i": 3, "j": 3}, 5) == [{"i": 2, "j": 2}]


def test_an_implicit_output_is_what_appears_once() -> None:
    assert Expression.parse("ij,jk").output == ("i", "k")


@pytest.mark.parametrize(
    ("subscripts", "options", "message"),
    [
        ("i1->i", {}, "character '1' in 'i1->i' is no label"),
        ("ij->k", {}, "output label 'k' of 'ij->k' is in no operand"),
        ("ij->ii", {}, "output label 'i' appears 2 times"),
        (
            "ij->i",
            {"aggregate": "median"},
            "unknown aggregate 'median' in 'ij->i'; expected one of sum, prod",
        ),
    ],
)
def test_an_expression_that_cannot_be_read_is_refused(
    subscripts: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ExpressionError, match=message):
        Expression.parse(subscripts, **options)


def test_extents_that_disagree_name_both() -> None:
    with pytest.raises(
        ExpressionError, match="label 'j' is 64 long in operand 0 but 48 in operand 1 of 'ij,jk->ik'"
    ):
        Expression.parse("ij,jk->ik").extents(((2, 64), (48, 3)))
    with pytest.raises(ExpressionError, match="has 1 axes but 2 labels"):
        Expression.parse("ij->i").extents(((2,),))
    with pytest.raises(ExpressionError, match="takes 1 operands but was given 2"):
        Expression.parse("ij->i").extents(((2, 2), (2, 2)))


def test_an_aggregate_of_ones_own_has_its_name_in_the_plan() -> None:
    widest = Aggregate("widest", 0, np.maximum)
    assert str(Expression.parse("ij->i", aggregate=widest)) == "widest ij->i"


@pytest.mark.parametrize(
    ("nodes", "outputs", "message"),
    [
        ({"Z": ("ij->i", "Q")}, ["Z"], "operand 'Q' of 'Z' is not known yet; expected one of A"),
        ({"A": ("ij->i", "A")}, ["A"], "'A' names two tensors"),
        ({"Z": ("ij->i", "A")}, ["Y"], "output 'Y' is no node; expected one of Z"),
        ({"Z": ("ij->i", "A", {"axis": 0})}, ["Z"], "unknown option 'axis' of 'Z'; expected join, aggregate"),
        (
            {"Z": ("ij->i", "A", {"aggregate": 3})},
            ["Z"],
            "aggregate of 'Z' is 3; expected a name or an Aggregate",
        ),
    ],
)
def test_a_graph_that_cannot_be_is_refused(nodes: dict[str, tuple], outputs: list[str], message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        EinGraph.from_spec({"A": (2, 3)}, nodes, outputs)


def test_chunks_of_a_given_tensor_must_add_up() -> None:
    nodes = {"Z": ("ij->i", "A")}
    with pytest.raises(ExpressionError, match=r"chunks of 'A' add up to \(2, 2\); expected \(2, 3\)"):
        EinGraph.from_spec({"A": (2, 3)}, nodes, ["Z"], chunks={"A": ((2,), (2,))})
    with pytest.raises(ExpressionError, match="chunks given for 'B'; expected one of A"):
        EinGraph.from_spec({"A": (2, 3)}, nodes, ["Z"], chunks={"B": ((2,), (3,))})


@pytest.mark.parametrize(
    ("shape", "one", "two", "published"),
    [
        ((8, 8), (4, 1), (1, 4), 448),
        ((8, 8), (4, 1), (2, 2), 192),
        ((8, 8), (2, 2), (1, 1), 256),
        ((16, 16), (8, 1), (1, 8), 3840),
        ((4, 8, 8), (4, 1, 1), (1, 2, 2), 1792),
        ((8, 8), (2, 2), (2, 2), 0),
    ],
)
def test_the_published_repartition(shape: tuple, one: tuple, two: tuple, published: int) -> None:
    assert cost.paper_repartition(shape, one, two) == published


def test_the_published_repartition_is_a_fraction_where_grids_do_not_nest() -> None:
    assert cost.paper_repartition((5, 5), (2, 3), (3, 3)) == Fraction(75, 2)


@pytest.mark.parametrize(
    ("extent", "one", "two", "sliced"),
    [(8, (4, 1), (1, 4), 48), (8, (4, 1), (2, 2), 32), (8, (2, 2), (1, 1), 48), (16, (8, 1), (1, 8), 224)],
)
def test_slices_move_less(extent: int, one: tuple, two: tuple, sliced: int) -> None:
    grids = [tuple(cut(extent, parts) for parts in grid) for grid in (one, two)]
    assert cost.repartition_traffic(*grids, itemsize=1, workers=max(prod(one), prod(two))).nbytes == sliced


def test_blocks_read_where_they_lie_move_nothing() -> None:
    chunks = ((4, 4), (4, 4))
    assert cost.given_traffic(chunks, (3, 1, 0, 2), chunks, itemsize=8, workers=4).nbytes == 0
    assert cost.given_traffic(chunks, (0, 0, 0, 0), chunks, itemsize=1, workers=4).nbytes == 48


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "0 workers; expected at least 1"),
        ({"threads": 0}, "0 threads; expected at least 1"),
        ({"bandwidth": 0.0}, "bandwidth of 0.0; expected more than 0"),
        ({"latency": -1.0}, "latency of -1.0; expected 0 or more"),
    ],
)
def test_machines_that_cannot_be_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology(**options)  # type: ignore[arg-type]


def test_a_plan_is_a_table_json_and_html() -> None:
    graph = EinGraph.from_spec({"A": (64, 64), "B": (64, 64)}, {"Z": ("ij,jk->ik", "A", "B")}, ["Z"])
    plan = decompose(graph, tiles=4, objective="bytes")
    assert "ij,jk->ik" in str(plan) and "proven optimal" in str(plan)
    record = json.loads(plan.to_json())
    assert record["choices"][0]["tiles"] == 4
    assert record["traffic"]["nbytes"] == plan.traffic.nbytes == plan.cost
    assert plan._repr_html_().startswith("<table>") and "ij,jk-&gt;ik" in plan._repr_html_()
    assert not plan.is_cheaper


def test_a_long_product_becomes_binary_and_gives_the_same() -> None:
    shapes = {"X": (6, 5, 4), "A": (6, 2), "B": (5, 3), "C": (4, 2)}
    graph = EinGraph.from_spec(shapes, {"Z": ("ijk,ia,jb,kc->abc", "X", "A", "B", "C")}, ["Z"])
    split = contract(graph)
    assert len(split.nodes) == 3 and all(len(node.inputs) == 2 for node in split.nodes.values())
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 9, shape) for name, shape in shapes.items()}
    np.testing.assert_array_equal(oracle.evaluate(split, arrays)["Z"], oracle.evaluate(graph, arrays)["Z"])
    assert contract(split) is split
