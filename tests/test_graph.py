"""A graph is read from plain values, knows who reads what, and refuses what does not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_eindecomp.expression import Aggregate, ExpressionError
from dask_eindecomp.graph import EinGraph, Output
from tests import oracle, strategies

MATMUL = {"inputs": {"A": (4, 6), "B": (6, 8)}, "nodes": {"Z": ("ij,jk->ik", "A", "B")}, "outputs": ["Z"]}


def test_shapes_follow_from_those_given() -> None:
    graph = EinGraph.from_spec(**MATMUL)
    assert graph.shape("A") == (4, 6)
    assert graph.shape("Z") == graph.nodes["Z"].shape == (4, 8)
    assert graph.nodes["Z"].extents == (("i", 4), ("j", 6), ("k", 8))
    assert graph.outputs == (Output("Z", "Z", None),)


def test_every_tensor_has_the_element_type_of_the_spec() -> None:
    graph = EinGraph.from_spec(**MATMUL, dtype="f4")
    assert graph.dtype("A") == graph.dtype("Z") == "float32"
    assert graph.itemsize("Z") == 4
    assert graph.nbytes("Z") == 4 * 8 * 4


def test_labels_are_local_to_a_node() -> None:
    graph = EinGraph.from_spec({"A": (2, 3)}, {"T": ("ij->ji", "A"), "Z": ("ij->i", "T")}, ["Z"])
    assert graph.nodes["Z"].extents == (("i", 3), ("j", 2))


def test_it_knows_who_reads_a_tensor_and_as_which_operand() -> None:
    graph = EinGraph.from_spec(
        {"A": (4, 4)}, {"T": ("ij,ij->ij", "A", "A"), "Z": ("ij,jk->ik", "A", "T")}, ["Z"]
    )
    assert graph.readers == {"A": (("T", 0), ("T", 1), ("Z", 0)), "T": (("Z", 1),), "Z": ()}


def test_options_are_the_last_entry_of_a_spec() -> None:
    span = Aggregate(None, np.maximum, name="span")
    graph = EinGraph.from_spec(
        {"A": (4, 4)},
        {"M": ("ij->i", "A", {"aggregate": span}), "D": ("ij,i->ij", "A", "M", {"join": "subtract"})},
        ["D"],
    )
    assert graph.nodes["M"].expression.aggregate is span
    assert graph.nodes["D"].expression.join == "subtract"
    assert graph.nodes["D"].inputs == ("A", "M")


def test_given_chunks_stay_with_their_tensor() -> None:
    graph = EinGraph.from_spec(**MATMUL, chunks={"A": ((3, 1), (6,))})
    assert graph.inputs["A"].chunks == ((3, 1), (6,))
    assert graph.inputs["B"].chunks is None


def test_chunks_for_a_tensor_that_is_not_given_are_refused() -> None:
    with pytest.raises(ExpressionError, match=r"chunks given for 'Q'; expected one of A, B"):
        EinGraph.from_spec(**MATMUL, chunks={"Q": ((1,),)})


def test_chunks_that_do_not_add_up_are_refused_with_both_shapes() -> None:
    with pytest.raises(ExpressionError, match=r"chunks of 'A' add up to \(4, 5\); expected \(4, 6\)"):
        EinGraph.from_spec(**MATMUL, chunks={"A": ((2, 2), (5,))})


def test_chunks_of_another_rank_are_refused() -> None:
    with pytest.raises(ExpressionError, match=r"chunks of 'A' add up to \(4,\); expected \(4, 6\)"):
        EinGraph.from_spec(**MATMUL, chunks={"A": ((4,),)})


def test_a_name_may_not_be_given_and_computed() -> None:
    with pytest.raises(ExpressionError, match=r"'A' names two tensors; expected one name each"):
        EinGraph.from_spec({"A": (4,)}, {"A": ("i->i", "A")}, ["A"])


def test_an_operand_must_be_known_before_it_is_read() -> None:
    with pytest.raises(ExpressionError, match=r"operand 'T' of 'Z' is not known yet; expected one of A"):
        EinGraph.from_spec({"A": (4,)}, {"Z": ("i->i", "T"), "T": ("i->i", "A")}, ["Z"])


def test_an_output_must_be_a_node() -> None:
    with pytest.raises(ExpressionError, match=r"output 'Q' is no node; expected one of Z"):
        EinGraph.from_spec(**MATMUL | {"outputs": ["Q"]})


def test_a_given_tensor_is_no_output_of_a_spec() -> None:
    with pytest.raises(ExpressionError, match=r"output 'A' is no node; expected one of none"):
        EinGraph.from_spec({"A": (4,)}, {}, ["A"])


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ExpressionError, match=r"unknown option 'joins' of 'Z'; expected join, aggregate"):
        EinGraph.from_spec({"A": (4,)}, {"Z": ("i->i", "A", {"joins": "add"})}, ["Z"])


def test_an_aggregate_is_a_name_or_an_aggregate() -> None:
    with pytest.raises(ExpressionError, match=r"aggregate of 'Z' is 3; expected a name or an Aggregate"):
        EinGraph.from_spec({"A": (4,)}, {"Z": ("i->", "A", {"aggregate": 3})}, ["Z"])


def test_what_an_expression_refuses_a_graph_refuses() -> None:
    with pytest.raises(ExpressionError, match=r"label 'j' is 6 long in operand 0 but 7 in operand 1"):
        EinGraph.from_spec(**MATMUL | {"inputs": {"A": (4, 6), "B": (7, 8)}})


def test_only_a_reader_that_needs_no_more_runs_a_tile_of_its_source_itself() -> None:
    graph = EinGraph.from_spec(
        {"A": (4, 4)},
        {
            "T": ("ij,jk->ik", "A", "A"),
            "Z": ("ij,ij->ij", "T", "A"),
            "P": ("ij,jk->ik", "Z", "A"),
            "S": ("ij->i", "P"),
        },
        ["S"],
    )
    streamed = replace(
        graph, nodes={name: replace(node, kernel="stream") for name, node in graph.nodes.items()}
    )
    assert streamed.may_inline("T", "Z")
    assert not graph.may_inline("T", "Z")  # BLAS wants its operands whole
    assert not streamed.may_inline("A", "T")  # nobody computes what is given
    assert not streamed.may_inline(
        "Z", "P"
    )  # a product waits for its other operand, and reads more than that tile
    assert streamed.may_inline("P", "S") and graph.may_inline("P", "S")  # there is nothing else to wait for
    assert not replace(streamed, outputs=(Output("T", "T"),)).may_inline("T", "Z")  # it has to leave as well


def test_a_source_that_two_read_is_not_computed_twice() -> None:
    graph = EinGraph.from_spec(
        {"A": (4,)}, {"T": ("i->i", "A"), "U": ("i->i", "T"), "V": ("i->i", "T")}, ["U", "V"]
    )
    nodes = {name: replace(node, kernel="stream") for name, node in graph.nodes.items()}
    assert not replace(graph, nodes=nodes).may_inline("T", "U")


def lying(owners: tuple[int, ...], second: tuple[int, ...]) -> EinGraph:
    """Two products of the same form, of inputs whose blocks lie on these workers."""
    rows = ((2, 2, 2, 2), (8,))
    spec = {"Y": ("ij,jk->ik", "A", "C"), "Z": ("ij,jk->ik", "B", "C")}
    graph = EinGraph.from_spec(
        {name: (8, 8) for name in "ABC"}, spec, ["Y", "Z"], chunks={"A": rows, "B": rows}
    )
    inputs = {
        "A": replace(graph.inputs["A"], owners=owners),
        "B": replace(graph.inputs["B"], owners=second),
        "C": graph.inputs["C"],
    }
    return EinGraph(inputs, graph.nodes, graph.outputs)


@pytest.mark.parametrize(
    ("second", "same"), [((0, 1, 0, 2), True), ((7, 3, 7, 1), True), ((0, 0, 1, 2), False)]
)
def test_expressions_are_of_one_form_where_what_they_read_lies_together_alike(
    second: tuple[int, ...], same: bool
) -> None:
    forms = lying((0, 1, 0, 2), second).forms
    assert (forms["Y"] == forms["Z"]) is same


def test_what_is_cut_otherwise_is_of_another_form() -> None:
    graph = lying((0, 1, 0, 2), (0, 1, 0, 2))
    other = replace(graph.inputs["B"], chunks=((4, 4), (8,)), owners=(0, 1))
    forms = EinGraph(graph.inputs | {"B": other}, graph.nodes, graph.outputs).forms
    assert forms["Y"] != forms["Z"]


def test_the_oracle_computes_a_softmax() -> None:
    graph = EinGraph.from_spec(
        {"X": (5, 7)},
        {
            "C": ("ij->i", "X", {"aggregate": "max"}),
            "E": ("ij,i->ij", "X", "C", {"join": "exp_difference"}),
            "S": ("ij->i", "E"),
            "Y": ("ij,i->ij", "E", "S", {"join": "divide"}),
        },
        ["Y"],
    )
    x = np.random.default_rng(0).normal(size=(5, 7))
    assert np.allclose(
        oracle.evaluate(graph, {"X": x})["Y"], np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    )


@given(st.data())
def test_the_oracle_computes_what_einsum_computes(data: st.DataObject) -> None:
    spec = data.draw(strategies.dags())
    graph = EinGraph.from_spec(**spec)
    arrays = data.draw(strategies.arrays(graph))
    values = dict(arrays)
    for name, (subscripts, *operands) in spec["nodes"].items():
        values[name] = np.einsum(subscripts, *(values[operand] for operand in operands))
    found = oracle.evaluate(graph, arrays)
    assert found.keys() == values.keys()
    assert all(np.array_equal(found[name], values[name]) for name in values)


@given(strategies.dags(named=True))
def test_a_drawn_graph_has_every_node_after_those_it_reads(spec: dict) -> None:
    graph = EinGraph.from_spec(**spec)
    known = set(graph.inputs)
    for node in graph.nodes.values():
        assert set(node.inputs) <= known
        known.add(node.name)
    for name, readers in graph.readers.items():
        assert all(graph.nodes[reader].inputs[position] == name for reader, position in readers)
    assert sum(map(len, graph.readers.values())) == sum(len(node.inputs) for node in graph.nodes.values())
