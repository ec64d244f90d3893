"""What may be chosen: enough to be good, little enough to be quick."""

from __future__ import annotations

from dataclasses import replace
from math import comb, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_eindecomp.candidates import Budget, Space, space_of, tile_counts, usual_cuts, worth_trying
from dask_eindecomp.elimination import Late
from dask_eindecomp.graph import EinGraph
from dask_eindecomp.partition import cut, smooth, viable_rows
from dask_eindecomp.topology import Topology

ANY = Budget()


def product(extent: int = 64) -> EinGraph:
    """A product of two matrices."""
    return EinGraph.from_spec(
        {"A": (extent, extent), "B": (extent, extent)}, {"Z": ("ij,jk->ik", "A", "B")}, ["Z"]
    )


def space(graph: EinGraph, counts: list[int], budget: Budget = ANY) -> Space:
    """Candidates of the only expression of a graph."""
    return space_of(graph, graph.nodes["Z"], counts, Topology(workers=4), budget, {}, False, True)


@given(st.integers(1, 300))
def test_as_many_tiles_as_slots_and_twice_and_four_times_as_many_are_tried(slots: int) -> None:
    counts = tile_counts(slots)
    assert {slots, 2 * slots, 4 * slots, 1} <= set(counts)
    assert counts == sorted(set(counts))
    assert all(1 <= count <= 4 * slots for count in counts)
    # a prime number of workers has grids of more than one axis, too
    assert any(smooth(count) == count and count >= slots / 2 for count in counts)


@given(st.integers(1, 5000))
def test_a_smooth_number_is_the_largest_with_small_factors_only(limit: int) -> None:
    found = smooth(limit)

    def is_smooth(number: int) -> bool:
        for prime in (2, 3, 5):
            while number % prime == 0:
                number //= prime
        return number == 1

    assert is_smooth(found) and found <= limit
    assert not any(is_smooth(number) for number in range(found + 1, limit + 1))


def test_candidates_are_all_ways_to_share_each_number_of_tiles() -> None:
    found = space(product(), [4, 8])
    parts = {tuple(found.partition(n).parts.values()) for n in range(len(found))}
    assert len(parts) == len(found) == 6 + 10
    assert {prod(one) for one in parts} == {4, 8}


def test_pinned_labels_have_one_cut_and_the_others_share_the_rest() -> None:
    graph = product()
    pinned = replace(graph.nodes["Z"], pinned=(("j", (1, 63)),))
    found = space(replace(graph, nodes={"Z": pinned}), [4, 8])
    each = [found.partition(n) for n in range(len(found))]
    assert len({one.cuts for one in each}) == len(found) == 2 + 3
    assert all(dict(one.cuts)["j"] == (1, 63) for one in each)
    assert {one.tiles for one in each} == {4, 8}


def test_other_expressions_may_line_up_with_a_cut_fixed_by_hand() -> None:
    graph = product()
    pinned = replace(graph.nodes["Z"], pinned=(("j", (1, 63)),))
    assert usual_cuts(replace(graph, nodes={"Z": pinned})) == {(64, 2): (1, 63)}


def test_a_partition_is_the_same_object_each_time() -> None:
    found = space(product(), [4])
    assert found.partition(2) is found.partition(2)


def test_the_layout_that_came_is_one_more_unless_it_is_there_already() -> None:
    rows = viable_rows((10, 6), 2)
    balanced = (cut(10, 2), cut(6, 1))
    uneven = ((7, 3), (6,))
    extents = {"i": 10, "j": 6}
    assert len(Space.of_parts(extents, rows, {}, balanced)) == len(rows)
    extra = Space.of_parts(extents, rows, {}, uneven)
    assert len(extra) == len(rows) + 1
    assert extra.partition(len(rows)).grid(("i", "j")) == uneven


def test_what_an_edge_sees_is_told_apart_and_nothing_else() -> None:
    found = space(product(), [4, 8])
    rows, which = found.project(("i", "k"))
    assert len(rows) == len(found.grids(("i", "k"))) == len(set(found.grids(("i", "k"))))
    for n in range(len(found)):
        assert found.grids(("i", "k"))[which[n]] == found.partition(n).grid(("i", "k"))
    assert found.project(("i", "k"))[1] is which


def test_a_number_of_tiles_far_from_the_cheapest_is_left_out_but_for_that_of_the_slots() -> None:
    found = space(product(), [1, 2, 4, 8, 16])
    tiles = prod(found.parts.values(), start=np.ones(len(found)))
    kept = worth_trying(found, tiles * 1.0, slots=16)
    left = prod(kept.parts.values(), start=np.ones(len(kept)))
    assert set(left.tolist()) == {1, 2, 16}
    # with one near the cheapest all of that number stay
    costs = np.where(np.arange(len(found)) == int(np.flatnonzero(tiles == 8)[0]), 1.0, tiles)
    assert (prod(worth_trying(found, costs, 16).parts.values(), start=1) == 8).sum() == (tiles == 8).sum()


@pytest.mark.parametrize("block", [8 * 64 * 64, 8 * 64 * 4, 8])
def test_candidates_keep_within_the_size_of_a_block(block: int) -> None:
    found = space(product(), [1, 2, 4], Budget(block=block))
    for n in range(len(found)):
        assert prod(map(max, found.partition(n).grid(("i", "k")))) * 8 <= block


def many_axes(count: int) -> EinGraph:
    """A tensor of many short axes, one of which is multiplied by a matrix."""
    labels = "abcdefghijklmnopqrstuvw"[:count]
    spec = {"Z": (f"{labels},{labels[-1]}z->{labels[:-1]}z", "X", "M")}
    return EinGraph.from_spec({"X": (2,) * count, "M": (2, 2)}, spec, ["Z"])


def test_of_many_short_axes_some_are_never_cut() -> None:
    assert len(space(many_axes(20), tile_counts(64))) < 10_000
    found = space(many_axes(20), [64])
    cut_somewhere = [label for label, parts in found.parts.items() if parts.max() > 1]
    assert 6 <= len(cut_somewhere) < 20
    # where there are few nothing changes
    assert len(space(many_axes(6), [8])) == comb(7, 3)


def test_the_axes_that_the_graph_came_cut_along_are_cut_first() -> None:
    graph = many_axes(20)
    node = graph.nodes["Z"]
    came = tuple((label, (1, 1) if label in "rst" else (extent,)) for label, extent in node.extents)
    graph = replace(graph, nodes={"Z": replace(node, came=came)})
    found = space(graph, [64])
    assert all(found.parts[label].max() == 2 for label in "rst")


def test_more_tiles_are_not_tried_when_there_is_no_time() -> None:
    graph = product(4096)
    late = Budget(memory=1 << 20)
    with pytest.raises(Late):
        space_of(graph, graph.nodes["Z"], [4], Topology(workers=4), late, {}, False, True, lambda: True)
