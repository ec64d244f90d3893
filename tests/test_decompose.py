"""The planner finds the least cost there is, and says what it costs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from benchmarks.bench_plan import llama
from dask_eindecomp import elimination
from dask_eindecomp.candidates import BudgetError
from dask_eindecomp.cost import paper_aggregate, paper_join
from dask_eindecomp.decompose import DecomposeError, PlanningTimeout, decompose
from dask_eindecomp.elimination import Factor
from dask_eindecomp.estimate import price
from dask_eindecomp.graph import EinGraph, Output
from dask_eindecomp.partition import Partition, viable
from dask_eindecomp.plan import Plan
from dask_eindecomp.topology import Topology
from tests import oracle, strategies

VECTORS = Path(__file__).parent / "vectors"
SINGLE = json.loads((VECTORS / "single.json").read_text())
MULTI = json.loads((VECTORS / "multi.json").read_text())

TILES = st.sampled_from([1, 2, 3, 4, 6, 8])


def single(subscripts: str, extents: dict[str, int]) -> EinGraph:
    """A graph of one expression."""
    operands = subscripts.split("->")[0].split(",")
    names = [f"X{number}" for number in range(len(operands))]
    inputs = {name: tuple(extents[label] for label in labels) for name, labels in zip(names, operands)}
    return EinGraph.from_spec(inputs, {"Z": (subscripts, *names)}, ["Z"])


def square(side: int, nodes: dict[str, tuple[Any, ...]], inputs: str = "ABCDE") -> EinGraph:
    """A graph whose inputs are all square matrices of this side; the last node leaves."""
    return EinGraph.from_spec({name: (side, side) for name in inputs}, nodes, [list(nodes)[-1]])


def diamond() -> EinGraph:
    """The smallest graph on which a planner that fixes paths in turn loses."""
    return EinGraph.from_spec(
        {"A": (8, 4), "B": (4, 8), "C": (8, 8), "D": (8, 8)},
        {
            "T": ("ij,jk->ik", "A", "B"),
            "U": ("ij,jk->ik", "T", "C"),
            "V": ("ij,jk->ik", "D", "T"),
            "R": ("ij,ij->ij", "U", "V", {"join": "add"}),
        },
        ["R"],
    )


def softmax(fused: bool) -> EinGraph:
    """Softmax over rows, the exponential of the difference as one join or as two expressions."""
    nodes: dict[str, tuple[Any, ...]] = {"C": ("ij->i", "X", {"aggregate": "max"})}
    nodes["E"] = ("ij,i->ij", "X", "C", {"join": "exp_difference" if fused else "subtract"})
    if not fused:
        nodes["F"] = ("ij->ij", "E")
    last = list(nodes)[-1]
    nodes["S"] = ("ij->i", last)
    nodes["Y"] = ("ij,i->ij", last, "S", {"join": "divide"})
    return EinGraph.from_spec({"X": (16, 32)}, nodes, ["Y"])


# The vectors and the figures found by hand


@pytest.mark.parametrize("vector", SINGLE, ids=[one["name"] for one in SINGLE])
def test_the_planner_meets_every_single_vector(vector: dict[str, Any]) -> None:
    graph = single(vector["einsum"], vector["sizes"])
    plan = decompose(graph, tiles=vector["P"], objective="paper")
    assert plan.cost == vector["best"]
    assert plan.gap == 0
    chosen = plan.choices[0].partition
    assert chosen in [one["d"] for one in vector["viable"] if one["total"] == vector["best"]]


@pytest.mark.parametrize("vector", SINGLE, ids=[one["name"] for one in SINGLE])
def test_the_viable_partitions_and_their_costs_are_exactly_those_of_the_vectors(
    vector: dict[str, Any],
) -> None:
    graph = single(vector["einsum"], vector["sizes"])
    expression, extents = graph.nodes["Z"].expression, vector["sizes"]

    def key(parts: dict[str, int], join: int, aggregate: int, total: int) -> tuple[Any, ...]:
        return (*sorted(parts.items()), join, aggregate, total)

    found = set()
    for parts in viable(extents, vector["P"], divide=True):
        join, aggregate = paper_join(expression, extents, parts), paper_aggregate(expression, extents, parts)
        assert join + aggregate == oracle.node_cost(graph, graph.nodes["Z"], parts, "paper")
        found.add(key(parts, join, aggregate, join + aggregate))
    assert found == {key(one["d"], one["join"], one["agg"], one["total"]) for one in vector["viable"]}


@pytest.mark.parametrize("vector", MULTI, ids=[f"{one['name']} P={one['P']}" for one in MULTI])
def test_the_planner_meets_every_vector_of_several_expressions(vector: dict[str, Any]) -> None:
    nodes = {name: (subscripts, *operands) for name, subscripts, operands in vector["nodes"]}
    inputs = {name: tuple(shape) for name, shape in vector["leaves"].items()}
    graph = EinGraph.from_spec(inputs, nodes, [vector["nodes"][-1][0]])
    topology = Topology(workers=vector["P"])
    plan = decompose(graph, tiles=vector["P"], objective="paper")
    assert plan.cost == vector["brute"] <= vector["lin"]
    assert plan.gap == 0
    assert oracle.plan_cost(graph, plan.partitions, "paper", topology) == vector["brute"]
    if vector["ties"] == 1:
        assert {one.name: one.partition for one in plan.choices} == vector["opt"]


@pytest.mark.parametrize(
    ("subscripts", "extents", "tiles", "best"),
    [
        ("ij,jk->ik", (16, 16, 16), 8, 1280),
        ("ij,jk->ik", (16, 16, 16), 4, 1024),
        ("ij,jk->ik", (64, 4, 64), 4, 1024),
        ("ij,jk->ik", (4, 256, 4), 8, 2160),
        ("ij,jk->ik", (32, 32, 32), 64, 11264),
        ("ij,jk->ik", (12, 12, 12), 6, 720),
        ("ij,j->i", (64, 64), 4, 4288),
        ("bij,bjk->bik", (4, 8, 8, 8), 4, 512),
        ("ij->i", (16, 32), 4, 512),
        ("ijk,ja,ka->ia", (8, 8, 8, 4), 8, 864),
        ("bshd,bthd->bhst", (1, 32, 4, 8, 32), 4, 2048),
    ],
)
def test_one_expression_costs_what_was_found_by_hand(
    subscripts: str, extents: tuple[int, ...], tiles: int, best: int
) -> None:
    labels = dict.fromkeys(label for label in subscripts if label.isalpha())
    graph = single(subscripts, dict(zip(labels, extents)))
    assert decompose(graph, tiles=tiles, objective="paper").cost == best


@pytest.mark.parametrize(
    ("subscripts", "extents", "tiles", "parts"),
    [
        ("ij,jk->ik", (16, 16, 16), 8, (2, 2, 2)),
        ("ij,jk->ik", (64, 4, 64), 4, (2, 1, 2)),
        ("ij,jk->ik", (4, 256, 4), 8, (1, 8, 1)),
        ("ij,jk->ik", (32, 32, 32), 64, (4, 4, 4)),
        ("bij,bjk->bik", (4, 8, 8, 8), 4, (4, 1, 1, 1)),
        ("ij->i", (16, 32), 4, (4, 1)),
        ("ijk,ja,ka->ia", (8, 8, 8, 4), 8, (2, 2, 2, 1)),
        ("bshd,bthd->bhst", (1, 32, 4, 8, 32), 4, (1, 1, 4, 1, 1)),
    ],
)
def test_where_one_partition_is_best_it_is_the_one_found_by_hand(
    subscripts: str, extents: tuple[int, ...], tiles: int, parts: tuple[int, ...]
) -> None:
    labels = list(dict.fromkeys(label for label in subscripts if label.isalpha()))
    plan = decompose(single(subscripts, dict(zip(labels, extents))), tiles=tiles, objective="paper")
    assert plan.choices[0].partition == dict(zip(labels, parts))


def test_where_there_is_no_vector_of_so_many_tiles_the_planner_falls_back() -> None:
    plan = decompose(single("ij,jk->ik", {"i": 2, "j": 2, "k": 2}), tiles=16, objective="paper")
    assert plan.choices[0].tiles == 8


@pytest.mark.parametrize(("tiles", "best"), [(4, 2048), (8, 2560)])
def test_a_chain_of_two_costs_what_was_found_by_hand(tiles: int, best: int) -> None:
    graph = square(16, {"T": ("ij,jk->ik", "A", "B"), "R": ("ij,jk->ik", "T", "C")})
    assert decompose(graph, tiles=tiles, objective="paper").cost == best


@pytest.mark.parametrize(("tiles", "best"), [(4, 3584), (8, 5120), (16, 6656)])
def test_the_sum_of_two_chains_costs_what_was_found_by_hand(tiles: int, best: int) -> None:
    graph = square(
        16,
        {
            "AB": ("ij,jk->ik", "A", "B"),
            "DE": ("ij,jk->ik", "D", "E"),
            "CDE": ("ij,jk->ik", "C", "DE"),
            "R": ("ij,ij->ij", "AB", "CDE", {"join": "add"}),
        },
    )
    assert decompose(graph, tiles=tiles, objective="paper").cost == best


@pytest.mark.parametrize(("fused", "best"), [(True, 2080), (False, 2592)])
def test_softmax_costs_what_was_found_by_hand_and_is_cut_by_rows(fused: bool, best: int) -> None:
    plan = decompose(softmax(fused), tiles=4, objective="paper")
    assert plan.cost == best
    assert all(choice.partition == {"i": 4, "j": 1} for choice in plan.choices)


def test_the_diamond_is_planned_as_a_whole() -> None:
    plan = decompose(diamond(), tiles=8, objective="paper")
    assert plan.cost == 1216
    assert plan.gap == 0


@pytest.mark.parametrize(
    ("extents", "produced", "consumed", "published", "sliced"),
    [
        ((8, 8), (4, 1), (1, 4), 448, 48),
        ((8, 8), (4, 1), (2, 2), 192, 32),
        ((8, 8), (2, 2), (1, 1), 256, 48),
        ((16, 16), (8, 1), (1, 8), 3840, 224),
        ((4, 8, 8), (4, 1, 1), (1, 2, 2), 1792, None),
    ],
)
def test_an_edge_costs_the_repartition_found_by_hand(
    extents: tuple[int, ...],
    produced: tuple[int, ...],
    consumed: tuple[int, ...],
    published: int,
    sliced: int | None,
) -> None:
    grids = [
        tuple(oracle.balanced(extent, n) for extent, n in zip(extents, parts))
        for parts in (produced, consumed)
    ]
    assert oracle.edge_cost(extents, *grids, "paper") == published
    if sliced is not None:
        assert oracle.edge_cost(extents, *grids, "bytes") == sliced
        labels = "ij"
        graph = EinGraph.from_spec({"A": extents}, {"T": ("ij->ij", "A"), "Z": ("ij->ij", "T")}, ["Z"])
        sizes = dict(zip(labels, extents))
        partitions = {
            name: Partition.balanced(sizes, dict(zip(labels, parts)))
            for name, parts in (("T", produced), ("Z", consumed))
        }
        workers = max(prod(produced), prod(consumed))
        assert price(graph, partitions, Topology(workers=workers)).traffic.nbytes == 8 * sliced


def test_one_repeated_layer_or_many_the_cost_grows_by_as_much_each() -> None:
    def chain(length: int) -> float:
        nodes = {f"T{n}": ("ij,jk->ik", f"T{n - 1}" if n else "A", "B") for n in range(length)}
        return decompose(square(16, nodes), tiles=8, objective="paper").cost

    costs = [chain(length) for length in (20, 40, 60)]
    assert costs[1] - costs[0] == costs[2] - costs[1] > 0


# Exactly the optimum


@settings(max_examples=500, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(strategies.graphs(most=7), TILES)
def test_the_published_optimum_is_that_of_brute_force(graph: EinGraph, tiles: int) -> None:
    assert_optimal(graph, tiles, "paper")


@settings(max_examples=500, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(strategies.graphs(most=7), TILES)
def test_the_fewest_bytes_are_those_of_brute_force(graph: EinGraph, tiles: int) -> None:
    assert_optimal(graph, tiles, "bytes")


@settings(max_examples=100, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(strategies.graphs(most=7, streams=True), st.sampled_from([2, 3, 4]))
def test_the_fewest_seconds_are_those_of_brute_force(graph: EinGraph, tiles: int) -> None:
    assert_optimal(graph, tiles, "seconds")


def a_worker_each(graph: EinGraph, tiles: int) -> Topology:
    """A worker for every tile of any grid, promised and diagonal ones too: the oracle knows no more than one each."""
    grids = [output.chunks for output in graph.outputs if output.chunks is not None]
    for name, found in oracle.candidates(graph, [tiles], "bytes").items():
        grids += [one.grid(labels) for one in found for labels in graph.nodes[name].expression.operands]
    return Topology(workers=max([tiles, *(prod(map(len, grid)) for grid in grids)]))


def assert_optimal(graph: EinGraph, tiles: int, objective: str) -> None:
    """The plan costs what the best of all assignments costs, and its own partitions cost that."""
    topology = a_worker_each(graph, tiles)
    candidates = oracle.candidates(graph, [tiles], objective)
    # every assignment is tried; those in seconds are priced one by one, which takes a while
    assume(prod(map(len, candidates.values())) <= (150 if objective == "seconds" else 10**6))
    plan = decompose(graph, tiles=tiles, objective=objective, topology=topology)
    assert plan.gap == 0
    assert plan.objective == objective
    assert [choice.name for choice in plan.choices] == list(graph.nodes)
    assert all(plan.partitions[name] in candidates[name] for name in graph.nodes)
    best = oracle.brute_force(graph, candidates, objective, topology)
    assert plan.cost == pytest.approx(best, rel=1e-9, abs=1e-9)
    priced = oracle.plan_cost(graph, plan.partitions, objective, topology)
    assert priced == pytest.approx(plan.cost, rel=1e-9, abs=1e-9)


# Invariants


@settings(max_examples=50)
@given(strategies.graphs(streams=True), st.integers(1, 5), st.integers(1, 3))
def test_a_plan_priced_anew_costs_what_was_reported(graph: EinGraph, workers: int, threads: int) -> None:
    topology = Topology(workers=workers, threads=threads)
    plan = decompose(graph, topology=topology)
    anew = price(graph, plan.partitions, topology)
    assert anew.cost == pytest.approx(plan.cost, rel=1e-9, abs=1e-12)
    assert anew.seconds == pytest.approx(plan.cost, rel=1e-9, abs=1e-12)
    assert (anew.choices, anew.delivery) == (plan.choices, plan.delivery)


@settings(max_examples=50)
@given(strategies.graphs(), TILES)
def test_the_bytes_reported_are_the_traffic_of_the_plan(graph: EinGraph, tiles: int) -> None:
    plan = decompose(graph, tiles=tiles, objective="bytes")
    assert plan.cost == plan.traffic.nbytes


@settings(max_examples=50)
@given(strategies.graphs(), st.data())
def test_any_partition_can_be_priced(graph: EinGraph, data: st.DataObject) -> None:
    partitions = {name: data.draw(strategies.partitions(node)) for name, node in graph.nodes.items()}
    plan = price(graph, partitions, Topology(workers=3))
    assert plan.partitions == partitions
    assert plan.cost >= 0
    assert all(choice.join.tasks == choice.tiles for choice in plan.choices)


@settings(max_examples=50)
@given(
    strategies.graphs(most=4),
    st.sampled_from([2, 4]),
    st.sampled_from(["paper", "bytes", "seconds"]),
    st.data(),
)
def test_labels_operands_and_the_order_of_nodes_do_not_matter(
    graph: EinGraph, tiles: int, objective: str, data: st.DataObject
) -> None:
    nodes = {}
    for name in data.draw(topological_orders(graph)):
        node = graph.nodes[name]
        expression = node.expression
        letters = dict(zip(expression.labels, data.draw(st.permutations("abcdefghijk"))))
        order = data.draw(st.permutations(range(len(node.inputs))))
        renamed = replace(
            expression,
            operands=tuple(tuple(letters[label] for label in expression.operands[n]) for n in order),
            output=tuple(letters[label] for label in expression.output),
        )
        back = {letters[label]: extent for label, extent in node.extents}
        nodes[name] = replace(
            node,
            expression=renamed,
            inputs=tuple(node.inputs[n] for n in order),
            extents=tuple((label, back[label]) for label in renamed.labels),
        )
    one, other = (
        decompose(each, tiles=tiles, objective=objective) for each in (graph, replace(graph, nodes=nodes))
    )
    assert one.cost == pytest.approx(other.cost, rel=1e-9, abs=1e-12)


@st.composite
def topological_orders(draw: st.DrawFn, graph: EinGraph) -> list[str]:
    """Names of the nodes in any order in which each comes after those it reads."""
    order: list[str] = []
    while len(order) < len(graph.nodes):
        ready = [
            name
            for name, node in graph.nodes.items()
            if name not in order and all(one in graph.inputs or one in order for one in node.inputs)
        ]
        order.append(draw(st.sampled_from(ready)))
    return order


@settings(max_examples=50)
@given(strategies.graphs(), TILES, st.sampled_from(["paper", "bytes"]))
def test_no_plan_is_below_the_sum_of_what_each_expression_costs_at_least(
    graph: EinGraph, tiles: int, objective: str
) -> None:
    candidates = oracle.candidates(graph, [tiles], objective)
    least = sum(
        min(oracle.node_cost(graph, node, one.parts, objective) for one in candidates[name])
        for name, node in graph.nodes.items()
    )
    assert decompose(graph, tiles=tiles, objective=objective).cost >= least


@settings(max_examples=50)
@given(strategies.graphs(pinned=False))
def test_one_tile_costs_the_inputs_of_every_expression_and_nothing_else(graph: EinGraph) -> None:
    plan = decompose(graph, tiles=1, objective="paper")
    assert plan.cost == sum(
        prod(graph.shape(source)) for node in graph.nodes.values() for source in node.inputs
    )
    assert plan.traffic.nbytes == 0
    assert all(choice.aggregate.flops == choice.repartition.tasks == 0 for choice in plan.choices)


@settings(max_examples=50)
@given(strategies.graphs(), st.sampled_from([2, 4, 8]), st.sampled_from(["paper", "bytes"]))
def test_no_plan_costs_more_than_a_heuristics(graph: EinGraph, tiles: int, objective: str) -> None:
    """Rows only and the square root of P on two labels, where they are candidates for every expression."""
    topology = a_worker_each(graph, tiles)
    candidates = oracle.candidates(graph, [tiles], objective)
    cost = decompose(graph, tiles=tiles, objective=objective, topology=topology).cost
    for heuristic in (rows, square_root):
        chosen = {name: heuristic(one) for name, one in candidates.items()}
        assert cost <= oracle.plan_cost(graph, chosen, objective, topology) * (1 + 1e-9)


def rows(candidates: list[Partition]) -> Partition:
    """The one that cuts the first label most."""
    return max(candidates, key=lambda one: [parts for parts in one.parts.values()])


def square_root(candidates: list[Partition]) -> Partition:
    """The one whose largest number of parts is least."""
    return min(candidates, key=lambda one: max(one.parts.values(), default=1))


HEURISTICS = {
    "data": ("b",),
    "sequence": ("s", "t"),
    "heads": ("h", "f", "a", "s"),
    "rows": ("s", "b", "h"),
    "features": ("a", "f", "d", "h", "s"),
}
"""Labels that hand-made plans cut, the first that an expression has."""


@pytest.mark.parametrize("objective", ["paper", "bytes", "seconds"])
@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.parametrize("name", [*HEURISTICS, "square root"])
def test_a_transformer_costs_no_more_than_by_a_plan_made_by_hand(
    name: str, workers: int, objective: str
) -> None:
    graph = llama(layers=2, a=16, h=8, d=8, f=16, batch=8, sequence=8)
    # slow enough to be worth sharing, so that every plan made by hand is one of candidates
    topology = Topology(workers=workers, flops=1e3, task_overhead=1e-6)
    plan = decompose(graph, topology=topology, objective=objective)
    partitions = {}
    for node in graph.nodes.values():
        extents = dict(node.extents)
        if name == "square root":
            longest = [label for label in extents if extents[label] >= 4][:2]
            parts = dict(zip(longest, (workers // 2, 2))) if len(longest) > 1 else {longest[0]: workers}
        else:
            parts = {
                next(one for one in (*HEURISTICS[name], *extents) if extents.get(one, 0) >= workers): workers
            }
        partitions[node.name] = Partition.balanced(extents, parts)
    by_hand = oracle.plan_cost(graph, partitions, objective, topology)
    assert plan.cost <= by_hand * (1 + 1e-9)
    assert plan.gap == 0


@settings(max_examples=50)
@given(strategies.graphs(), st.integers(1, 6))
def test_seconds_are_never_above_those_of_the_graph_as_it_came(graph: EinGraph, workers: int) -> None:
    topology = Topology(workers=workers)
    thirds = {
        name: {label: min(3, max(n, 1)) for label, n in node.extents} for name, node in graph.nodes.items()
    }
    came = {name: Partition.balanced(dict(node.extents), thirds[name]) for name, node in graph.nodes.items()}
    nodes = {name: replace(node, came=came[name].cuts) for name, node in graph.nodes.items()}
    graph = replace(graph, nodes=nodes)
    assert decompose(graph, topology=topology).cost <= price(graph, came, topology).cost * (1 + 1e-9)


def test_it_beats_rows_only_and_square_roots_where_neither_is_best() -> None:
    graph, topology = diamond(), Topology(workers=8)
    sizes = {name: dict(node.extents) for name, node in graph.nodes.items()}
    by_rows = {name: Partition.balanced(extents, {"i": 8}) for name, extents in sizes.items()}
    by_root = {name: Partition.balanced(extents, {"i": 4, "j": 2}) for name, extents in sizes.items()}
    for heuristic in (by_rows, by_root):
        assert oracle.plan_cost(graph, heuristic, "paper", topology) > 1216


@settings(max_examples=50)
@given(strategies.graphs(), st.integers(1, 6))
def test_seconds_without_a_number_of_tiles_are_never_above_those_with_one(
    graph: EinGraph, workers: int
) -> None:
    topology = Topology(workers=workers)
    free = decompose(graph, topology=topology).cost
    for tiles in {1, workers, 2 * workers}:
        assert free <= decompose(graph, topology=topology, tiles=tiles).cost * (1 + 1e-9)


def test_the_same_graph_gives_the_same_plan() -> None:
    one, two = (decompose(diamond(), topology=Topology(workers=8)) for _ in range(2))
    assert one == two


# Given chunks, promised chunks, memory


def test_an_input_that_lies_cut_by_rows_is_read_by_rows() -> None:
    inputs, nodes = {"A": (16, 16)}, {"Z": ("ij->ij", "A")}
    for chunks, parts in ((((4,) * 4, (16,)), (4, 1)), (((16,), (4,) * 4), (1, 4))):
        graph = EinGraph.from_spec(inputs, nodes, ["Z"], chunks={"A": chunks})
        plan = decompose(graph, tiles=4, objective="bytes")
        assert plan.cost == 0
        assert plan.choices[0].partition == dict(zip("ij", parts))


def test_promised_chunks_are_an_edge_that_is_paid_for() -> None:
    graph = EinGraph.from_spec({"A": (16, 16)}, {"Z": ("ij->i", "A")}, ["Z"], chunks={"A": ((4,) * 4, (16,))})
    promised = replace(graph, outputs=(Output("Z", "Z", ((16,),)),))
    assert decompose(graph, tiles=4, objective="bytes").cost == 0
    plan = decompose(promised, tiles=4, objective="bytes")
    assert plan.cost == plan.delivery.nbytes == 12 * 8


def test_the_uneven_cut_an_array_has_is_taken_over() -> None:
    graph = EinGraph.from_spec({"A": (10, 4)}, {"Z": ("ij->ij", "A")}, ["Z"], chunks={"A": ((7, 3), (4,))})
    plan = decompose(graph, tiles=2, objective="seconds")
    assert plan.choices[0].cuts.grid(("i", "j")) == ((7, 3), (4,))
    assert plan.traffic.nbytes == 0


def test_the_cut_that_came_is_a_candidate() -> None:
    graph = single("ij,jk->ik", {"i": 6, "j": 6, "k": 6})
    came = (("i", (4, 2)), ("j", (6,)), ("k", (6,)))
    chunks = {"X0": ((4, 2), (6,)), "X1": ((6,), (6,))}
    inputs = {name: replace(one, chunks=chunks[name]) for name, one in graph.inputs.items()}
    node = replace(graph.nodes["Z"], came=came)
    pinned = replace(graph, inputs=inputs, nodes={"Z": node}, outputs=(Output("Z", "Z", ((4, 2), (6,))),))
    slow = Topology(workers=2, bandwidth=1.0, latency=0.0, task_overhead=1e-9, flops=1e15)
    plan = decompose(pinned, topology=slow)
    assert price(pinned, {"Z": Partition(came)}, slow).cost >= plan.cost


def test_a_working_set_above_the_limit_is_no_candidate() -> None:
    graph = single("ij,jk->ik", {"i": 64, "j": 64, "k": 64})
    whole = decompose(graph, topology=Topology(workers=1))
    assert whole.choices[0].tiles == 1
    assert whole.choices[0].join.peak_nbytes == 3 * 64 * 64 * 8
    limited = decompose(graph, topology=Topology(workers=1), memory_limit=2 * 64 * 64 * 8)
    assert limited.choices[0].tiles > 1
    assert limited.traffic.peak_nbytes <= 2 * 64 * 64 * 8


def test_the_limit_is_a_share_of_the_topologys_memory() -> None:
    graph = single("ij,jk->ik", {"i": 64, "j": 64, "k": 64})
    plan = decompose(graph, topology=Topology(workers=1, memory=100_000))
    assert 0 < plan.traffic.peak_nbytes <= 60_000


def test_more_tiles_than_four_a_slot_are_tried_where_fewer_do_not_fit() -> None:
    graph = single("ij,jk->ik", {"i": 256, "j": 256, "k": 256})
    # the result is 524,288 bytes; 70,000 more hold a row of tiles only if they are thin
    plan = decompose(graph, topology=Topology(workers=1), memory_limit=524_288 + 70_000)
    assert plan.choices[0].tiles > 4
    assert plan.traffic.peak_nbytes <= 524_288 + 70_000


def test_where_nothing_fits_the_expression_its_need_and_a_remedy_are_named() -> None:
    graph = single("ij,jk->ik", {"i": 8, "j": 8, "k": 8})
    reason = (
        r"Z \(ij,jk->ik\) needs ([\d,]+) bytes on each of 2 workers, but may have 1; "
        r"a memory limit of \1 bytes or more workers would do"
    )
    with pytest.raises(BudgetError, match=reason) as raised:
        decompose(graph, topology=Topology(workers=2), memory_limit=1)
    needed = int(str(raised.value).split(" needs ")[1].split()[0].replace(",", ""))
    plan = decompose(graph, topology=Topology(workers=2), memory_limit=needed)
    assert plan.traffic.peak_nbytes <= needed


def test_the_peak_of_the_whole_plan_is_brought_under_the_limit() -> None:
    # an intermediate that many read is either held on one worker or shared: shared costs messages, held memory
    nodes = {"T": ("ij,jk->ik", "A", "B"), "U": ("ij,jk->ik", "T", "C"), "V": ("ij,ij->ij", "T", "U")}
    graph = square(256, nodes, inputs="ABC")
    slow_network = Topology(workers=4, bandwidth=1e6, latency=1.0, task_overhead=0.0)
    free = decompose(graph, topology=slow_network)
    limit = int(0.6 * free.traffic.peak_nbytes)
    tight = decompose(graph, topology=slow_network, memory_limit=limit)
    assert tight.traffic.peak_nbytes <= limit < free.traffic.peak_nbytes
    assert tight.cost >= free.cost


def test_a_whole_plan_that_cannot_fit_is_refused_though_each_expression_would() -> None:
    nodes = {f"T{n}": ("ij,jk->ik", "A", "B") for n in range(6)}
    nodes |= {"S0": ("ij,jk->ik", "T0", "T1")}
    nodes |= {f"S{n}": ("ij,jk->ik", f"S{n - 1}", f"T{n + 1}") for n in range(1, 5)}
    graph = square(64, nodes, inputs="AB")
    # two products and their own fit, six products that are all read later do not
    limit = 3 * graph.nbytes("T0")
    with pytest.raises(BudgetError, match="all that is held beside it included, but may have"):
        decompose(graph, topology=Topology(workers=1), memory_limit=limit)


def test_more_tiles_are_tried_where_the_whole_plan_is_over_the_limit() -> None:
    # the product is passed on, two tiles of it at a time: with four tiles a worker that is half of it
    nodes = {"T": ("ij,jk->ik", "A", "B"), "U": ("ij->ij", "T", {"join": "exp"}), "V": ("ij->i", "U")}
    graph = EinGraph.from_spec({"A": (512, 2), "B": (2, 512)}, nodes, ["V"])
    limit = graph.nbytes("T") // 3
    plan = decompose(graph, topology=Topology(workers=1), memory_limit=limit)
    assert plan.traffic.peak_nbytes <= limit
    assert {choice.tiles for choice in plan.choices} & {8, 16, 32, 64}


# Budgets


def blocks(plan: Plan, graph: EinGraph) -> list[int]:
    """Bytes of the largest block of every expression of a plan."""
    grids = {one.name: one.cuts.grid(graph.nodes[one.name].expression.output) for one in plan.choices}
    return [prod(map(max, grid)) * graph.itemsize(name) for name, grid in grids.items()]


@pytest.mark.parametrize("limit", [1 << 17, 1 << 14, 4096, 8])
def test_no_block_is_larger_than_allowed(limit: int) -> None:
    graph = square(128, {"T": ("ij,jk->ik", "A", "B"), "R": ("ij,jk->ik", "T", "C")}, inputs="ABC")
    plan = decompose(graph, topology=Topology(workers=2), max_block_bytes=limit)
    assert max(blocks(plan, graph)) <= limit
    assert max(blocks(decompose(graph, topology=Topology(workers=2)), graph)) > 1 << 14


def test_a_block_that_cannot_be_so_small_is_named() -> None:
    with pytest.raises(BudgetError, match=r"Z \(ij,jk->ik\) has a block of 8 bytes .*max-block-bytes is 7"):
        decompose(single("ij,jk->ik", {"i": 4, "j": 4, "k": 4}), topology=Topology(), max_block_bytes=7)


def test_no_more_tasks_than_allowed() -> None:
    graph = square(256, {"T": ("ij,jk->ik", "A", "B"), "R": ("ij,jk->ik", "T", "C")}, inputs="ABC")
    cheap_tasks = Topology(workers=8, flops=1e6, task_overhead=1e-6)
    free = decompose(graph, topology=cheap_tasks)
    assert free.traffic.tasks > 8
    for limit in (8, 5, 2):
        plan = decompose(graph, topology=cheap_tasks, max_tasks=limit)
        assert plan.traffic.tasks <= limit
        assert free.cost <= plan.cost == pytest.approx(price(graph, plan.partitions, cheap_tasks).cost)
        assert plan.cost <= free.cost * (1 + plan.gap) * (1 + 1e-9)


def test_fewer_tasks_than_there_can_be_are_refused() -> None:
    graph = square(16, {"T": ("ij,jk->ik", "A", "B"), "R": ("ij,jk->ik", "T", "C")}, inputs="ABC")
    reason = "fewest tasks found has 2, but max-tasks is 1; expected 2 or more"
    with pytest.raises(BudgetError, match=reason):
        decompose(graph, topology=Topology(workers=4), max_tasks=1)


@pytest.mark.parametrize("name", ["memory_limit", "max_block_bytes", "max_tasks", "timeout"])
def test_a_limit_is_more_than_nothing(name: str) -> None:
    with pytest.raises(DecomposeError, match=rf"{name} is 0; expected more than 0"):
        decompose(diamond(), tiles=4, **{name: 0})


# Any number of workers


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 6, 7, 12, 100])
def test_extents_that_divide_by_nothing_are_shared_evenly_by_any_number_of_workers(workers: int) -> None:
    graph = single("ij,jk->ik", {"i": 997, "j": 1009, "k": 1013})
    slow = Topology(workers=workers, flops=1e7, task_overhead=1e-6, latency=1e-6)
    choice = decompose(graph, topology=slow).choices[0]
    assert choice.tiles >= workers * 0.9
    for chunks in choice.cuts.grid(("i", "j", "k")):
        assert max(chunks) - min(chunks) <= 1


def test_seven_workers_get_seven_tiles_or_more() -> None:
    graph = single("ij,jk->ik", {"i": 997, "j": 1009, "k": 1013})
    assert decompose(graph, topology=Topology(workers=7, flops=1e8)).choices[0].tiles >= 7


def test_fewer_elements_than_workers_are_planned() -> None:
    graph = single("ij,jk->ik", {"i": 2, "j": 1, "k": 3})
    for objective in ("bytes", "seconds"):
        assert decompose(graph, topology=Topology(workers=50), objective=objective).choices[0].tiles <= 6


def test_work_too_small_to_share_is_one_tile() -> None:
    graph = single("ij,jk->ik", {"i": 16, "j": 16, "k": 16})
    choice = decompose(graph, topology=Topology(workers=64)).choices[0]
    assert (choice.tiles, choice.reason) == (1, "too small to share")


def test_two_hosts_keep_bytes_inside_them() -> None:
    graph = square(512, {"T": ("ij,jk->ik", "A", "B")}, inputs="AB")
    near = Topology(workers=8, hosts=2, bandwidth=1e6, local_bandwidth=1e12, latency=0, task_overhead=1e-9)
    plan = decompose(graph, topology=near)
    assert plan.traffic.crossing <= plan.traffic.nbytes
    flat = price(graph, decompose(graph, topology=Topology(workers=8)).partitions, near)
    assert plan.cost <= flat.cost


# Time


def test_when_time_is_over_before_there_is_a_plan_that_is_said() -> None:
    with pytest.raises(PlanningTimeout, match="over before there was any plan"):
        decompose(diamond(), tiles=8, timeout=1e-9)


def test_when_time_is_over_while_solving_one_pass_gives_a_plan_and_an_honest_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best = decompose(diamond(), tiles=8, objective="paper").cost

    def late(*_: Any) -> Any:
        raise elimination.Late

    monkeypatch.setattr("dask_eindecomp.decompose.minimise", late)
    plan = decompose(diamond(), tiles=8, objective="paper", timeout=60)
    assert plan.cost >= best
    assert plan.gap >= plan.cost / best - 1


def test_the_elimination_looks_at_the_clock() -> None:
    with pytest.raises(elimination.Late):
        elimination.minimise({"a": np.zeros(2)}, [], deadline=0.0)


# Edges


def test_a_graph_of_nothing_has_a_plan_of_nothing() -> None:
    plan = decompose(EinGraph({}, {}, ()), tiles=4, objective="paper")
    assert (plan.choices, plan.cost, plan.gap) == ((), 0, 0)


@pytest.mark.parametrize("objective", ["paper", "bytes", "seconds"])
def test_scalars_and_empty_arrays_are_planned(objective: str) -> None:
    graph = EinGraph.from_spec(
        {"A": (), "B": (0, 4)},
        {"T": (",ij->ij", "A", "B"), "Z": ("ij->", "T"), "S": (",->", "Z", "A")},
        ["S"],
    )
    plan = decompose(graph, tiles=4, objective=objective)
    assert [choice.tiles for choice in plan.choices] == [4, 4, 1]
    assert plan.gap == 0


def test_a_tensor_read_twice_by_one_expression_is_paid_for_twice() -> None:
    graph = EinGraph.from_spec({"A": (8, 8)}, {"T": ("ij->ij", "A"), "Z": ("ij,jk->ik", "T", "T")}, ["Z"])
    for objective in ("paper", "bytes"):
        candidates = oracle.candidates(graph, [8], objective)
        best = oracle.brute_force(graph, candidates, objective, Topology(workers=8))
        assert decompose(graph, tiles=8, objective=objective).cost == best


def test_the_default_is_seconds_on_as_many_workers_as_tiles() -> None:
    plan = decompose(diamond(), tiles=4)
    assert plan.objective == "seconds"
    assert plan.topology == Topology(workers=4)
    assert plan.cost == pytest.approx(plan.seconds)


def test_bytes_of_a_topology_take_a_tile_a_slot() -> None:
    plan = decompose(diamond(), topology=Topology(workers=2, threads=2), objective="bytes")
    assert {choice.tiles for choice in plan.choices} == {4}


@pytest.mark.parametrize(
    ("labels", "parts", "reason"),
    [
        ("ij,jk->ik", {}, "too small to share"),
        ("ij,jk->ik", {"i": 2}, "no partial results"),
        ("ij,jk->ik", {"j": 2}, "partial results are small"),
        ("ij,jk->ik", {"i": 2, "j": 2}, "balances inputs against partial results"),
    ],
)
def test_a_choice_says_why(labels: str, parts: dict[str, int], reason: str) -> None:
    graph = single(labels, {"i": 4, "j": 4, "k": 4})
    partitions = {"Z": Partition.balanced({"i": 4, "j": 4, "k": 4}, parts)}
    assert price(graph, partitions, Topology(workers=4)).choices[0].reason == reason


def test_a_choice_on_one_worker_or_as_it_came_says_so() -> None:
    graph = single("ij,jk->ik", {"i": 4, "j": 4, "k": 4})
    whole, halves = (Partition.balanced({"i": 4, "j": 4, "k": 4}, {"i": n}) for n in (1, 2))
    came = replace(graph, nodes={"Z": replace(graph.nodes["Z"], came=halves.cuts)})
    assert price(graph, {"Z": whole}, Topology()).choices[0].reason == "one worker"
    assert price(came, {"Z": halves}, Topology(workers=2)).choices[0].reason == "as it came"


# A cap on the tables


@pytest.mark.parametrize("cap", [1, 10, 100, 1000])
@pytest.mark.parametrize("objective", ["paper", "bytes"])
def test_with_small_tables_the_diamond_has_a_valid_plan_and_an_honest_gap(
    monkeypatch: pytest.MonkeyPatch, cap: int, objective: str
) -> None:
    best = decompose(diamond(), tiles=8, objective=objective).cost
    monkeypatch.setattr(elimination, "WORK_CAP", cap)
    assert_within_gap(diamond(), objective, best)


@settings(max_examples=50)
@given(strategies.graphs(), st.integers(1, 60), st.sampled_from(["paper", "bytes"]))
def test_with_small_tables_any_plan_is_valid_and_within_its_gap(
    graph: EinGraph, cap: int, objective: str
) -> None:
    best = decompose(graph, tiles=8, objective=objective, topology=a_worker_each(graph, 8)).cost
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "WORK_CAP", cap)
        assert_within_gap(graph, objective, best)


def assert_within_gap(graph: EinGraph, objective: str, best: float) -> None:
    """A plan of candidates that costs what it says, and no further from the optimum than its gap."""
    topology = a_worker_each(graph, 8)
    plan = decompose(graph, tiles=8, objective=objective, topology=topology)
    candidates = oracle.candidates(graph, [8], objective)
    assert all(plan.partitions[name] in candidates[name] for name in graph.nodes)
    priced = oracle.plan_cost(graph, plan.partitions, objective, topology)
    assert priced == pytest.approx(plan.cost)
    assert plan.cost >= best * (1 - 1e-9)
    if best:
        assert plan.gap >= plan.cost / best - 1 - 1e-9
    elif plan.cost:
        assert plan.gap > 0


def test_a_cap_that_is_not_reached_leaves_the_optimum_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination, "WORK_CAP", 10**4)
    plan = decompose(diamond(), tiles=8, objective="paper")
    assert (plan.cost, plan.gap) == (1216, 0)


@st.composite
def sums(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], list[Factor]]:
    """Up to six variables, and costs between some of them that see classes of values only."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = {name: int(random.integers(1, 5)) for name in "abcdef"[: draw(st.integers(1, 6))]}
    alone = {name: random.integers(0, 9, size).astype(float) for name, size in sizes.items()}
    factors = []
    for _ in range(draw(st.integers(0, 9)) if len(sizes) > 1 else 0):
        scope = tuple(map(str, random.choice(list(sizes), 2, replace=False)))
        counts = random.integers(1, 4, 2)
        classes = tuple(random.integers(0, count, sizes[name]) for name, count in zip(scope, counts))
        factors.append(Factor(scope, random.integers(0, 9, counts).astype(float), classes))
    return alone, factors + factors[: draw(st.integers(0, 2))]  # the same table twice counts twice


def total(alone: dict[str, np.ndarray], factors: list[Factor], chosen: dict[str, int]) -> float:
    """What one assignment costs, written out."""
    return sum(costs[chosen[name]] for name, costs in alone.items()) + sum(
        one.table[tuple(mine[chosen[name]] for name, mine in zip(one.scope, one.classes))] for one in factors
    )


def every_total(alone: dict[str, np.ndarray], factors: list[Factor]) -> list[float]:
    """What each assignment costs."""
    return [
        total(alone, factors, dict(zip(alone, values)))
        for values in product(*(range(len(costs)) for costs in alone.values()))
    ]


@settings(max_examples=300)
@given(sums())
def test_the_least_sum_of_tables_is_that_of_every_assignment(
    tables: tuple[dict[str, np.ndarray], list[Factor]],
) -> None:
    indices, value, gap = elimination.minimise(*tables)
    assert total(*tables, indices) == value == min(every_total(*tables))
    assert gap == 0


@settings(max_examples=300)
@given(sums(), st.integers(1, 40))
def test_a_gap_is_never_less_than_the_true_one(
    tables: tuple[dict[str, np.ndarray], list[Factor]], cap: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "WORK_CAP", cap)
        indices, value, gap = elimination.minimise(*tables)
    least = min(every_total(*tables))
    assert total(*tables, indices) == value >= least
    assert value <= least * (1 + gap) + 1e-9 or gap == float("inf")


def test_a_sum_is_the_same_however_little_of_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    alone = {name: random.random(20) for name in "abc"}
    same = np.arange(20)
    factors = [
        Factor(pair, random.random((20, 20)), (same, same)) for pair in (("a", "b"), ("b", "c"), ("a", "c"))
    ]
    expected = elimination.minimise(alone, factors)
    for size in (1, 50, 1 << 20):
        monkeypatch.setattr(elimination, "IN_CACHE", size)
        assert elimination.minimise(alone, factors) == expected


@pytest.mark.parametrize("objective", ["paper", "bytes", "seconds"])
def test_repeated_layers_are_joined_in_pairs_not_one_after_the_other(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = []
    least_sum = elimination._least_sum
    monkeypatch.setattr(elimination, "_least_sum", lambda *tables: joined.append(1) or least_sum(*tables))
    counts = []
    for layers in (4, 64):
        joined.clear()
        decompose(llama(layers, a=64, h=4, d=16, f=128), topology=Topology(workers=8), objective=objective)
        counts.append(len(joined))
    # each doubling of the layers takes one more round, of no more tables than one layer has
    assert counts[0] < counts[1] <= counts[0] + 4 * 8


def test_costs_of_the_same_two_variables_are_one_table() -> None:
    some, fewer = np.array([0, 1, 2]), np.array([0, 0, 1])
    first = Factor(("a", "b"), np.arange(9.0).reshape(3, 3), (some, some))
    second = Factor(("b", "a"), np.array([[5.0, 1.0, 2.0], [0.0, 7.0, 3.0]]), (fewer, some))
    tables = ({"a": np.zeros(3), "b": np.array([4.0, 0.0, 2.0])}, [first, second])
    work = elimination._Elimination(*tables, None)
    assert len(work.touching["a"]) == len(work.touching["b"]) == 1
    indices, value, _ = elimination.minimise(*tables)
    assert total(*tables, indices) == value == min(every_total(*tables))


def test_the_bound_of_a_cut_off_search_is_no_worse_than_adding_up_minima(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elimination, "WORK_CAP", 200)
    graph = diamond()
    plan = decompose(graph, tiles=8, objective="paper")
    least = sum(
        min(oracle.node_cost(graph, graph.nodes[name], one.parts, "paper") for one in found)
        for name, found in oracle.candidates(graph, [8], "paper").items()
    )
    assert 0 < plan.gap <= plan.cost / least - 1 + 1e-12


# What makes no sense


def test_an_unknown_objective_is_named_with_those_there_are() -> None:
    with pytest.raises(
        DecomposeError, match=r"unknown objective 'flops'; expected one of paper, bytes, seconds"
    ):
        decompose(diamond(), tiles=4, objective="flops")


@pytest.mark.parametrize("tiles", [0, -8])
def test_there_is_at_least_one_tile(tiles: int) -> None:
    with pytest.raises(DecomposeError, match=rf"cannot plan for {tiles} tiles; expected at least 1"):
        decompose(diamond(), tiles=tiles)


def test_tiles_or_a_topology_must_be_given() -> None:
    with pytest.raises(DecomposeError, match=r"neither tiles nor a topology was given; expected one of them"):
        decompose(diamond())


def test_its_errors_are_value_errors() -> None:
    assert issubclass(DecomposeError, ValueError)


def test_two_results_are_delivered_one_after_the_other() -> None:
    spec = {"R": ("i->i", "A"), "S": ("i,j->ij", "A", "R"), "T": ("i,i->i", "A", "R")}
    graph = EinGraph.from_spec({"A": (3,)}, spec, ["S", "T"])
    promised = (Output("S", "S", ((3,), (2, 1))), Output("T", "T", ((2, 1),)))
    graph = replace(graph, outputs=promised)
    cuts = {"R": {}, "S": {"i": 3}, "T": {}}
    partitions = {
        node.name: Partition.balanced(dict(node.extents), cuts[node.name]) for node in graph.nodes.values()
    }
    topology = Topology(workers=8)
    plan = price(graph, partitions, topology)
    alone = [
        price(replace(graph, outputs=(output,)), partitions, topology).delivery_seconds for output in promised
    ]
    assert plan.delivery_seconds == pytest.approx(sum(alone))
    assert plan.delivery_seconds > topology.move_seconds(plan.delivery)
