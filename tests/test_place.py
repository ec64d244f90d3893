"""Tiles go where their inputs lie, evenly."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import permutations
from math import prod
from typing import Any

import numpy as np
import pytest
from dask._task_spec import Alias
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_eindecomp.estimate import price
from dask_eindecomp.graph import EinGraph
from dask_eindecomp.kernels import Cut, Join
from dask_eindecomp.lower import Lowered, lower
from dask_eindecomp.partition import Partition
from dask_eindecomp.place import _matched, _swapped, place
from dask_eindecomp.plan import Placement
from dask_eindecomp.topology import Topology
from tests import strategies

FOUR = Topology(workers=4)
ROWS = ((2, 2, 2, 2), (8,))
SQUARES = ((4, 4), (4, 4))


def cut(graph: EinGraph, **parts: dict[str, int]) -> dict[str, Partition]:
    """Balanced partitions by name."""
    return {name: Partition.balanced(dict(graph.nodes[name].extents), mine) for name, mine in parts.items()}


def moved(graph: EinGraph, partitions: dict[str, Partition], placement: Placement) -> int:
    """Bytes that must reach a worker for its tiles, counted element by element."""
    total = 0
    for node in graph.nodes.values():
        mine, labels = partitions[node.name], node.expression.labels
        for operand, source in zip(node.expression.operands, node.inputs):
            chunks = (
                graph.inputs[source].chunks
                if source in graph.inputs
                else partitions[source].grid(graph.nodes[source].expression.output)
            )
            assert chunks is not None
            owner = np.block(spread(placement.blocks[source], chunks))
            lacking = set()
            for at in np.ndindex(placement.tiles[node.name].shape):
                worker = placement.tiles[node.name][at]
                edges = [np.cumsum((0, *axis)) for axis in mine.grid(operand)]
                inside = tuple(
                    slice(edge[at[labels.index(label)]], edge[at[labels.index(label)] + 1])
                    for edge, label in zip(edges, operand)
                )
                numbers = np.arange(owner.size).reshape(owner.shape)[inside]
                away = numbers[owner[inside] != worker]
                lacking |= {(worker, int(number)) for number in away.reshape(-1)}
            total += len(lacking) * graph.itemsize(source)
    return total


def spread(owners: np.ndarray, chunks: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """The owner of every element."""
    for axis, lengths in enumerate(chunks):
        owners = np.repeat(owners, lengths, axis=axis)
    return owners


def test_what_lies_where_it_is_needed_stays() -> None:
    graph = EinGraph.from_spec(
        {"A": (8, 8)}, {"T": ("ij->ij", "A"), "Z": ("ij->i", "T")}, ["Z"], chunks={"A": ROWS}
    )
    partitions = cut(graph, T={"i": 4}, Z={"i": 4})
    placement = place(graph, partitions, FOUR)
    assert placement.blocks["Z"].tolist() == [0, 1, 2, 3]
    assert moved(graph, partitions, placement) == 0


def test_known_owners_are_followed_wherever_they_are() -> None:
    graph = EinGraph.from_spec({"A": (8, 8)}, {"Z": ("ij->i", "A")}, ["Z"], chunks={"A": ROWS})
    graph = replace(graph, inputs={"A": replace(graph.inputs["A"], owners=(2, 0, 3, 1))})
    placement = place(graph, cut(graph, Z={"i": 4}), FOUR)
    assert placement.tiles["Z"].reshape(-1).tolist() == [2, 0, 3, 1]


def test_a_product_of_squares_moves_the_lower_bound() -> None:
    spec = {"Z": ("ij,jk->ik", "A", "B")}
    graph = EinGraph.from_spec({"A": (8, 8), "B": (8, 8)}, spec, ["Z"], chunks=dict.fromkeys("AB", SQUARES))
    partitions = cut(graph, Z={"i": 2, "k": 2})
    # each worker has a quarter of the row of A and of the column of B that it needs
    assert moved(graph, partitions, place(graph, partitions, FOUR)) == 2 * 64 * 8


def test_of_several_tiles_a_worker_runs_those_that_share_what_they_read() -> None:
    spec = {"Z": ("ij,jk->ik", "A", "B")}
    graph = EinGraph.from_spec({"A": (8, 8), "B": (8, 8)}, spec, ["Z"], chunks=dict.fromkeys("AB", ROWS))
    partitions = cut(graph, Z={"i": 4, "k": 4})
    placement = place(graph, partitions, FOUR)
    tiles = placement.tiles["Z"].reshape(4, 4)
    squares = [tiles[i : i + 2, k : k + 2] for i in (0, 2) for k in (0, 2)]
    assert sorted(int(square.max()) for square in squares if np.ptp(square) == 0) == [0, 1, 2, 3]
    # each lacks one of its two rows of A, and three quarters of its two columns of B
    assert moved(graph, partitions, placement) == 4 * (128 + 3 * 256 // 4)


def test_partial_results_are_added_up_where_one_of_them_is_and_evenly() -> None:
    spec = {"Z": ("ij,jk->ik", "A", "B")}
    graph = EinGraph.from_spec({"A": (8, 8), "B": (8, 8)}, spec, ["Z"])
    placement = place(graph, cut(graph, Z={"j": 2, "k": 2}), FOUR)
    tiles, blocks = placement.tiles["Z"], placement.blocks["Z"]
    assert sorted(tiles.reshape(-1).tolist()) == [0, 1, 2, 3]
    assert all(blocks[0, k] in tiles[0, :, k] for k in range(2))
    four = place(graph, cut(graph, Z={"j": 4, "k": 4}), FOUR)
    assert sorted(four.blocks["Z"].reshape(-1).tolist()) == [0, 1, 2, 3]


def test_one_worker_has_everything() -> None:
    graph = EinGraph.from_spec({"A": (8, 8)}, {"Z": ("ij->i", "A")}, ["Z"], chunks={"A": ROWS})
    placement = place(graph, cut(graph, Z={"i": 4}), Topology())
    assert not placement.tiles["Z"].any() and not placement.blocks["A"].any()


def test_too_many_tiles_to_look_at_are_dealt_out_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = EinGraph.from_spec({"A": (8, 8)}, {"Z": ("ij->ij", "A")}, ["Z"], chunks={"A": ROWS})
    monkeypatch.setattr("dask_eindecomp.place.MOST", 1)
    placement = place(graph, cut(graph, Z={"j": 8}), FOUR)
    assert placement.tiles["Z"].reshape(-1).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@settings(max_examples=200)
@given(strategies.graphs(), st.integers(1, 5), st.data())
def test_every_tile_and_block_has_a_worker_and_none_has_more_than_its_share(
    graph: EinGraph, workers: int, data: st.DataObject
) -> None:
    partitions = {name: data.draw(strategies.partitions(node)) for name, node in graph.nodes.items()}
    placement = place(graph, partitions, Topology(workers=workers))
    for name, node in graph.nodes.items():
        tiles, blocks = placement.tiles[name], placement.blocks[name]
        assert tiles.shape == tuple(partitions[name].parts[label] for label in node.expression.labels)
        assert blocks.shape == tuple(map(len, partitions[name].grid(node.expression.output)))
        load = np.bincount(tiles.reshape(-1), minlength=workers)
        assert len(load) == workers and load.max() <= -(-tiles.size // workers)
        assert set(blocks.reshape(-1).tolist()) <= set(tiles.reshape(-1).tolist())


@settings(max_examples=100)
@given(strategies.graphs(), st.data())
def test_every_task_that_is_not_an_output_alone_is_meant_for_a_worker(
    graph: EinGraph, data: st.DataObject
) -> None:
    inputs = {
        n: replace(one, chunks=one.chunks or tuple((k,) for k in one.shape))
        for n, one in graph.inputs.items()
    }
    graph = replace(graph, inputs=inputs)
    partitions = {name: data.draw(strategies.partitions(node)) for name, node in graph.nodes.items()}
    placed = lower(graph, partitions, place(graph, partitions, FOUR))
    plain = lower(graph, partitions)

    def tasks(lowered: Lowered) -> dict[str, set[Any]]:
        """Keys by layer, but of aggregates: a worker that has several partial results adds them up first."""
        return {name: set(one) for name, one in lowered.layers.items() if not name.startswith("aggregate-")}

    assert tasks(placed) == tasks(plain)
    assert not plain.workers
    assert set(placed.workers.values()) <= set(range(4))
    joins = [key for name, tasks in placed.layers.items() if name.startswith("join-") for key in tasks]
    assert all(key in placed.workers for key in joins)


# What is shipped


def shipped(graph: EinGraph, placement: Placement) -> int:
    """Bytes that a placement says first and further copies of operands ship."""
    return sum(one.join.nbytes + one.repartition.nbytes for one in placement.shipped.values())


def test_what_was_fetched_for_one_expression_is_there_for_the_next() -> None:
    nodes = {"Y": ("ij,jk->ik", "A", "B"), "Z": ("ij,jk->ik", "C", "B")}
    graph = EinGraph.from_spec(
        dict.fromkeys("ABC", (8, 8)), nodes, ["Y", "Z"], chunks=dict.fromkeys("ABC", ROWS)
    )
    placement = place(graph, cut(graph, Y={"i": 4}, Z={"i": 4}), FOUR)
    assert placement.shipped["Y"].join.nbytes + placement.shipped["Y"].repartition.nbytes == 3 * 512
    assert placement.shipped["Z"].join.nbytes + placement.shipped["Z"].repartition.nbytes == 0


def test_parts_that_are_cut_for_one_expression_are_no_whole_blocks_for_another() -> None:
    nodes = {"Y": ("ij,jk->ik", "B", "A"), "Z": ("ij->i", "A")}
    graph = EinGraph.from_spec(
        {"A": (8, 8), "B": (8, 8)}, nodes, ["Y", "Z"], chunks=dict.fromkeys("AB", ROWS)
    )
    graph = replace(graph, inputs=graph.inputs | {"A": replace(graph.inputs["A"], owners=(0, 0, 0, 0))})
    placement = place(graph, cut(graph, Y={"k": 4}, Z={"i": 4}), FOUR)
    # columns of all rows go to three workers, then three rows again as a whole
    assert placement.shipped["Y"].repartition.nbytes >= 3 * 128
    assert placement.shipped["Z"].repartition.nbytes == 3 * 128


def test_blocks_made_on_demand_are_made_where_they_are_wanted() -> None:
    graph = EinGraph.from_spec(
        {"A": (8, 8)}, {"Z": ("ij->j", "A")}, ["Z"], chunks={"A": ((4, 4), (2, 2, 2, 2))}
    )
    graph = replace(graph, inputs={"A": replace(graph.inputs["A"], stays=False)})
    placement = place(graph, cut(graph, Z={"j": 4}), FOUR)
    assert placement.shipped["Z"].repartition.nbytes == 0
    tiles = placement.tiles["Z"].reshape(-1).tolist()
    assert placement.blocks["A"].tolist() == [tiles, tiles]


def test_workers_with_more_threads_get_more_tiles() -> None:
    graph = EinGraph.from_spec({"A": (32, 8)}, {"Z": ("ij->i", "A")}, ["Z"])
    uneven = Topology(workers=3, threads=3, shares=(1, 2, 5))
    tiles = place(graph, cut(graph, Z={"i": 32}), uneven).tiles["Z"]
    assert np.bincount(tiles.reshape(-1)).tolist() == [4, 8, 20]


def test_without_scipy_tiles_are_exchanged_until_nothing_is_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    graph = EinGraph.from_spec({"A": (8, 8)}, {"Z": ("ij->i", "A")}, ["Z"], chunks={"A": ROWS})
    graph = replace(graph, inputs={"A": replace(graph.inputs["A"], owners=(2, 0, 3, 1))})
    placement = place(graph, cut(graph, Z={"i": 4}), FOUR)
    assert placement.tiles["Z"].reshape(-1).tolist() == [2, 0, 3, 1]


@settings(max_examples=100)
@given(st.integers(1, 6), st.integers(0, 3), st.randoms(use_true_random=False))
def test_exchanges_come_near_the_exact_assignment(rows: int, more: int, draw: random.Random) -> None:
    score = np.array([[draw.randrange(9) for _ in range(rows + more)] for _ in range(rows)], dtype=float)
    exact, near = _matched(score), _swapped(score)
    for chosen in (exact, near):
        assert len(set(chosen.tolist())) == rows
    at = np.arange(rows)
    best = max(
        sum(score[n, column] for n, column in enumerate(one))
        for one in permutations(range(rows + more), rows)
    )
    assert score[at, exact].sum() == best
    assert score[at, near].sum() >= best / 2


@settings(max_examples=200)
@given(strategies.graphs(), st.integers(1, 5), st.data())
def test_what_is_shipped_is_no_more_than_what_every_expression_lacks_by_itself(
    graph: EinGraph, workers: int, data: st.DataObject
) -> None:
    partitions = {name: data.draw(strategies.partitions(node)) for name, node in graph.nodes.items()}
    placement = place(graph, partitions, Topology(workers=workers))
    if all(one.chunks is not None for one in graph.inputs.values()):
        alone = moved(graph, partitions, placement)
        assert shipped(graph, placement) <= alone
        if all(len(found) < 2 for found in graph.readers.values()):
            assert shipped(graph, placement) == alone


def fetched(graph: EinGraph, lowered: Lowered, placement: Placement) -> tuple[int, int]:
    """Bytes and blocks that workers fetch to run the tasks of a lowered graph, each block once a worker."""
    tasks = {key: task for layer in lowered.layers.values() for key, task in layer.items()}

    def size(key: Any) -> int:
        if key not in tasks:
            return 8 * prod(axis[n] for axis, n in zip(graph.inputs[key[0]].chunks or (), key[1:]))
        task = tasks[key]
        if isinstance(task, Alias):
            return size(task.target)
        if isinstance(task.func, Join):
            return 8 * prod(dict(task.func.extents)[label] for label in task.func.output)
        if isinstance(task.func, Cut):
            return 8 * prod(stop - start for start, stop in task.func.bounds)
        return size(min(task.dependencies, key=str))

    def owner(key: Any) -> int:
        if key in tasks and isinstance(tasks[key], Alias):
            return owner(tasks[key].target)
        return lowered.workers[key] if key in lowered.workers else int(placement.blocks[key[0]][key[1:]])

    needed = {
        (one, lowered.workers[key])
        for key, task in tasks.items()
        if not isinstance(task, Alias)
        for one in task.dependencies
    }
    lacking = [key for key, worker in needed if owner(key) != worker]
    return sum(map(size, lacking)), sum(size(key) > 0 for key in lacking)


@settings(max_examples=300)
@given(strategies.graphs(streams=True), st.integers(1, 5), st.data())
def test_the_traffic_counted_is_that_of_the_lowered_graph(
    graph: EinGraph, workers: int, data: st.DataObject
) -> None:
    inputs = {
        n: replace(one, chunks=one.chunks or tuple((k,) for k in one.shape))
        for n, one in graph.inputs.items()
    }
    graph = replace(graph, inputs=inputs)
    partitions = {name: data.draw(strategies.partitions(node)) for name, node in graph.nodes.items()}
    placement = place(graph, partitions, Topology(workers=workers))
    counted = [
        part for one in placement.shipped.values() for part in (one.join, one.aggregate, one.repartition)
    ]
    total = sum(counted, placement.delivery)
    assert (total.nbytes, total.messages) == fetched(graph, lower(graph, partitions, placement), placement)


def test_expressions_that_are_computed_in_one_task_are_on_one_worker() -> None:
    nodes = {
        "T": ("ij,jk->ik", "A", "B"),
        "U": ("ij,jk->ik", "B", "A"),
        "V": ("ij,ij->ij", "T", "U"),
    }
    graph = EinGraph.from_spec({"A": (8, 8), "B": (8, 8)}, nodes, ["V"], chunks=dict.fromkeys("AB", ROWS))
    inputs = {
        "A": replace(graph.inputs["A"], owners=(0, 1, 2, 3)),
        "B": replace(graph.inputs["B"], owners=(3, 2, 1, 0)),
    }
    streams = graph.nodes | {"V": replace(graph.nodes["V"], kernel="stream")}
    graph = replace(graph, inputs=inputs, nodes=streams)
    partitions = cut(graph, T={"i": 4}, U={"i": 4}, V={"i": 4})
    assert all(graph.inlines(name, "V", partitions) for name in "TU")
    placement = place(graph, partitions, FOUR)
    rows = [placement.blocks[name].reshape(-1).tolist() for name in "TUV"]
    assert rows == [[0, 1, 2, 3]] * 3
    lowered = lower(graph, partitions, placement)
    counted = [part for one in placement.shipped.values() for part in (one.join, one.repartition)]
    total = sum(counted, placement.delivery)
    assert (total.nbytes, total.messages) == fetched(graph, lowered, placement)


@pytest.mark.parametrize("parts", [{"i": 2, "j": 2}, {"j": 4}, {"i": 2, "k": 2}])
def test_partial_results_are_made_where_what_they_add_up_is_computed(parts: dict[str, int]) -> None:
    nodes = {"T": ("ij,kj->ikj", "A", "B"), "U": ("ikj->ikj", "T"), "V": ("ikj->ik", "U")}
    graph = EinGraph.from_spec({"A": (8, 8), "B": (8, 8)}, nodes, ["V"], chunks=dict.fromkeys("AB", ROWS))
    partitions = cut(graph, T=parts, U=parts, V=parts)
    assert graph.inlines("T", "U", partitions) and graph.inlines("U", "V", partitions)
    placement = place(graph, partitions, FOUR)
    assert all(placement.shipped[name].repartition.nbytes == 0 for name in "UV")
    total = sum(
        (part for one in placement.shipped.values() for part in (one.join, one.aggregate, one.repartition)),
        placement.delivery,
    )
    assert (total.nbytes, total.messages) == fetched(graph, lower(graph, partitions, placement), placement)


def test_a_tensor_in_too_many_pieces_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = EinGraph.from_spec({"A": (8, 8)}, {"Z": ("ij->i", "A")}, ["Z"], chunks={"A": ROWS})
    partitions = cut(graph, Z={"i": 4})
    monkeypatch.setattr("dask_eindecomp.place.MOST", 1)
    placement = place(graph, partitions, FOUR)
    assert placement.shipped == {}
    plan = price(graph, partitions, FOUR)
    assert plan.placed(placement).choices == plan.choices
