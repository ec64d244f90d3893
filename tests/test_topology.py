"""Machines turn counts into seconds, and machines that cannot be are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_eindecomp.cost import Traffic
from dask_eindecomp.topology import PASSES, Topology, TopologyError


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


@pytest.mark.parametrize("name", ["local_bandwidth", "memory_bandwidth"])
def test_the_speed_of_memory_and_of_the_inner_link_is_more_than_nothing(name: str) -> None:
    with pytest.raises(TopologyError, match=rf"topology has a {name} of 0; expected more than 0"):
        Topology(**{name: 0})


def test_there_are_no_more_hosts_than_workers() -> None:
    with pytest.raises(TopologyError, match="3 hosts for 2 workers; expected no more hosts than workers"):
        Topology(workers=2, hosts=3)


def test_nobody_gets_faster_when_all_are_busy() -> None:
    with pytest.raises(TopologyError, match=r"a contention of 0\.5; expected 1 or more"):
        Topology(contention=0.5)


def test_a_type_has_some_speed() -> None:
    with pytest.raises(TopologyError, match=r"a speed of 0 for float32; expected more than 0"):
        Topology(speeds=(("float32", 0),))


# computing


def blas(topology: Topology, flops: float, tiles: int = 1, dtype: str = "float64") -> float:
    """Seconds of products alone, no memory traffic."""
    return float(topology.compute_seconds(flops, 0, tiles, "blas", dtype))


def test_large_tiles_of_doubles_run_at_the_full_rate() -> None:
    topology = Topology(workers=4, flops=1e9)
    assert blas(topology, 4 * 10**12, tiles=4) == pytest.approx(1000, rel=1e-3)


def test_a_small_tile_runs_at_half_the_rate() -> None:
    topology = Topology(flops=1e9, small_tile=1000)
    assert blas(topology, 1000) == pytest.approx(2 * 1000 / 1e9)


def test_single_precision_is_twice_as_fast_and_complex_slower() -> None:
    topology = Topology()
    single, double, pairs = (
        blas(topology, 10**12, dtype=one) for one in ("float32", "float64", "complex128")
    )
    assert double == pytest.approx(2 * single)
    assert pairs == pytest.approx(4 * double)


def test_a_type_without_a_speed_of_its_own_runs_as_doubles_do() -> None:
    assert Topology().speed("longdouble") == 1.0


def test_a_kernel_without_blas_is_slower() -> None:
    topology = Topology()
    fast, loop = (topology.compute_seconds(10**12, 0, 1, one) for one in ("blas", "loop"))
    assert fast * 5 < loop


def test_what_a_tile_reads_and_writes_takes_memory_bandwidth() -> None:
    topology = Topology(workers=2, memory_bandwidth=100.0)
    assert topology.compute_seconds(0, 800, 2, "stream") == pytest.approx(PASSES * 4.0)


def test_the_busiest_worker_counts_where_tiles_do_not_divide() -> None:
    topology = Topology(workers=4)
    even, odd = (topology.compute_seconds(10**6 * tiles, 0, tiles, "loop") for tiles in (4, 5))
    assert odd == pytest.approx(2 * even)


def test_a_tile_alone_does_not_suffer_from_contention() -> None:
    quiet, crowded = Topology(workers=4), Topology(workers=4, contention=2.0)
    assert blas(crowded, 10**12) == blas(quiet, 10**12)
    assert blas(crowded, 10**12, tiles=4) == pytest.approx(2 * blas(quiet, 10**12, tiles=4))
    assert blas(crowded, 10**12, tiles=2) == pytest.approx(blas(quiet, 10**12, tiles=2))


def test_copying_reads_and_writes_and_is_shared() -> None:
    topology = Topology(workers=4, memory_bandwidth=100.0)
    assert topology.copy_seconds(400, 1) == pytest.approx(PASSES * 8.0)
    assert topology.copy_seconds(400, 8) == pytest.approx(PASSES * 2.0)


@given(
    st.integers(1, 10**12), st.integers(1, 64), st.integers(1, 8), st.sampled_from(["blas", "loop", "stream"])
)
def test_more_work_never_takes_less_time_nor_more_workers_more(
    flops: int, tiles: int, workers: int, kernel: str
) -> None:
    few, more = Topology(workers=workers), Topology(workers=workers + 1)
    seconds = few.compute_seconds(flops, flops, tiles, kernel)
    assert seconds <= few.compute_seconds(flops + 1, flops, tiles, kernel) * (1 + 1e-9)
    assert more.compute_seconds(flops, flops, tiles, kernel) <= seconds


def test_many_candidates_at_once_take_what_each_takes() -> None:
    topology = Topology(workers=3, contention=1.5)
    tiles, flops = np.array([1.0, 2.0, 3.0, 7.0]), np.array([1e9, 2e9, 3e9, 4e9])
    together = topology.compute_seconds(flops, 8 * flops, tiles, "blas")
    each = [topology.compute_seconds(f, 8 * f, t, "blas") for f, t in zip(flops.tolist(), tiles.tolist())]
    np.testing.assert_allclose(together, each)


# moving


def test_moving_takes_the_share_of_one_worker_its_latency_and_the_overhead_of_all_tasks() -> None:
    topology = Topology(workers=4, bandwidth=100.0, latency=3.0, task_overhead=0.5)
    # four of eleven messages are the first that a worker gets for a task, and part of what a task costs
    assert topology.move_seconds(Traffic(nbytes=800, messages=11, tasks=7)) == 800 / 4 / 100 + 2 * 3 + 7 * 0.5


def test_every_round_of_tiles_waits_its_turn() -> None:
    topology = Topology(workers=2, threads=2, turn=0.5)
    assert [float(topology.turn_seconds(tiles)) for tiles in (1, 4, 5, 9)] == [0.5, 0.5, 1.0, 1.5]


def test_what_one_worker_has_for_a_tile_comes_in_one_message() -> None:
    topology = Topology(workers=4, latency=3.0, task_overhead=0.0)
    assert topology.move_seconds(Traffic(messages=1000), receivers=4) == 2 * 3
    assert topology.move_seconds(Traffic(messages=1000), receivers=8) == 4 * 3


def test_bytes_that_one_worker_has_are_sent_by_it_alone() -> None:
    topology = Topology(workers=4, bandwidth=100.0, latency=0, task_overhead=0)
    assert topology.move_seconds(Traffic(nbytes=800), receivers=4, senders=1) == 8.0
    assert topology.move_seconds(Traffic(nbytes=800), receivers=4, senders=9) == 2.0


def test_bytes_for_one_tile_arrive_at_one_worker() -> None:
    topology = Topology(workers=4, bandwidth=100.0, latency=0, task_overhead=0)
    assert topology.move_seconds(Traffic(nbytes=800), receivers=1) == 8.0
    assert topology.move_seconds(Traffic(nbytes=800), receivers=9) == 2.0


def test_one_worker_pays_for_tasks_alone() -> None:
    topology = Topology(workers=1, task_overhead=0.5)
    assert topology.move_seconds(Traffic(nbytes=800, messages=5, tasks=7)) == 3.5


def test_bytes_of_the_same_host_come_over_the_inner_link() -> None:
    topology = Topology(
        workers=4,
        hosts=2,
        bandwidth=10.0,
        local_bandwidth=100.0,
        latency=8.0,
        local_latency=1.0,
        task_overhead=0,
    )
    inside, outside = Traffic(nbytes=800, messages=8), Traffic(nbytes=800, messages=8, crossing=800)
    assert topology.move_seconds(inside) == 800 / 4 / 100 + 1
    assert topology.move_seconds(outside) == 800 / 4 / 10 + 8
    assert topology.move_seconds(replace(inside, crossing=400)) == 400 / 4 / 100 + 400 / 4 / 10 + (8 + 1) / 2


def test_without_figures_of_its_own_the_inner_link_is_like_the_outer() -> None:
    flat, two = Topology(workers=4), Topology(workers=4, hosts=2)
    traffic = Traffic(nbytes=800, messages=4, crossing=300)
    assert two.move_seconds(traffic) == pytest.approx(flat.move_seconds(traffic))


def test_the_fullest_host_has_the_odd_worker() -> None:
    assert Topology(workers=5, hosts=2).per_host == 3


# written down


def test_a_topology_written_down_and_read_is_the_same(tmp_path: Path) -> None:
    topology = Topology(
        workers=3, addresses=("tcp://a:1", "tcp://b:2", "tcp://b:3"), hosts=2, local_latency=1e-5
    )
    assert Topology.from_json(topology.to_json()) == topology
    file = tmp_path / "topology.json"
    file.write_text(topology.to_json())
    assert Topology.load(file) == topology


def test_figures_that_are_not_written_have_their_defaults() -> None:
    assert Topology.from_json('{"workers": 7}') == Topology(workers=7)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no JSON"),
        ("[1]", "a topology is no list; expected a JSON object"),
        ('{"wokers": 7}', "unknown figure 'wokers' of a topology; expected one of workers, threads"),
        ('{"workers": "7"}', "topology has '7' for workers; expected something like 1"),
        ('{"workers": true}', "topology has True for workers"),
        ('{"bandwidth": null}', "topology has None for bandwidth"),
        ('{"speeds": [1]}', r"topology has \[1\] for speeds"),
        ('{"workers": 0}', "topology has 0 workers; expected at least 1"),
    ],
)
def test_what_is_no_topology_is_refused(text: str, reason: str) -> None:
    with pytest.raises(TopologyError, match=reason):
        Topology.from_json(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"cannot read a topology from .*missing\.json"):
        Topology.load(tmp_path / "missing.json")
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(TopologyError, match=r"cannot read a topology from .*empty\.json: no JSON"):
        Topology.load(tmp_path / "empty.json")


@pytest.mark.parametrize("shares", [(1, 2), (1, 0, 2)])
def test_shares_are_a_positive_number_for_each_worker(shares: tuple[int, ...]) -> None:
    with pytest.raises(
        TopologyError, match=rf"shares {re.escape(str(shares))} for 3 workers; expected a positive"
    ):
        Topology(workers=3, shares=shares)


def test_workers_with_different_threads_have_their_sum_of_slots() -> None:
    uneven = Topology(workers=3, threads=2, shares=(1, 2, 4))
    assert uneven.slots == 7
    assert Topology.from_json(uneven.to_json()) == uneven
