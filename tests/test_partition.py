"""Axes are cut evenly, and the viable partitions are all of them."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import comb, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_eindecomp.graph import EinGraph
from dask_eindecomp.partition import (
    Cut,
    Partition,
    PartitionError,
    boundaries,
    cut,
    divisors,
    factorisations,
    pieces_of,
    smooth,
    viable,
    viable_rows,
)
from tests import oracle, strategies


def test_a_cut_differs_by_at_most_one_and_longer_chunks_come_first() -> None:
    assert cut(10, 4) == (3, 3, 2, 2)
    assert cut(7, 7) == (1,) * 7
    assert cut(7, 1) == (7,)


def test_an_empty_axis_is_one_empty_chunk() -> None:
    assert cut(0, 1) == (0,)


@pytest.mark.parametrize(("extent", "parts", "most"), [(4, 5, 4), (4, 0, 4), (4, -1, 4), (0, 2, 1)])
def test_an_axis_cannot_be_cut_into_more_parts_than_elements_or_none(
    extent: int, parts: int, most: int
) -> None:
    with pytest.raises(
        PartitionError, match=rf"cannot cut {extent} elements into {parts} parts; expected 1 to {most}"
    ):
        cut(extent, parts)


def test_boundaries_are_where_chunks_begin_and_the_last_one_ends() -> None:
    assert boundaries((3, 0, 2)) == (0, 3, 3, 5)
    assert boundaries(()) == (0,)


def test_an_empty_chunk_is_read_from_the_block_it_lies_in() -> None:
    assert pieces_of((4, 4), (6, 0, 2)) == (
        ((0, 0, 4, True), (1, 0, 2, False)),
        ((1, 2, 2, False),),
        ((1, 2, 4, False),),
    )
    assert pieces_of((0, 3), (0, 3)) == (((0, 0, 0, True),), ((1, 0, 3, True),))
    assert pieces_of((0, 3), (0, 0, 3))[:2] == (((0, 0, 0, True),), ((0, 0, 0, True),))


@given(
    st.integers(0, 8).flatmap(lambda extent: st.tuples(*2 * [strategies.cuts(extent, zeros=True)])),
)
def test_pieces_put_together_are_the_chunk_and_no_more_are_taken_than_it_takes(
    drawn: tuple[Cut, Cut],
) -> None:
    have, want = drawn
    ends = boundaries(have)
    for (low, high), pieces in zip(pairwise(boundaries(want)), pieces_of(have, want)):
        for number, first, last, whole in pieces:
            assert 0 <= first <= last <= have[number]
            assert whole == (last - first == have[number])
            assert (first < last) == (low < high)
        taken = [ends[number] + at for number, first, last, _ in pieces for at in range(first, last)]
        assert taken == list(range(low, high))
        assert pieces and (low < high or len(pieces) == 1)


def test_a_partition_has_a_cut_for_every_label_and_tiles_that_are_their_product() -> None:
    partition = Partition.balanced({"i": 5, "j": 4, "k": 3}, {"i": 2, "k": 3})
    assert partition.cuts == (("i", (3, 2)), ("j", (4,)), ("k", (1, 1, 1)))
    assert partition.parts == {"i": 2, "j": 1, "k": 3}
    assert partition.tiles == 6


def test_the_grid_of_a_tensor_takes_the_cuts_of_its_labels_in_its_order() -> None:
    partition = Partition.balanced({"i": 5, "j": 4}, {"i": 2})
    assert partition.grid(("j", "i", "j")) == ((4,), (3, 2), (4,))
    assert partition.grid(()) == ()


def test_a_partition_without_labels_is_one_tile() -> None:
    assert Partition.balanced({}, {}).tiles == 1


def test_the_published_candidates_divide_their_extents() -> None:
    assert viable({"i": 6, "j": 4}, 4, divide=True) == [{"i": 1, "j": 4}, {"i": 2, "j": 2}]
    assert viable({"i": 6, "j": 4}, 4) == [{"i": 1, "j": 4}, {"i": 2, "j": 2}, {"i": 4, "j": 1}]


def test_two_by_two_by_two_has_no_sixteen_tiles_and_falls_back_to_eight() -> None:
    assert viable({"i": 2, "j": 2, "k": 2}, 16, divide=True) == [{"i": 2, "j": 2, "k": 2}]
    assert viable({"i": 2, "j": 2, "k": 2}, 16) == [{"i": 2, "j": 2, "k": 2}]


def test_a_power_of_two_falls_back_to_a_power_of_two_where_parts_must_divide() -> None:
    assert viable({"i": 6}, 4, divide=True) == [{"i": 2}]
    assert viable({"i": 6}, 8) == [{"i": 6}]


def test_another_number_falls_back_to_the_largest_feasible_one_below() -> None:
    assert viable({"i": 6}, 5, divide=True) == [{"i": 3}]
    assert viable({"i": 4, "j": 3}, 11) == [{"i": 3, "j": 3}]


def test_an_axis_of_one_element_is_never_cut() -> None:
    assert factorisations(2, (1, 2), False).tolist() == [[1, 2]]


def test_candidates_that_are_remembered_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        viable_rows((4, 2), 4)[0, 0] = 9


def test_the_smallest_numbers_are_smooth() -> None:
    assert [smooth(number) for number in range(1, 7)] == [1, 2, 3, 4, 5, 6]


def test_axes_of_length_one_or_none_stay_whole() -> None:
    assert viable({"i": 1, "j": 4, "k": 0}, 4) == [{"i": 1, "j": 4, "k": 1}]


def test_a_scalar_has_one_partition() -> None:
    assert viable({}, 8) == [{}]


@pytest.mark.parametrize("tiles", [0, -3])
def test_there_is_at_least_one_tile(tiles: int) -> None:
    with pytest.raises(
        PartitionError, match=rf"cannot cut an expression into {tiles} tiles; expected at least 1"
    ):
        viable({"i": 4}, tiles)


@pytest.mark.parametrize(("power", "labels"), [(3, 3), (10, 6), (6, 1), (0, 4)])
def test_there_are_as_many_powers_of_two_as_the_count_formula_says(power: int, labels: int) -> None:
    extents = {chr(97 + n): 1024 for n in range(labels)}
    assert len(viable(extents, 2**power, divide=True)) == comb(power + labels - 1, labels - 1)


@given(st.integers(1, 10**6))
def test_divisors_are_all_that_divide(number: int) -> None:
    found = divisors(number)
    assert found == sorted(set(found))
    assert all(number % one == 0 for one in found)
    if number < 3000:
        assert found == [one for one in range(1, number + 1) if number % one == 0]


@given(st.integers(1, 300).flatmap(lambda extent: st.tuples(st.just(extent), st.integers(1, extent))))
def test_any_cut_is_balanced_and_whole(drawn: tuple[int, int]) -> None:
    extent, parts = drawn
    chunks = cut(extent, parts)
    assert chunks == oracle.balanced(extent, parts)
    assert len(chunks) == parts
    assert sum(chunks) == extent
    assert boundaries(chunks) == (0, *accumulate(chunks))


@given(
    st.dictionaries(st.sampled_from("ijkl"), st.integers(0, 8), max_size=4),
    st.integers(1, 24),
    st.booleans(),
)
def test_viable_partitions_are_those_found_by_trying_all(
    extents: dict[str, int], tiles: int, divide: bool
) -> None:
    found = viable(extents, tiles, divide=divide)
    expected = oracle.viable(extents, tiles, divide)
    as_set = {tuple(sorted(parts.items())) for parts in found}
    assert len(as_set) == len(found)
    assert as_set == {tuple(sorted(parts.items())) for parts in expected}
    assert all(list(parts) == list(extents) for parts in found)


@given(st.data())
def test_any_drawn_partition_covers_every_label(data: st.DataObject) -> None:
    graph = EinGraph.from_spec(**data.draw(strategies.dags()))
    for node in graph.nodes.values():
        partition = data.draw(strategies.partitions(node))
        assert {label: sum(chunks) for label, chunks in partition.cuts} == dict(node.extents)
        assert partition.tiles == prod(partition.parts.values())
        assert tuple(map(sum, partition.grid(node.expression.output))) == node.shape
