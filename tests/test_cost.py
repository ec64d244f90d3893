"""What a choice costs, counted: the published formulas, and what Dask moves."""

from __future__ import annotations

from dataclasses import astuple
from fractions import Fraction
from itertools import permutations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_eindecomp import cost
from dask_eindecomp.cost import (
    Traffic,
    across,
    aggregate_traffic,
    axis_overlap,
    bundles,
    delivery_traffic,
    given_traffic,
    join_traffic,
    largest_overlap,
    making_traffic,
    nests,
    paper_aggregate,
    paper_join,
    paper_repartition,
    repartition_tasks,
    repartition_traffic,
    spread,
    stays,
)
from dask_eindecomp.expression import Expression
from dask_eindecomp.partition import Chunks, cut
from tests import oracle, strategies

MATMUL = Expression.parse("ij,jk->ik")
CUBE = {"i": 16, "j": 16, "k": 16}


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> Chunks:
    """A balanced grid."""
    return tuple(map(cut, shape, parts))


# Traffic


def test_traffic_adds_up_but_for_the_peak_of_which_the_larger_counts() -> None:
    total = Traffic(1, 2, 3, 4, 9, 6) + Traffic(10, 20, 30, 40, 5, 60)
    assert astuple(total) == (11, 22, 33, 44, 9, 66)
    assert total.to_dict() == {
        "nbytes": 11,
        "messages": 22,
        "flops": 33,
        "tasks": 44,
        "peak_nbytes": 9,
        "crossing": 66,
    }


# The published formulas


@pytest.mark.parametrize(
    ("shape", "produced", "consumed", "published"),
    [
        ((8, 8), (4, 1), (1, 4), 448),
        ((8, 8), (4, 1), (2, 2), 192),
        ((8, 8), (2, 2), (1, 1), 256),
        ((16, 16), (8, 1), (1, 8), 3840),
        ((4, 8, 8), (4, 1, 1), (1, 2, 2), 1792),
        ((8, 8), (2, 2), (2, 2), 0),
    ],
)
def test_the_published_repartition_is_that_found_by_hand(
    shape: tuple[int, ...], produced: tuple[int, ...], consumed: tuple[int, ...], published: int
) -> None:
    assert paper_repartition(shape, produced, consumed) == published


def test_the_published_repartition_is_a_fraction_where_grids_do_not_nest() -> None:
    moved = paper_repartition((5, 5), (2, 3), (3, 2))
    assert moved == 25 * Fraction(25, 6) / Fraction(25, 9) + 25 * (Fraction(25, 6) / Fraction(25, 9) - 1)
    assert moved == 50


def test_nothing_is_moved_of_an_empty_tensor() -> None:
    assert paper_repartition((0, 4), (1, 1), (1, 4)) == 0
    assert repartition_traffic(((0,), (4,)), ((0,), (1, 1, 1, 1)), 8, workers=4).nbytes == 0


def test_a_matmul_costs_what_the_paper_says() -> None:
    parts = {"i": 2, "j": 2, "k": 2}
    assert paper_join(MATMUL, CUBE, parts) == 1024
    assert paper_aggregate(MATMUL, CUBE, parts) == 256


def test_counts_do_not_wrap_where_numpy_does() -> None:
    huge = {"i": 10**9, "j": 10**9, "k": 10**9}
    parts = {"i": 1024, "j": 1024, "k": 1024}
    assert paper_join(MATMUL, huge, parts) == 2 * 10**18 * 1024
    assert paper_aggregate(MATMUL, huge, parts) == 10**18 * 1023
    assert join_traffic(MATMUL, huge, parts, (8, 8)).flops == 10**27
    assert paper_repartition((10**10, 10**10), (4, 1), (1, 4)) == 7 * 10**20


@given(strategies.expressions(diagonals=False), st.data())
def test_the_published_cost_is_tiles_times_kernel_calls(
    drawn: tuple[Expression, dict[str, int]], data: st.DataObject
) -> None:
    expression, extents = drawn
    parts = {
        label: data.draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0]))
        for label, extent in extents.items()
    }
    calls = prod(parts.values())
    tile = {label: extents[label] // parts[label] for label in extents}
    joined = calls * sum(prod(tile[label] for label in labels) for labels in expression.operands)
    assert paper_join(expression, extents, parts) == joined
    group = prod(parts[label] for label in expression.contracted)
    combined = calls // group * (group - 1) * prod(tile[label] for label in expression.output)
    assert paper_aggregate(expression, extents, parts) == combined


@given(strategies.expressions())
def test_one_tile_costs_its_inputs_and_nothing_to_combine(drawn: tuple[Expression, dict[str, int]]) -> None:
    expression, extents = drawn
    whole = {label: 1 for label in extents}
    sizes = sum(prod(extents[label] for label in labels) for labels in expression.operands)
    assert paper_join(expression, extents, whole) == sizes
    assert paper_aggregate(expression, extents, whole) == 0
    assert aggregate_traffic(expression, extents, whole, 8) == Traffic()
    moved = join_traffic(expression, extents, whole, (8,) * len(expression.operands))
    assert (moved.nbytes, moved.messages, moved.tasks) == (0, 0, 1)


# What Dask moves


@given(strategies.expressions(diagonals=False), st.data())
def test_the_bytes_of_a_grid_are_its_published_floats_less_one_copy_of_each_input(
    drawn: tuple[Expression, dict[str, int]], data: st.DataObject
) -> None:
    expression, extents = drawn
    parts = {label: data.draw(st.integers(1, extent)) for label, extent in extents.items()}
    sizes = sum(prod(extents[label] for label in labels) for labels in expression.operands)
    joined = join_traffic(expression, extents, parts, (8,) * len(expression.operands))
    assert joined.nbytes == 8 * (paper_join(expression, extents, parts) - sizes)
    assert aggregate_traffic(expression, extents, parts, 8).nbytes == 8 * paper_aggregate(
        expression, extents, parts
    )


def test_each_operand_counts_with_its_own_element_size() -> None:
    parts = {"i": 2, "j": 1, "k": 4}
    assert join_traffic(MATMUL, CUBE, parts, (4, 8)).nbytes == 256 * 4 * 3 + 256 * 8 * 1


def test_a_join_sends_a_tile_once_for_every_copy_and_runs_a_task_a_tile() -> None:
    moved = join_traffic(MATMUL, CUBE, {"i": 2, "j": 1, "k": 4}, (8, 8))
    assert moved.messages == 2 * 3 + 4 * 1
    assert (moved.flops, moved.tasks) == (16**3, 8)


def test_an_aggregate_sends_every_partial_result_but_one() -> None:
    moved = aggregate_traffic(MATMUL, CUBE, {"i": 2, "j": 3, "k": 4}, 8)
    assert moved == Traffic(nbytes=256 * 2 * 8, messages=8 * 2, flops=256 * 2, tasks=8)


def test_only_the_tiles_on_a_diagonal_are_read() -> None:
    trace = Expression.parse("ii,j->j")
    moved = join_traffic(trace, {"i": 4, "j": 6}, {"i": 2, "j": 3}, (8, 8))
    assert moved.nbytes == 4 * 8 * 2 + 6 * 8 * 1
    assert moved.messages == 2 * 2 + 3 * 1


@pytest.mark.parametrize(
    ("shape", "produced", "consumed", "sliced"),
    [
        ((8, 8), (4, 1), (1, 4), 48),
        ((8, 8), (4, 1), (2, 2), 32),
        ((8, 8), (2, 2), (1, 1), 48),
        ((16, 16), (8, 1), (1, 8), 224),
        ((8, 8), (2, 2), (2, 2), 0),
    ],
)
def test_slices_move_what_was_found_by_hand(
    shape: tuple[int, ...], produced: tuple[int, ...], consumed: tuple[int, ...], sliced: int
) -> None:
    workers = max(prod(produced), prod(consumed))
    grids = grid(shape, produced), grid(shape, consumed)
    assert repartition_traffic(*grids, itemsize=1, workers=workers).nbytes == sliced
    assert oracle.edge_cost(shape, *grids, "bytes") == sliced


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_rows_to_columns_moves_all_but_the_share_of_one_worker(workers: int) -> None:
    rows, columns = grid((16, 16), (workers, 1)), grid((16, 16), (1, workers))
    moved = repartition_traffic(rows, columns, itemsize=8, workers=workers)
    assert moved.nbytes == (256 - 256 // workers) * 8
    assert (moved.tasks, moved.messages) == (workers**2, workers**2 - workers)


def test_blocks_that_are_only_merged_need_no_slices_and_travel_whole() -> None:
    moved = repartition_traffic(grid((16,), (8,)), grid((16,), (4,)), itemsize=8, workers=8)
    assert (moved.tasks, moved.messages) == (0, 4)
    assert repartition_tasks(grid((16,), (4,)), grid((16,), (8,))) == 8


def test_a_worker_with_several_tiles_keeps_those_that_line_up() -> None:
    assert stays(grid((8, 8), (8, 1)), grid((8, 8), (4, 1)), workers=4) == 64
    assert stays(grid((8, 8), (8, 1)), grid((8, 8), (1, 8)), workers=1) == 64
    assert stays(((5, 3),), ((3, 5),), workers=1) == 8
    assert stays(grid((8, 8), (8, 1)), grid((8, 8), (8, 1)), workers=4) == 64
    # rows to columns, two of eight a worker: two by two elements meet
    assert stays(grid((8, 8), (8, 1)), grid((8, 8), (1, 8)), workers=4) == 16


def test_grids_of_equal_parts_but_other_boundaries_still_move() -> None:
    assert repartition_traffic(((5, 3),), ((3, 5),), itemsize=1, workers=2).nbytes > 0


@given(st.integers(0, 12), st.data())
def test_overlaps_are_those_counted_one_by_one(extent: int, data: st.DataObject) -> None:
    one, two = (data.draw(strategies.cuts(extent, zeros=True)) for _ in range(2))
    table = oracle.shared(one, two)
    flat = [(size, length) for row, length in zip(table, one) for size in row if size]
    assert largest_overlap(one, two) == max((size for size, _ in flat), default=0)
    assert axis_overlap(one, two)[1:] == (len(flat), sum(size == length for size, length in flat))
    assert nests(one, two) == all(
        size in (0, length) for row, length in zip(table, one) for size in row
    ) or not all(one)


@given(st.data())
def test_slices_are_the_pieces_that_are_not_whole_blocks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    one, two = (data.draw(strategies.chunks(shape, zeros=False)) for _ in range(2))
    slices = 0
    for block in product(*map(oracle.intervals, one)):
        for tile in product(*map(oracle.intervals, two)):
            common = [max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(block, tile)]
            slices += bool(prod(common)) and prod(common) != prod(b - a for a, b in block)
    assert repartition_tasks(one, two) == slices


@given(st.data())
def test_no_placement_keeps_more_than_the_best_overlap(data: st.DataObject) -> None:
    """One tile a worker, at most four tiles: every placement is tried; where grids nest the best one is met."""
    shape = tuple(data.draw(st.lists(st.sampled_from([2, 3, 4, 8]), min_size=1, max_size=2)))
    few = [parts for parts in product(*(range(1, extent + 1) for extent in shape)) if prod(parts) <= 4]
    grids = [grid(shape, data.draw(st.sampled_from(few))) for _ in range(2)]
    blocks, tiles = (list(product(*map(oracle.intervals, one))) for one in grids)
    workers = max(len(blocks), len(tiles))

    def common(one: int, two: int) -> int:
        if one >= len(blocks) or two >= len(tiles):
            return 0
        return prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(blocks[one], tiles[two]))

    best = max(
        sum(common(worker, tile) for worker, tile in enumerate(owners))
        for owners in permutations(range(workers))
    )
    kept = stays(*grids, workers=workers)
    assert best <= kept <= prod(shape)
    if all(extent in (2, 4, 8) for extent in shape) and all(
        len(axis) in (1, 2, 4) for one in grids for axis in one
    ):
        assert kept == best


@given(st.data())
def test_the_published_repartition_is_never_below_the_slices(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 4, 8, 6]), min_size=1, max_size=3)))
    parts = [
        tuple(
            data.draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0]))
            for extent in shape
        )
        for _ in range(2)
    ]
    grids = [grid(shape, one) for one in parts]
    sliced = repartition_traffic(*grids, itemsize=1, workers=max(map(prod, parts))).nbytes
    assert sliced <= paper_repartition(shape, *parts)
    assert sliced == oracle.edge_cost(shape, *grids, "bytes")
    assert float(paper_repartition(shape, *parts)) == pytest.approx(oracle.edge_cost(shape, *grids, "paper"))


# What is given


def test_blocks_are_spread_evenly_in_rows() -> None:
    assert spread(8, 4) == (0, 0, 1, 1, 2, 2, 3, 3)
    assert spread(2, 4) == (0, 2)


def test_blocks_that_lie_where_their_tiles_run_cost_nothing() -> None:
    chunks = ((4, 4), (4, 4))
    for owners in (None, (3, 1, 0, 2)):
        assert given_traffic(chunks, owners, chunks, 8, workers=4) == Traffic()


def test_tiles_of_blocks_that_lie_on_one_worker_are_dealt_out_evenly() -> None:
    chunks = ((4, 4), (4, 4))
    moved = given_traffic(chunks, (0, 0, 0, 0), chunks, 1, workers=4)
    assert (moved.nbytes, moved.messages, moved.tasks) == (48, 3, 0)


def test_cutting_what_is_given_otherwise_is_paid_for() -> None:
    rows, columns = grid((8, 8), (4, 1)), grid((8, 8), (1, 4))
    assert given_traffic(rows, None, columns, 1, workers=4) == Traffic(nbytes=48, messages=12, tasks=16)


@given(st.data())
def test_what_is_given_ships_what_each_tile_lacks_where_most_of_it_lies(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 6), min_size=0, max_size=2)))
    chunks = data.draw(strategies.chunks(shape))
    wanted = data.draw(strategies.chunks(shape, zeros=False))
    workers = data.draw(st.integers(1, 5))
    blocks = prod(map(len, chunks))
    owners = data.draw(
        st.none() | st.lists(st.integers(0, workers - 1), min_size=blocks, max_size=blocks).map(tuple)
    )
    copies = data.draw(st.integers(1, workers))
    moved = given_traffic(chunks, owners, wanted, 8, workers, copies=copies)
    assert moved.nbytes == 8 * oracle.given_cost(chunks, owners, wanted, workers, copies)
    assert 0 <= moved.nbytes <= 8 * prod(shape)
    if workers == 1:
        assert moved.nbytes == 0


def test_no_more_copies_travel_than_there_are_other_workers() -> None:
    matmul = Expression.parse("ij,jk->ik")
    extents, parts = {"i": 16, "j": 16, "k": 16}, {"i": 8, "j": 1, "k": 1}
    assert join_traffic(matmul, extents, parts, (1, 1)).nbytes == 7 * 256
    assert join_traffic(matmul, extents, parts, (1, 1), workers=3).nbytes == 2 * 256


def test_on_one_worker_nothing_travels() -> None:
    matmul = Expression.parse("ij,jk->ik")
    extents, parts = {"i": 16, "j": 16, "k": 16}, {"i": 2, "j": 2, "k": 2}
    rows, columns = ((8, 8), (16,)), ((16,), (8, 8))
    for moved in (
        join_traffic(matmul, extents, parts, (8, 8), workers=1),
        aggregate_traffic(matmul, extents, parts, 8, workers=1),
        repartition_traffic(rows, columns, itemsize=8, workers=1),
    ):
        assert (moved.nbytes, moved.messages) == (0, 0)
        assert moved.tasks > 0


# Delivery


@settings(max_examples=200)
@given(st.data())
def test_a_delivered_block_is_made_where_its_largest_piece_lies(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=2))
    produced, consumed = (
        tuple(data.draw(strategies.cuts(extent, zeros=zeros)) for extent in shape) for zeros in (False, True)
    )
    moved = delivery_traffic(produced, consumed, itemsize=8, workers=3)
    assert moved.nbytes == 8 * oracle.delivery_cost(produced, consumed)
    assert moved.tasks == repartition_traffic(produced, consumed, itemsize=8, workers=3).tasks
    assert bool(moved.messages) == bool(moved.nbytes)
    assert delivery_traffic(produced, consumed, itemsize=8, workers=1).nbytes == 0


def test_a_grid_that_is_only_cut_finer_is_delivered_where_it_lies() -> None:
    moved = delivery_traffic(grid((16,), (4,)), grid((16,), (16,)), itemsize=8, workers=4)
    assert (moved.nbytes, moved.messages, moved.tasks) == (0, 0, 16)


# Hosts


@pytest.mark.parametrize(("parts", "crossing"), [({"i": 8}, 1), ({"i": 2, "k": 4}, 0), ({"k": 8}, 1)])
def test_copies_fill_one_host_before_they_go_to_the_next(parts: dict[str, int], crossing: int) -> None:
    every = {"i": 1, "j": 1, "k": 1} | parts
    extents = dict.fromkeys("ijk", 16)
    moved = join_traffic(Expression.parse("ij,jk->ik"), extents, every, (8, 8), workers=8, hosts=2)
    # by rows B goes to the other host once, by columns A; four copies or two stay in a host of four
    assert moved.crossing == crossing * 256 * 8
    one = join_traffic(Expression.parse("ij,jk->ik"), extents, every, (8, 8), workers=8)
    assert (one.nbytes, one.crossing) == (moved.nbytes, 0)


def test_partial_results_of_more_than_a_host_cross() -> None:
    parts = {"i": 1, "j": 8, "k": 1}
    extents = dict.fromkeys("ijk", 16)
    moved = aggregate_traffic(Expression.parse("ij,jk->ik"), extents, parts, 8, workers=8, hosts=2)
    assert (moved.nbytes, moved.crossing) == (7 * 256 * 8, 4 * 256 * 8)


def test_nothing_crosses_on_one_host() -> None:
    parts, rows, columns = {"i": 2, "j": 8, "k": 1}, grid((16, 16), (8, 1)), grid((16, 16), (1, 8))
    for moved in (
        join_traffic(MATMUL, CUBE, parts, (8, 8), workers=4),
        aggregate_traffic(MATMUL, CUBE, parts, 8, workers=4),
        repartition_traffic(rows, columns, 8, workers=4),
        delivery_traffic(rows, columns, 8, workers=4),
        making_traffic(rows, columns, 8, workers=4),
        given_traffic(rows, None, columns, 8, workers=4),
    ):
        assert moved.nbytes > 0
        assert moved.crossing == 0


def test_of_blocks_on_one_worker_only_those_tiles_cross_that_are_dealt_to_another_host() -> None:
    moved = given_traffic(((6, 4, 4, 2),), (0, 0, 0, 0), ((6, 4, 4, 2),), 8, workers=4, hosts=2)
    assert (moved.nbytes, moved.crossing) == (10 * 8, 6 * 8)


def test_rows_to_columns_crosses_by_the_share_of_the_other_hosts() -> None:
    rows, columns = grid((16, 16), (8, 1)), grid((16, 16), (1, 8))
    moved = repartition_traffic(rows, columns, itemsize=1, workers=8, hosts=2)
    assert (moved.nbytes, moved.crossing) == (224, 128)
    given_ = given_traffic(rows, None, columns, 1, workers=8, hosts=2)
    assert (given_.nbytes, given_.crossing) == (224, 128)


def test_too_many_tiles_to_deal_out_one_by_one_are_priced_at_the_best_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, columns = grid((32, 32), (16, 1)), grid((32, 32), (1, 16))
    monkeypatch.setattr(cost, "DEALT_OUT", 1)
    moved = given_traffic(rows, None, columns, 2, workers=16)
    assert moved == repartition_traffic(rows, columns, 2, workers=16)


@pytest.mark.parametrize(("blocks", "workers", "most"), [(4, 4, 16), (8, 4, 64), (4, 8, 32)])
def test_tiles_are_dealt_out_where_there_are_just_few_enough(
    monkeypatch: pytest.MonkeyPatch, blocks: int, workers: int, most: int
) -> None:
    chunks = grid((16,), (blocks,))
    monkeypatch.setattr(cost, "DEALT_OUT", most)
    given_traffic.cache_clear()
    assert given_traffic(chunks, (0,) * blocks, chunks, 1, workers=workers).nbytes > 0
    monkeypatch.setattr(cost, "DEALT_OUT", most - 1)
    given_traffic.cache_clear()
    assert given_traffic(chunks, (0,) * blocks, chunks, 1, workers=workers).nbytes == 0


# Several tiles a worker, several copies of a tile


KHATRI_RAO = Expression.parse("ijk,jkl->il")


def test_tiles_of_one_worker_stand_together_where_that_ships_least() -> None:
    extents, sizes = {"i": 64, "j": 64, "k": 64, "l": 8}, (8, 8)
    tall = bundles(KHATRI_RAO, extents, {"i": 4, "j": 1, "k": 1, "l": 4}, sizes, 8, workers=4)
    assert tall == {"i": 1, "j": 1, "k": 1, "l": 4}  # the small operand is copied, the large one stays
    parts = {"i": 4, "j": 2, "k": 2, "l": 1}
    assert bundles(KHATRI_RAO, extents, parts, sizes, 8, workers=4) == {"i": 4, "j": 1, "k": 1, "l": 1}
    two = bundles(MATMUL, {"i": 64, "j": 8, "k": 8}, {"i": 4, "j": 1, "k": 2}, (8, 8), 8, workers=4)
    assert two == {"i": 1, "j": 1, "k": 2}
    # what is read of given tensors counts too: here the large one lies cut along i
    lies = bundles(KHATRI_RAO, extents, parts, sizes, 8, 4, lambda between: 10**9 * (between["i"] != 4))
    assert lies == {"i": 1, "j": 2, "k": 2, "l": 1}


def test_no_more_tiles_than_workers_stand_alone() -> None:
    extents = {"i": 8, "j": 8, "k": 8}
    assert bundles(MATMUL, extents, {"i": 2, "j": 1, "k": 2}, (8, 8), 8, workers=4) == {
        "i": 1,
        "j": 1,
        "k": 1,
    }
    assert bundles(MATMUL, extents, {"i": 2, "j": 1, "k": 2}, (8, 8), 8, workers=1) == {
        "i": 2,
        "j": 1,
        "k": 2,
    }
    scalar = Expression.parse(",->")
    assert bundles(scalar, {}, {}, (8, 8), 8, workers=4) == {}


@given(st.fixed_dictionaries({label: st.integers(1, 6) for label in "ijk"}), st.integers(2, 6), st.data())
def test_a_bundle_is_an_even_share_and_never_ships_more_than_scattered_tiles(
    extents: dict[str, int], workers: int, data: st.DataObject
) -> None:
    drawn = [{label: data.draw(st.integers(1, n)) for label, n in extents.items()} for _ in range(3)]
    together = bundles(
        MATMUL,
        extents,
        {label: np.array([one[label] for one in drawn]) for label in extents},
        (8, 8),
        8,
        workers,
    )
    for number, parts in enumerate(drawn):
        mine = bundles(MATMUL, extents, parts, (8, 8), 8, workers)
        assert mine == {label: int(together[label][number]) for label in parts}
        assert prod(mine.values()) <= -(-prod(parts.values()) // workers)
        if prod(mine.values()) > 1:
            assert prod(across(parts, mine).values()) <= workers
        scattered = join_traffic(MATMUL, extents, parts, (8, 8), workers)
        assert join_traffic(MATMUL, extents, parts, (8, 8), workers, bundle=mine).nbytes <= scattered.nbytes


def test_partial_results_of_one_worker_are_added_up_before_they_are_sent() -> None:
    parts = {"i": 1, "j": 8, "k": 1}
    scattered = aggregate_traffic(MATMUL, CUBE, parts, 8, workers=4)
    together = aggregate_traffic(MATMUL, CUBE, parts, 8, workers=4, bundle={"i": 1, "j": 2, "k": 1})
    assert scattered.nbytes == 7 * 256 * 8
    assert together.nbytes == 3 * 256 * 8
    assert (scattered.tasks, together.tasks) == (1, 1 + 4)


@pytest.mark.parametrize(
    ("workers", "bundled", "tasks"), [(4, 1, 1), (4, 2, 1 + 4), (2, 4, 1 + 2), (2, 8, 1), (1, 8, 1)]
)
def test_a_worker_adds_up_what_it_has_of_a_tile_where_others_have_some_too(
    workers: int, bundled: int, tasks: int
) -> None:
    parts, bundle = {"i": 1, "j": 8, "k": 1}, {"i": 1, "j": bundled, "k": 1}
    assert aggregate_traffic(MATMUL, CUBE, parts, 8, workers, bundle=bundle).tasks == tasks


@given(st.lists(st.fixed_dictionaries({label: st.integers(1, 8) for label in "ijk"}), min_size=1), st.data())
def test_many_candidates_at_once_cost_what_each_does(
    candidates: list[dict[str, int]], data: st.DataObject
) -> None:
    workers = data.draw(st.none() | st.integers(1, 9))
    hosts = 1 if workers is None else data.draw(st.integers(1, workers))
    bundled = [
        {label: data.draw(st.integers(1, count)) for label, count in one.items()} for one in candidates
    ]
    parts, bundle = (
        {label: np.array([one[label] for one in several], dtype=float) for label in "ijk"}
        for several in (candidates, bundled)
    )
    joined = join_traffic(MATMUL, CUBE, parts, (4, 8), workers, hosts, bundle)
    combined = aggregate_traffic(MATMUL, CUBE, parts, 8, workers, hosts, bundle)
    for number, (one, tied) in enumerate(zip(candidates, bundled)):
        for together, alone in (
            (joined, join_traffic(MATMUL, CUBE, one, (4, 8), workers, hosts, tied)),
            (combined, aggregate_traffic(MATMUL, CUBE, one, 8, workers, hosts, tied)),
        ):
            every = [np.broadcast_to(count, len(candidates))[number] for count in astuple(together)]
            assert every == list(astuple(alone))


def test_of_copies_each_worker_has_in_place_what_it_holds() -> None:
    rows, whole = grid((8, 8), (4, 1)), grid((8, 8), (1, 1))
    assert repartition_traffic(rows, whole, 1, workers=4).nbytes == 48
    # four workers want all of it, three copies are counted by the join: each has its own quarter
    assert repartition_traffic(rows, whole, 1, workers=4, copies=4).nbytes == 0
    assert given_traffic(rows, None, whole, 1, workers=4, copies=4).nbytes == 0
    assert given_traffic(rows, (0, 0, 0, 0), whole, 1, workers=4, copies=4).nbytes == 0
    halves = grid((8, 8), (2, 1))
    assert given_traffic(rows, (3, 1, 2, 0), halves, 1, workers=4, copies=2).nbytes == 0


def test_blocks_made_on_demand_move_only_where_several_workers_want_a_part() -> None:
    rows, columns = grid((8, 8), (4, 1)), grid((8, 8), (1, 4))
    assert making_traffic(rows, rows, 1, workers=4).nbytes == 0
    assert making_traffic(rows, grid((8, 8), (2, 1)), 1, workers=4).nbytes == 0
    assert making_traffic(rows, columns, 1, workers=4).nbytes == 48
    assert making_traffic(rows, columns, 1, workers=2).nbytes == 48
    assert making_traffic(rows, columns, 1, workers=1).nbytes == 0


def test_too_many_blocks_of_tiles_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, extents = {"i": 4, "j": 1, "k": 4}, {"i": 64, "j": 8, "k": 8}
    assert bundles(MATMUL, extents, parts, (8, 8), 8, workers=4) == {"i": 1, "j": 1, "k": 4}
    monkeypatch.setattr(cost, "MOST_BUNDLES", 3)
    assert bundles(MATMUL, extents, parts, (8, 8), 8, workers=4) == {"i": 1, "j": 1, "k": 4}
    monkeypatch.setattr(cost, "MOST_BUNDLES", 2)
    assert bundles(MATMUL, extents, parts, (8, 8), 8, workers=4) == {"i": 1, "j": 1, "k": 1}
