"""The planner finds the least cost there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_eindecomp import Topology, cost, elimination
from dask_eindecomp.decompose import DecomposeError, decompose, price
from dask_eindecomp.graph import EinGraph
from dask_eindecomp.partition import viable
from tests import oracle
from tests.strategies import graphs

VECTORS = Path(__file__).parent / "vectors"
SINGLE = json.loads((VECTORS / "single.json").read_text())
MULTI = json.loads((VECTORS / "multi.json").read_text())


def one(subscripts: str, sizes: dict[str, int]) -> EinGraph:
    operands = subscripts.split("->")[0].split(",")
    names = [f"X{n}" for n in range(len(operands))]
    shapes = {name: tuple(sizes[label] for label in labels) for name, labels in zip(names, operands)}
    return EinGraph.from_spec(shapes, {"Z": (subscripts, *names)}, ["Z"])


def diamond() -> EinGraph:
    return EinGraph.from_spec(
        {"A": (8, 4), "B": (4, 8), "C": (8, 8), "D": (8, 8)},
        {
            "T": ("ij,jk->ik", "A", "B"),
            "U": ("ij,jk->ik", "T", "C"),
            "V": ("ij,jk->ik", "D", "T"),
            "R": ("ij,ij->ij", "U", "V"),
        },
        ["R"],
    )


@pytest.mark.parametrize("vector", SINGLE, ids=lambda vector: vector["name"])
def test_one_expression_has_the_viable_plans_and_the_optimum_of_the_vectors(vector: dict[str, Any]) -> None:
    graph = one(vector["einsum"], vector["sizes"])
    node = graph.nodes["Z"]
    found = {
        tuple(sorted(parts.items())): (
            cost.paper_join(node.expression, vector["sizes"], parts),
            cost.paper_aggregate(node.expression, vector["sizes"], parts),
        )
        for parts in viable(vector["sizes"], vector["P"], divide=True)
    }
    assert found == {tuple(sorted(v["d"].items())): (v["join"], v["agg"]) for v in vector["viable"]}
    plan = decompose(graph, tiles=vector["P"], objective="paper")
    assert (plan.cost, plan.gap) == (vector["best"], 0.0)


@pytest.mark.parametrize("vector", MULTI, ids=lambda vector: f"{vector['name']}, P={vector['P']}")
def test_a_graph_has_the_optimum_of_the_vectors(vector: dict[str, Any]) -> None:
    leaves = {name: tuple(shape) for name, shape in vector["leaves"].items()}
    nodes = {name: (subscripts, *operands) for name, subscripts, operands in vector["nodes"]}
    graph = EinGraph.from_spec(leaves, nodes, [vector["nodes"][-1][0]])
    plan = decompose(graph, tiles=vector["P"], objective="paper")
    assert (plan.cost, plan.gap) == (vector["brute"], 0.0)
    chosen = {choice.name: choice.partition for choice in plan.choices}
    assert oracle.plan_cost(graph, chosen, "paper") == vector["brute"]


def test_the_diamond_is_planned_as_a_whole() -> None:
    assert decompose(diamond(), tiles=8, objective="paper").cost == 1216


@pytest.mark.parametrize(
    ("subscripts", "sizes", "tiles", "best"),
    [
        ("ij,jk->ik", {"i": 64, "j": 4, "k": 64}, 4, 1024),
        ("ij,jk->ik", {"i": 12, "j": 12, "k": 12}, 6, 720),
        ("ijk,ja,ka->ia", {"i": 8, "j": 8, "k": 8, "a": 4}, 8, 864),
        ("bshd,bthd->bhst", {"b": 1, "s": 32, "t": 32, "h": 4, "d": 8}, 4, 2048),
    ],
)
def test_hand_computed_optima(subscripts: str, sizes: dict[str, int], tiles: int, best: int) -> None:
    assert decompose(one(subscripts, sizes), tiles=tiles, objective="paper").cost == best


def test_too_many_tiles_fall_back_to_the_most_there_are() -> None:
    plan = decompose(one("ij,jk->ik", {"i": 2, "j": 2, "k": 2}), tiles=16, objective="paper")
    assert plan.choices[0].tiles == 8


@pytest.mark.parametrize("objective", ["paper", "bytes"])
@settings(max_examples=500)
@given(graph=graphs(), tiles=st.sampled_from([1, 2, 4]))
def test_the_planner_equals_brute_force(objective: str, graph: EinGraph, tiles: int) -> None:
    plan = decompose(graph, tiles=tiles, objective=objective)
    assert plan.gap == 0
    assert plan.cost == pytest.approx(oracle.brute_force(graph, tiles, objective), abs=1e-6)


@settings(max_examples=100)
@given(graph=graphs(), tiles=st.sampled_from([1, 2, 4, 8]))
def test_a_plan_priced_anew_costs_what_it_said(graph: EinGraph, tiles: int) -> None:
    topology = Topology(workers=tiles)
    plan = decompose(graph, topology=topology)
    assert price(graph, plan.partitions, topology).cost == pytest.approx(plan.cost, rel=1e-9)
    assert plan.seconds == pytest.approx(plan.cost, rel=1e-9)


@settings(max_examples=100)
@given(graph=graphs(), tiles=st.sampled_from([2, 4]))
def test_a_plan_is_never_below_its_expressions_alone(graph: EinGraph, tiles: int) -> None:
    least = sum(
        min(
            oracle.node_cost(graph, node, parts, "paper")
            for parts in viable(dict(node.extents), tiles, divide=True)
        )
        for node in graph.nodes.values()
    )
    assert decompose(graph, tiles=tiles, objective="paper").cost >= least


@given(graph=graphs())
def test_one_tile_moves_its_inputs_and_nothing_else(graph: EinGraph) -> None:
    plan = decompose(graph, tiles=1, objective="paper")
    read = sum(graph.nbytes(source) // 8 for node in graph.nodes.values() for source in node.inputs)
    assert plan.cost == read
    assert decompose(graph, tiles=1, objective="bytes").cost == 0


def test_names_labels_and_the_order_of_operands_do_not_matter() -> None:
    plain = decompose(diamond(), tiles=8, objective="paper").cost
    other = EinGraph.from_spec(
        {"d": (8, 8), "c": (8, 8), "b": (4, 8), "a": (8, 4)},
        {
            "t": ("yz,xy->xz", "b", "a"),
            "v": ("bc,ab->ac", "t", "d"),
            "u": ("qr,pq->pr", "c", "t"),
            "r": ("mn,mn->mn", "v", "u"),
        },
        ["r"],
    )
    assert decompose(other, tiles=8, objective="paper").cost == plain


def test_a_capped_table_gives_a_plan_with_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    best = decompose(diamond(), tiles=8, objective="paper").cost
    monkeypatch.setattr(elimination, "TABLE_CAP", 30)
    plan = decompose(diamond(), tiles=8, objective="paper")
    chosen = {choice.name: choice.partition for choice in plan.choices}
    assert oracle.plan_cost(diamond(), chosen, "paper") == plan.cost >= best
    assert plan.gap >= plan.cost / best - 1
    assert plan.gap > 0


def test_what_makes_no_sense_is_refused() -> None:
    graph = diamond()
    with pytest.raises(
        DecomposeError, match="unknown objective 'speed'; expected one of paper, bytes, seconds"
    ):
        decompose(graph, tiles=2, objective="speed")
    with pytest.raises(DecomposeError, match="0 tiles; expected at least 1"):
        decompose(graph, tiles=0)
    with pytest.raises(DecomposeError, match="neither tiles nor a topology"):
        decompose(graph)


def test_a_tile_that_needs_too_much_memory_is_no_candidate() -> None:
    graph = one("ij,jk->ik", {"i": 64, "j": 64, "k": 64})
    roomy = decompose(graph, topology=Topology(workers=1))
    tight = decompose(graph, topology=Topology(workers=1), memory_limit=48 << 10)
    assert roomy.choices[0].tiles == 1
    assert tight.choices[0].tiles > 1
    assert tight.traffic.peak_nbytes <= 48 << 10
