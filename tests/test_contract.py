"""A product of many operands becomes products of two, and the result stays the same."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_eindecomp.contract import SIZE_WEIGHT, contract
from dask_eindecomp.expression import Expression
from dask_eindecomp.graph import EinGraph, Given, Node, Output
from tests import oracle, strategies


def product_of(subscripts: str, **extents: int) -> EinGraph:
    """A graph of this one expression."""
    operands = subscripts.split("->")[0].split(",")
    names = [f"X{number}" for number in range(len(operands))]
    inputs = {name: tuple(extents[label] for label in labels) for name, labels in zip(names, operands)}
    return EinGraph.from_spec(inputs, {"Z": (subscripts, *names)}, ["Z"])


def values_of(graph: EinGraph) -> dict[str, np.ndarray]:
    """Small whole numbers for everything given."""
    random = np.random.default_rng(0)
    return {name: random.integers(-3, 4, one.shape).astype(one.dtype) for name, one in graph.inputs.items()}


def assert_same(graph: EinGraph) -> EinGraph:
    """The contracted graph, after a look at its results and that none of its nodes reads more than two."""
    split = contract(graph)
    arrays = values_of(graph)
    before, after = oracle.evaluate(graph, arrays), oracle.evaluate(split, arrays)
    for name in graph.nodes:
        assert np.array_equal(before[name], after[name]), name
        assert split.shape(name) == graph.shape(name)
    assert all(len(node.inputs) <= 2 for node in split.nodes.values())
    assert (split.inputs, split.outputs, split.left_alone) == (graph.inputs, graph.outputs, graph.left_alone)
    return split


def test_a_chain_is_contracted_where_it_is_thinnest() -> None:
    split = assert_same(product_of("ab,bc,cd->ad", a=9, b=9, c=9, d=2))
    assert [node.inputs for node in split.nodes.values()] == [("X1", "X2"), ("X0", "Z.0")]


def test_the_last_product_has_the_name_of_the_whole() -> None:
    split = assert_same(product_of("ijk,ja,ka->ia", i=4, j=4, k=4, a=2))
    assert list(split.nodes)[-1] == "Z"
    assert len(split.nodes) == 2


def test_a_ttm_chain_never_runs_over_all_labels_at_once() -> None:
    split = assert_same(product_of("ijk,ia,jb,kc->abc", i=8, j=8, k=8, a=2, b=2, c=2))
    assert len(split.nodes) == 3
    assert max(len(node.expression.labels) for node in split.nodes.values()) == 4


def test_a_product_of_two_and_a_map_are_left_as_they_are() -> None:
    graph = EinGraph.from_spec({"A": (4, 4)}, {"T": ("ij,jk->ik", "A", "A"), "Z": ("ij->ji", "T")}, ["Z"])
    assert contract(graph) is graph


def test_the_same_graph_comes_back_the_second_time() -> None:
    split = contract(product_of("ab,bc,cd,de->ae", a=2, b=3, c=4, d=5, e=6))
    assert contract(split) is split


@pytest.mark.parametrize("options", [{"join": "add"}, {"aggregate": "max"}])
def test_only_sums_of_products_are_split(options: dict[str, str]) -> None:
    graph = EinGraph.from_spec(
        {"A": (4,), "B": (4,), "C": (4,)}, {"Z": ("i,i,i->", "A", "B", "C", options)}, ["Z"]
    )
    assert contract(graph) is graph


def test_the_rest_of_a_graph_stays_around_it() -> None:
    graph = EinGraph.from_spec(
        {"A": (3, 4), "B": (4, 5), "C": (5, 2)},
        {
            "T": ("ij->ij", "A"),
            "Z": ("ab,bc,cd->ad", "T", "B", "C"),
            "S": ("ij->j", "Z"),
        },
        ["S", "Z"],
    )
    split = assert_same(graph)
    assert list(split.nodes) == ["T", "Z.0", "Z", "S"]


def test_scalars_outer_products_and_repeated_operands_are_products_too() -> None:
    assert_same(product_of(",a,b->ab", a=2, b=3))
    assert_same(product_of("a,b,c->cba", a=2, b=3, c=4))
    assert_same(product_of("aab,b,bcc->ac", a=2, b=3, c=4))
    assert_same(product_of("ab,ab,ab->", a=2, b=3))
    assert_same(product_of(",,->"))
    assert_same(EinGraph.from_spec({"A": (3, 3)}, {"Z": ("ij,jk,kl->il", "A", "A", "A")}, ["Z"]))


def test_a_label_only_one_operand_has_is_summed_away() -> None:
    assert_same(product_of("ax,bx,cy->abc", a=2, b=3, c=2, x=4, y=5))


def test_empty_axes_give_zeros() -> None:
    assert_same(product_of("ab,bc,cd->ad", a=2, b=0, c=3, d=2))


def test_half_precision_is_kept_wider_between_two_products() -> None:
    inputs = {"A": (2, 3), "B": (3, 4), "C": (4, 5)}
    graph = EinGraph.from_spec(inputs, {"Z": ("ab,bc,cd->ad", "A", "B", "C")}, ["Z"], dtype="float16")
    split = contract(graph)
    assert [node.dtype for node in split.nodes.values()] == ["float32", "float16"]


def test_how_axes_came_cut_goes_to_every_product_that_has_them() -> None:
    graph = product_of("ab,bc,cd->ad", a=4, b=4, c=4, d=2)
    came = (("a", (2, 2)), ("b", (4,)), ("c", (1, 3)), ("d", (2,)))
    node = replace(graph.nodes["Z"], came=came, tasks=7, kernel="loop", came_kernel="loop", title="einsum")
    split = contract(replace(graph, nodes={"Z": node}))
    for part in split.nodes.values():
        assert dict(part.came) == {label: dict(came)[label] for label in part.expression.labels}
        assert (part.kernel, part.came_kernel) == ("loop", "loop")
    assert [part.title for part in split.nodes.values()] == ["einsum.0", "einsum"]
    assert sum(part.tasks for part in split.nodes.values()) == 7


def test_a_part_takes_no_name_that_the_graph_already_has() -> None:
    graph = EinGraph.from_spec(
        {"A": (2, 3), "B": (3, 4), "C": (4, 5)},
        {"Z.0": ("ij->ji", "A"), "Z": ("ab,bc,cd->ad", "A", "B", "C"), "S": ("ij->", "Z.0")},
        ["S", "Z"],
    )
    assert_same(graph)


def test_a_part_does_not_take_the_place_of_another_node() -> None:
    graph = EinGraph.from_spec(
        {"A": (2, 3), "B": (3, 4), "C": (4, 5), "D": (5, 6)},
        {"Z.0": ("ij->ji", "A"), "Z": ("ab,bc,cd,de->ae", "A", "B", "C", "D")},
        ["Z.0", "Z"],
    )
    assert_same(graph)


def test_a_label_may_be_longer_than_a_character() -> None:
    shapes = {"A": (2, 3), "B": (3, 4), "C": (4, 5)}
    expression = Expression((("x1", "x2"), ("x2", "x3"), ("x3", "x4")), ("x1", "x4"))
    extents = (("x1", 2), ("x2", 3), ("x3", 4), ("x4", 5))
    graph = EinGraph(
        {name: Given(name, shape, "float64") for name, shape in shapes.items()},
        {"Z": Node("Z", expression, ("A", "B", "C"), extents, "float64")},
        (Output("Z", "Z"),),
    )
    assert len(assert_same(graph).nodes) == 2


@settings(max_examples=200)
@given(st.data())
def test_any_product_gives_what_einsum_gives(data: st.DataObject) -> None:
    letters = "ijklm"[: data.draw(st.integers(1, 5))]
    extents = {label: data.draw(st.integers(1, 4)) for label in letters}
    operands = [
        "".join(data.draw(st.lists(st.sampled_from(letters), max_size=3)))
        for _ in range(data.draw(st.integers(3, 5)))
    ]
    used = sorted(set("".join(operands)))
    output = "".join(data.draw(st.lists(st.sampled_from(used), unique=True))) if used else ""
    graph = product_of(f"{','.join(operands)}->{output}", **extents)
    split = assert_same(graph)
    assert len(split.nodes) == len(operands) - 1
    arrays = data.draw(strategies.arrays(graph))
    expected = np.einsum(f"{','.join(operands)}->{output}", *arrays.values())
    assert np.array_equal(oracle.evaluate(split, arrays)["Z"], expected)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "binary"),
    [
        ("ijk,ja,ka->ia", ((9, 9, 9), (9, 2), (9, 2)), ["ja,ka->jka", "ijk,jka->ia"]),
        ("jka,kb,ijc->iabc", ((9, 9, 2), (9, 2), (2, 9, 2)), ["jka,kb->jab", "ijc,jab->iabc"]),
    ],
)
def test_what_is_contracted_next_stands_together_in_the_order_of_what_it_meets(
    subscripts: str, shapes: tuple[tuple[int, ...], ...], binary: list[str]
) -> None:
    names = "XYZ"
    graph = EinGraph.from_spec(dict(zip(names, shapes)), {"R": (subscripts, *names)}, ["R"])
    assert [str(node.expression) for node in contract(graph).nodes.values()] == binary


# products ordered anew


def chain(**extents: int) -> EinGraph:
    """``(A @ B) @ v``."""
    return EinGraph.from_spec(
        {"A": (extents["i"], extents["j"]), "B": (extents["j"], extents["k"]), "v": (extents["k"],)},
        {"M": ("ij,jk->ik", "A", "B"), "Z": ("ij,j->i", "M", "v")},
        ["Z"],
    )


def flops(graph: EinGraph) -> int:
    return sum(prod(extent for _, extent in node.extents) for node in graph.nodes.values())


def test_a_chain_that_ends_in_a_vector_begins_with_it_if_that_is_allowed() -> None:
    graph = chain(i=40, j=40, k=40)
    assert contract(graph) is graph
    anew = contract(graph, reassociate=True)
    assert flops(anew) == 2 * 40 * 40
    arrays = values_of(graph)
    assert np.array_equal(oracle.evaluate(anew, arrays)["Z"], oracle.evaluate(graph, arrays)["Z"])
    assert list(anew.nodes)[-1] == "Z"


@pytest.mark.parametrize(
    "graph",
    [
        # no order is better
        EinGraph.from_spec({name: (9, 9) for name in "ABC"}, {"M": ("ij,jk->ik", "A", "B"), "Z": ("ij,jk->ik", "M", "C")}, ["Z"]),
        # the intermediate is wanted, too
        EinGraph.from_spec({"A": (9, 9), "v": (9,)}, {"M": ("ij,jk->ik", "A", "A"), "Z": ("ij,j->i", "M", "v")}, ["M", "Z"]),
        # it is read twice
        EinGraph.from_spec({"A": (9, 9), "v": (9,)}, {"M": ("ij,jk->ik", "A", "A"), "Y": ("ij,j->i", "M", "v"), "Z": ("ij,i->j", "M", "v")}, ["Y", "Z"]),
        # it is read twice by one
        EinGraph.from_spec({"A": (9, 9)}, {"M": ("ij,jk->ik", "A", "A"), "Z": ("ij,ji->i", "M", "M")}, ["Z"]),
        # it is no sum of products
        EinGraph.from_spec({"A": (9, 9), "v": (9,)}, {"M": ("ij,jk->ik", "A", "A", {"aggregate": "max"}), "Z": ("ij,j->i", "M", "v")}, ["Z"]),
        EinGraph.from_spec({"A": (9, 9), "v": (9,)}, {"M": ("ij,jk->ik", "A", "A"), "Z": ("ij,j->i", "M", "v", {"join": "add"})}, ["Z"]),
    ],
    ids=["no better", "wanted", "read twice", "read twice by one", "max", "add"],
)  # fmt: skip
def test_what_cannot_or_need_not_be_ordered_anew_stays(graph: EinGraph) -> None:
    assert contract(graph, reassociate=True) is graph


@settings(max_examples=200)
@given(st.data())
def test_any_graph_ordered_anew_gives_the_same_with_no_more_work(data: st.DataObject) -> None:
    graph = EinGraph.from_spec(**data.draw(strategies.dags(most=5, chunked=False)))
    anew = contract(graph, reassociate=True)
    arrays = data.draw(strategies.arrays(graph))
    before, after = oracle.evaluate(graph, arrays), oracle.evaluate(anew, arrays)
    for output in graph.outputs:
        assert np.allclose(before[output.name], after[output.name])
    weighed = [
        sum(
            prod(extent for _, extent in node.extents) + SIZE_WEIGHT * prod(node.shape)
            for node in one.nodes.values()
        )
        for one in (contract(graph), anew)
    ]
    assert weighed[1] <= weighed[0]
