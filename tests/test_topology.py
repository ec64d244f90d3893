"""Machines turn counts into seconds, and machines that cannot be are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_eindecomp.cost import Traffic
from dask_eindecomp.topology import SMALL_TILE, Topology, TopologyError


def test_slots_are_the_tasks_that_run_at_one_time() -> None:
    assert Topology(workers=4, threads=3).slots == 12


def test_threads_of_one_process_are_one_worker_to_which_nothing_travels() -> None:
    topology = Topology.of_threads(8)
    assert (topology.workers, topology.threads) == (1, 8)
    assert topology.move_seconds(Traffic(nbytes=10**12, messages=10**6)) == 0


def test_a_process_has_at_least_one_thread() -> None:
    assert Topology.of_threads(0).threads == 1


@pytest.mark.parametrize("name", ["workers", "threads", "memory"])
def test_there_is_at_least_one_of_what_is_counted(name: str) -> None:
    with pytest.raises(TopologyError, match=rf"topology has 0 {name}; expected at least 1"):
        Topology(**{name: 0})


@pytest.mark.parametrize("name", ["bandwidth", "flops"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_speed_is_more_than_nothing(name: str, value: float) -> None:
    with pytest.raises(TopologyError, match=rf"topology has a {name} of {value}; expected more than 0"):
        Topology(**{name: value})


@pytest.mark.parametrize("name", ["latency", "task_overhead"])
@pytest.mark.parametrize("value", [-1e-9, float("nan")])
def test_a_delay_is_not_negative(name: str, value: float) -> None:
    with pytest.raises(TopologyError, match=rf"topology has a {name} of {value}; expected 0 or more"):
        Topology(**{name: value})


def test_a_delay_may_be_nothing() -> None:
    assert Topology(latency=0, task_overhead=0).move_seconds(Traffic(tasks=5)) == 0


def test_its_errors_are_value_errors() -> None:
    assert issubclass(TopologyError, ValueError)


def test_nothing_to_compute_takes_no_time() -> None:
    assert Topology().compute_seconds(0, 4, "blas") == 0


def test_large_tiles_of_doubles_run_at_the_full_rate() -> None:
    topology = Topology(workers=4, flops=1e9)
    assert topology.compute_seconds(4 * 10**12, 4, "blas") == pytest.approx(1000, rel=1e-3)


def test_a_small_tile_runs_at_half_the_rate() -> None:
    topology = Topology(flops=1e9)
    assert topology.compute_seconds(SMALL_TILE, 1, "blas") == pytest.approx(2 * SMALL_TILE / 1e9)


def test_single_precision_is_twice_as_fast_and_smaller_no_faster_than_that() -> None:
    topology = Topology()
    double, single, half, tiny = (topology.compute_seconds(10**9, 1, "blas", n) for n in (8, 4, 2, 1))
    assert double == pytest.approx(2 * single)
    assert half == tiny == single


def test_a_kernel_without_blas_is_slower_and_one_bound_by_memory_slowest() -> None:
    topology = Topology()
    blas, loop, stream = (topology.compute_seconds(10**12, 1, one) for one in ("blas", "loop", "stream"))
    assert blas * 5 < loop < stream


def test_the_busiest_worker_counts_where_tiles_do_not_divide() -> None:
    topology = Topology(workers=4)
    even, odd = (topology.compute_seconds(10**6 * tiles, tiles, "loop") for tiles in (4, 5))
    assert odd == pytest.approx(2 * even)


def test_moving_takes_the_share_of_one_worker_its_latency_and_the_overhead_of_all_tasks() -> None:
    topology = Topology(workers=4, bandwidth=100.0, latency=3.0, task_overhead=0.5)
    assert topology.move_seconds(Traffic(nbytes=800, messages=5, tasks=7)) == 800 / 4 / 100 + 2 * 3 + 7 * 0.5


def test_one_worker_pays_for_tasks_alone() -> None:
    topology = Topology(workers=1, task_overhead=0.5)
    assert topology.move_seconds(Traffic(nbytes=800, messages=5, tasks=7)) == 3.5


@given(
    st.integers(1, 10**12), st.integers(1, 64), st.integers(1, 8), st.sampled_from(["blas", "loop", "stream"])
)
def test_more_work_never_takes_less_time_nor_more_workers_more(
    flops: int, tiles: int, workers: int, kernel: str
) -> None:
    few, more = Topology(workers=workers), Topology(workers=workers + 1)
    assert few.compute_seconds(flops, tiles, kernel) <= few.compute_seconds(flops + 1, tiles, kernel) * (
        1 + 1e-9
    )
    assert more.compute_seconds(flops, tiles, kernel) <= few.compute_seconds(flops, tiles, kernel)
