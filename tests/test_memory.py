"""What a worker holds is counted tensor by tensor, from the first reader to the last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_eindecomp.decompose import decompose
from dask_eindecomp.estimate import price, received
from dask_eindecomp.graph import EinGraph
from dask_eindecomp.memory import held, share, timeline
from dask_eindecomp.partition import Partition
from dask_eindecomp.topology import Topology
from tests import strategies

FOUR = Topology(workers=4)
ROWS = ((2, 2, 2, 2), (8,))
"""An 8 by 8 matrix of doubles in four blocks of rows, 128 bytes each."""


def graph(nodes: dict[str, tuple[Any, ...]], outputs: str, **spec: Any) -> EinGraph:
    """A graph whose inputs are 8 by 8 matrices A, B and C, persisted by rows."""
    inputs = {name: (8, 8) for name in "ABC"}
    return EinGraph.from_spec(inputs, nodes, list(outputs), **({"chunks": dict.fromkeys("ABC", ROWS)} | spec))


def steps(
    one: EinGraph, parts: dict[str, dict[str, int]], topology: Topology = FOUR
) -> list[tuple[str, int]]:
    """Bytes on the busiest worker at each expression."""
    partitions = {
        name: Partition.balanced(dict(node.extents), parts[name]) for name, node in one.nodes.items()
    }
    arrived = received(one, partitions, topology)
    return [(name, total) for name, total, _ in timeline(one, partitions, topology, arrived)]


def test_blocks_are_shared_out_evenly_and_the_fullest_worker_counts() -> None:
    assert share(ROWS, 8, workers=4) == 128
    assert share(ROWS, 8, workers=3) == 256
    assert share(((5, 3), (1,)), 8, workers=2) == 40


def test_a_product_by_rows_holds_its_rows_the_whole_other_matrix_and_its_result() -> None:
    product = graph({"Z": ("ij,jk->ik", "A", "B")}, "Z")
    # A 128 in place, B 128 and three quarters that arrive, C 128 though nobody reads it, Z 128
    assert steps(product, {"Z": {"i": 4}}) == [("Z", 128 + 512 + 128 + 128)]


def test_partial_results_are_held_until_they_are_added_up() -> None:
    product = graph({"Z": ("ij,jk->ik", "A", "B")}, "Z")
    step = held(product, product.nodes["Z"], {"i": 1, "j": 4, "k": 1}, FOUR)
    # its own, three that arrive, and their sum
    assert (step.partials, step.result) == (4 * 512, 512)


def test_what_nobody_reads_any_more_is_let_go() -> None:
    nodes = {"T": ("ij->ij", "A"), "U": ("ij->ij", "T"), "V": ("ij->i", "U")}
    cuts = {name: {"i": 4} for name in "TUV"}
    chain = graph(nodes, "V")
    base = 3 * 128
    # all of the chain runs in one task
    assert steps(chain, cuts) == [("T", base + 128), ("U", base + 256), ("V", base + 256 + 16)]
    # two tiles of one are read by each of the other
    apart = {"T": {"i": 8}, "U": {"i": 4}, "V": {"i": 2}}
    assert steps(chain, apart) == [("T", base + 128), ("U", base + 256), ("V", base + 256 + 32)]
    # what leaves the graph stays
    assert steps(graph(nodes, "TV"), cuts)[-1] == ("V", base + 256 + 16)


def test_copies_of_a_persisted_input_go_after_its_last_reader() -> None:
    nodes = {"Z": ("ij,jk->ik", "A", "B"), "Y": ("ij->i", "Z")}
    by_rows = graph(nodes, "Y")
    first, second = steps(by_rows, {"Z": {"i": 8}, "Y": {"i": 4}})
    assert first == ("Z", 128 + 512 + 128 + 128)
    assert second == ("Y", 3 * 128 + 128 + 16)
    # one task reads and reduces
    assert steps(by_rows, {"Z": {"i": 4}, "Y": {"i": 4}})[1] == ("Y", 128 + 512 + 128 + 128 + 16)


def test_blocks_made_on_demand_are_held_while_tiles_need_them() -> None:
    lazy = graph({"Z": ("ij->i", "A"), "Y": ("ij->i", "B")}, "ZY", chunks={})
    # a tile of rows is 128 bytes, its sums 16
    assert steps(lazy, {"Z": {"i": 4}, "Y": {"i": 4}}) == [("Z", 128 + 16), ("Y", 128 + 16 + 16)]
    assert steps(lazy, {"Z": {"i": 8}, "Y": {"i": 8}})[0] == ("Z", 64 + 16)


def test_of_blocks_made_on_demand_all_is_there_however_little_is_wanted() -> None:
    lazy = graph({"Z": ("ij->i", "A")}, "Z")
    inputs = {name: replace(one, stays=False) for name, one in lazy.inputs.items()}
    lazy = replace(lazy, inputs=inputs)
    fine = held(lazy, lazy.nodes["Z"], {"i": 8, "j": 1}, FOUR)
    rows = held(lazy, lazy.nodes["Z"], {"i": 4, "j": 1}, FOUR)
    assert rows.operands == (128,)
    assert fine.operands == (192,)  # one row wanted, and a block of two at its end


def test_threads_compute_as_many_tiles_at_a_time() -> None:
    lazy = graph({"Z": ("ij->i", "A")}, "Z", chunks={})
    one, two = (held(lazy, lazy.nodes["Z"], {"i": 8, "j": 1}, Topology(workers=1, threads=n)) for n in (1, 2))
    assert (one.operands, two.operands) == ((64,), (128,))
    # and those before them, of which the scheduler does not know yet that they are done with
    assert (one.running, two.running) == (16, 32)


def test_of_what_one_tile_of_another_expression_wants_two_tiles_exist_at_a_time() -> None:
    nodes = {"T": ("ij->ij", "A"), "U": ("ij,jk->ik", "T", "B")}
    two, base, cuts = Topology(workers=2), 3 * 256, {name: {"i": 8} for name in "TU"}
    # four tiles a worker of 64 bytes: of T two at a time, of the result all; and a copy of the other half of B
    assert steps(graph(nodes, "U"), cuts, two) == [("T", base + 128), ("U", base + 128 + 256 + 256)]
    # computed inside the task that wants it one
    inside = {"T": ("ij->ij", "A"), "U": ("ij->ij", "T")}
    assert steps(graph(inside, "U"), cuts, two) == [("T", base + 64), ("U", base + 64 + 256)]
    # what leaves, what has other tiles and what has two readers is held
    assert steps(graph(inside, "TU"), cuts, two) == [("T", base + 256), ("U", base + 512)]
    assert steps(graph(nodes, "U"), cuts | {"U": {"i": 4}}, two)[0] == ("T", base + 256)
    twice = graph(nodes | {"V": ("ij->ij", "T")}, "UV")
    assert steps(twice, cuts | {"V": {"i": 8}}, two)[0] == ("T", base + 256)


def test_a_result_is_there_twice_while_it_is_cut_into_the_chunks_it_was_promised_in() -> None:
    one = graph({"Z": ("ij->ij", "A")}, "Z")
    finer = replace(one, outputs=(replace(one.outputs[0], chunks=((1,) * 8, (8,))),))
    assert steps(finer, {"Z": {"i": 4}}) == [("Z", 4 * 128), ("Z", 5 * 128)]
    same = replace(one, outputs=(replace(one.outputs[0], chunks=ROWS),))
    assert steps(same, {"Z": {"i": 4}}) == [("Z", 4 * 128)]


def test_what_an_expression_needs_at_least_leaves_out_what_may_be_passed_on() -> None:
    chain = graph({"T": ("ij->ij", "A"), "U": ("ij->i", "T")}, "U")
    parts, two = {"i": 8, "j": 1}, Topology(workers=2)
    # four tiles a worker: of T two, of the sums all
    assert held(chain, chain.nodes["T"], parts, two).least == 256 + 128
    assert held(chain, chain.nodes["U"], parts, two).least == 128 + 32


def test_the_peak_of_a_plan_is_that_of_its_fullest_step() -> None:
    nodes = {"Z": ("ij,jk->ik", "A", "B"), "Y": ("ij->i", "Z")}
    by_rows = graph(nodes, "Y")
    extents = {name: dict(node.extents) for name, node in by_rows.nodes.items()}
    plan = price(by_rows, {name: Partition.balanced(one, {"i": 4}) for name, one in extents.items()}, FOUR)
    assert [choice.join.peak_nbytes for choice in plan.choices] == [896, 912]
    assert plan.traffic.peak_nbytes == 912


@settings(max_examples=100)
@given(strategies.graphs(streams=True), st.integers(1, 5), st.integers(1, 3), st.data())
def test_candidates_at_once_hold_what_each_holds(
    one: EinGraph, workers: int, threads: int, data: st.DataObject
) -> None:
    topology = Topology(workers=workers, threads=threads)
    for node in one.nodes.values():
        parts = [data.draw(strategies.partitions(node)).parts for _ in range(3)]
        together = held(
            one, node, {label: np.array([p[label] for p in parts], float) for label in parts[0]}, topology
        )
        for number, mine in enumerate(parts):
            alone = held(one, node, mine, topology)
            assert np.broadcast_to(together.least, 3)[number] == alone.least
            assert np.broadcast_to(together.running, 3)[number] == alone.running


@settings(max_examples=100)
@given(strategies.graphs(), st.integers(1, 4))
def test_nothing_is_held_twice_and_nothing_less_than_what_leaves(one: EinGraph, workers: int) -> None:
    plan = decompose(one, topology=Topology(workers=workers))
    every = sum(map(one.nbytes, (*one.inputs, *one.nodes)))
    leaving = sum(one.nbytes(output.source) for output in one.outputs if output.source in one.nodes)
    most = max((len(choice.partition) for choice in plan.choices), default=0)
    assert plan.traffic.peak_nbytes * workers >= leaving - most * 8 * workers or leaving == 0
    if workers == 1:
        partials = sum(one.nbytes(choice.name) * (choice.tiles + 1) for choice in plan.choices)
        assert plan.traffic.peak_nbytes <= every + partials


def test_a_tensor_that_is_read_along_its_diagonal_is_not_more_than_all_of_it() -> None:
    diagonal = graph({"Z": ("ii->i", "A")}, "Z")
    assert held(diagonal, diagonal.nodes["Z"], {"i": 1}, Topology()).operands == (8 * 8,)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_sum_over_workers_is_at_least_everything(workers: int) -> None:
    product = graph({"Z": ("ij,jk->ik", "A", "B")}, "Z")
    (_, total), *_ = steps(product, {"Z": {"i": workers}}, Topology(workers=workers))
    assert total * workers >= 4 * 512
