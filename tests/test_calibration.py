"""A cluster is measured: the right workers, figures that can be, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("distributed")

from distributed import Client

import dask_eindecomp.__main__ as command
import dask_eindecomp.calibration as measuring
from dask_eindecomp.calibration import Calibration, calibration
from dask_eindecomp.topology import Topology, TopologyError, host_of
from tests.cluster import ROOT, cluster

pytestmark = pytest.mark.timeout(180)

SANE = {
    "bandwidth": (1e6, 1e12),
    "latency": (0, 1),
    "flops": (1e7, 1e13),
    "task_overhead": (1e-5, 1),
    "turn": (1e-4, 10),
    "memory_bandwidth": (1e7, 1e13),
    "contention": (1, 100),
    "small_tile": (0, 1e9),
    "float32 speed": (0.1, 50),
    "complex64 speed": (0.01, 50),
    "complex128 speed": (0.01, 5),
}
"""From the slowest machine to the fastest, and a disturbance on top."""
SECONDS = {
    "large": 0.1,
    "float64": 0.04,
    "float32": 0.02,
    "complex64": 0.08,
    "complex128": 0.16,
    "tile 40": 0.001,
    "tile 72": 0.002,
    "stream": 1e-10,
    "busy": 0.25,
    "task": 0.002,
    "turn": 0.02,
}
"""What one worker took; two also take "byte" and messages."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the cluster's processes write."""
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    """A client of three workers, each a process of its own."""
    with cluster(folder, workers=3) as address, Client(address, set_as_default=False) as client:
        client.wait_for_workers(3, timeout=60)
        yield client


@pytest.fixture(scope="module")
def measured(client: Client) -> tuple[Calibration, float]:
    """The cluster as measured, and the seconds that took."""
    start = time.perf_counter()
    return calibration(client, repeats=2), time.perf_counter() - start


@contextmanager
def more_workers(folder: Path, host: str, count: int) -> Iterator[None]:
    """Workers on another host for the scheduler whose file is in the folder."""
    line = f"worker --host {host} --nthreads 1 --no-nanny --no-dashboard --death-timeout 60 --scheduler-file"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    processes = []
    try:
        for _ in range(count):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "dask", *line.split(), str(folder / "scheduler.json")],
                    env=environment,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# what is measured


def test_the_workers_are_those_of_the_cluster(client: Client, measured: tuple[Calibration, float]) -> None:
    topology = measured[0].topology
    assert (topology.workers, topology.threads, topology.hosts) == (3, 1, 1)
    assert topology.memory == 2 << 30
    assert topology.addresses == tuple(sorted(client.nthreads()))


def test_every_figure_has_a_sane_order_of_magnitude(measured: tuple[Calibration, float]) -> None:
    figures = dict(measured[0]._figures())
    assert {name for name, (low, high) in SANE.items() if not low <= figures[name] <= high} == set()


def test_one_host_has_no_inner_link_and_half_precision_is_not_measured(
    measured: tuple[Calibration, float],
) -> None:
    topology = measured[0].topology
    assert topology.local_bandwidth is None
    assert topology.local_latency is None
    assert topology.speed("float16") == Topology().speed("float16")


def test_every_measured_figure_has_a_spread(measured: tuple[Calibration, float]) -> None:
    spread = measured[0].spread
    assert set(spread) == set(SANE)
    assert min(spread.values()) >= 0


def test_it_takes_seconds(measured: tuple[Calibration, float]) -> None:
    # five where nothing else runs, but a machine under load takes several times that
    assert measured[1] < 60


def test_nothing_stays_on_the_cluster(client: Client, measured: tuple[Calibration, float]) -> None:
    until = time.monotonic() + 20  # the scheduler forgets a little later than the client
    while client.who_has() and time.monotonic() < until:
        time.sleep(0.05)
    assert client.who_has() == {}
    assert client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) == 0


def test_what_was_measured_can_be_written_down(measured: tuple[Calibration, float]) -> None:
    assert Topology.from_json(measured[0].topology.to_json()) == measured[0].topology


def test_a_link_between_hosts_and_one_within_are_measured_apart(tmp_path: Path) -> None:
    with (
        cluster(tmp_path, workers=2) as address,
        more_workers(tmp_path, "127.0.0.2", 1),
        Client(address, set_as_default=False) as client,
    ):
        client.wait_for_workers(3, timeout=60)
        found = calibration(client, repeats=1)
    topology = found.topology
    assert (topology.workers, topology.hosts) == (3, 2)
    assert [host_of(one) for one in topology.addresses] == ["127.0.0.1", "127.0.0.1", "127.0.0.2"]
    assert topology.local_bandwidth is not None and 1e6 < topology.local_bandwidth < 1e12
    assert topology.local_latency is not None and 0 <= topology.local_latency < 1
    assert set(found.spread) == {*SANE, "local_bandwidth", "local_latency"}


# what is refused


def test_a_cluster_without_workers_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(TopologyError, match=r"scheduler at .* has no workers; expected at least 1")
    with cluster(tmp_path, workers=0) as address, Client(address, set_as_default=False) as client, refused:
        calibration(client)


@pytest.mark.parametrize("repeats", [0, -1])
def test_less_than_one_repeat_is_refused(client: Client, repeats: int) -> None:
    with pytest.raises(TopologyError, match=rf"calibrate in {repeats} repeats; expected at least 1"):
        calibration(client, repeats=repeats)


def test_an_asynchronous_client_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected Client\(asynchronous=False\)"):
        calibration(SimpleNamespace(asynchronous=True))


# the workers


def test_workers_are_found_though_the_client_remembers_none(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "scheduler_info", lambda n_workers=-1: {"workers": {}})
    assert measuring._workers(client).workers == 3


def standing(**workers: dict[str, Any]) -> Any:
    """A client of workers that are only said to be there."""
    asked = {"workers": {f"tcp://10.0.0.{name[1:]}:1": worker for name, worker in workers.items()}}
    scheduler = SimpleNamespace(identity=lambda: asked, address="tcp://10.0.0.9:8786")
    return SimpleNamespace(scheduler=scheduler, scheduler_info=lambda: asked, sync=lambda ask: ask())


def test_threads_are_the_rounded_mean_and_memory_is_the_least() -> None:
    some = {"nthreads": 4, "memory_limit": 8 << 30}
    found = measuring._workers(
        standing(w2=some, w1=some | {"memory_limit": 1 << 30}, w3=some | {"nthreads": 1})
    )
    assert (found.workers, found.threads, found.memory, found.hosts) == (3, 3, 1 << 30, 3)
    assert found.addresses == ("tcp://10.0.0.1:1", "tcp://10.0.0.2:1", "tcp://10.0.0.3:1")


def test_workers_without_threads_or_limits_count_as_one_thread_and_the_usual_memory() -> None:
    found = measuring._workers(standing(w1={"nthreads": 0, "memory_limit": 0}))
    assert (found.threads, found.memory) == (1, Topology().memory)


def workers_on(*hosts: str) -> tuple[str, ...]:
    """Addresses, one for each letter."""
    return tuple(f"tcp://{host}:{number}" for number, host in enumerate(hosts))


@pytest.mark.parametrize(
    "hosts, outside", [("aaaa", False), ("aabb", True), ("aabb", False), ("aabbcc", True)]
)
def test_on_even_hosts_every_worker_sends_to_one_other_at_a_time(hosts: str, outside: bool) -> None:
    addresses = workers_on(*hosts)
    senders = measuring._senders(addresses, outside)
    assert set(senders) == set(addresses)
    for turn in zip(*senders.values()):
        assert sorted(turn) == sorted(addresses)


@pytest.mark.parametrize("outside", [True, False])
def test_senders_are_of_other_hosts_or_of_the_same(outside: bool) -> None:
    addresses = workers_on(*"aaab")
    senders = measuring._senders(addresses, outside)
    for receiver, several in senders.items():
        assert receiver not in several
        assert {host_of(one) != host_of(receiver) for one in several} == {outside}
    assert set(senders) == set(addresses if outside else addresses[:3])


def test_links_are_those_there_are() -> None:
    def kinds(*hosts: str) -> list[str]:
        topology = Topology(workers=len(hosts), hosts=len({*hosts}), addresses=workers_on(*hosts))
        return list(measuring._links(topology))

    assert kinds("a") == []
    assert kinds("a", "a") == [""]
    assert kinds("a", "b") == [""]
    assert kinds("a", "a", "b") == ["", "local_"]


# from seconds to figures


def test_figures_are_what_the_formulas_divide_by() -> None:
    figures = measuring._figures(
        SECONDS
        | {"byte": 5e-9, "message of another": 0.004, "message of its own": 0.001}
        | {"local_byte": 1e-9, "local_message of another": 1e-4, "local_message of its own": 2e-4}
    )
    assert figures["flops"] == pytest.approx(measuring.SIDE**3 / 0.1)
    assert figures["contention"] == pytest.approx(2.5)
    assert figures["memory_bandwidth"] == pytest.approx(1e10)
    assert figures["bandwidth"] == pytest.approx(2e8)
    assert figures["local_bandwidth"] == pytest.approx(1e9)
    assert (figures["latency"], figures["local_latency"]) == (0.003, 0)
    assert (figures["task_overhead"], figures["turn"]) == (0.002, 0.02)
    assert figures["float32 speed"] == pytest.approx(2)
    assert figures["complex128 speed"] == pytest.approx(0.25)


def test_threads_that_do_not_disturb_each_other_have_no_contention() -> None:
    assert measuring._figures(SECONDS | {"busy": 0.09})["contention"] == 1


def test_one_worker_keeps_the_usual_link() -> None:
    found = Topology(workers=1, addresses=("tcp://a:1",))
    topology = measuring._with_figures(found, measuring._figures(SECONDS))
    assert (topology.bandwidth, topology.latency) == (found.bandwidth, found.latency)
    assert topology.flops == pytest.approx(measuring.SIDE**3 / 0.1)
    assert topology.addresses == found.addresses


def test_small_tiles_take_what_the_formula_says() -> None:
    topology = Topology(flops=1e10, memory_bandwidth=1e10, small_tile=400_000)
    seconds = {side: float(topology.compute_seconds(side**3, 24 * side**2, 1, "blas")) for side in (64, 128)}
    assert measuring._small_tile(seconds, 1e10, 1e10) == 400_000


def test_tiles_faster_than_large_ones_cost_nothing_besides() -> None:
    assert measuring._small_tile({64: 1e-6, 128: 1e-6}, 1e10, 1e10) == 0


def test_the_smaller_of_small_tiles_counts_more() -> None:
    extra = {64: 100_000, 128: 900_000}
    seconds = {side: (side**3 + extra[side]) / 1e10 for side in extra}
    assert measuring._small_tile(seconds, 1e10, 1e20) < 200_000


def test_the_spread_is_the_way_from_the_best_to_the_worst() -> None:
    assert measuring._spread([2.0, 4.0, 3.0], more_is_better=True) == 0.5
    assert measuring._spread([2.0, 4.0, 3.0], more_is_better=False) == 1
    assert measuring._spread([0.0, 0.0], more_is_better=False) == 0
    assert measuring._spread([0.0, 1.0], more_is_better=False) == float("inf")


def test_the_best_time_counts_but_of_differences_the_middle_one() -> None:
    assert measuring._typical("busy", [3.0, 1.0, 2.0]) == 1
    assert measuring._typical("local_message of another", [3.0, 1.0, 2.0]) == 2


def test_the_table_shows_value_unit_and_spread() -> None:
    topology = Topology(workers=2, bandwidth=4e8, latency=0.00052, flops=8e9, local_bandwidth=2.5e9)
    lines = {
        line.split()[0]: line.split()[1:]
        for line in str(Calibration(topology, {"flops": 0.125})).splitlines()
    }
    assert lines["workers"] == ["2"]
    assert lines["bandwidth"] == ["400", "MB/s"]
    assert lines["latency"] == ["520", "µs"]
    assert lines["flops"] == ["8", "GMAC/s", "12%"]
    assert lines["local_bandwidth"] == ["2.5", "GB/s"]
    assert "local_latency" not in lines


# the command


def test_the_command_writes_a_file_that_plans_can_be_made_with(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "topology.json"
    line = f"-m dask_eindecomp calibrate --scheduler {client.scheduler.address} --repeats 1 --out"
    done = subprocess.run(
        [sys.executable, *line.split(), str(file)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("figure ")
    assert "memory_bandwidth" in done.stdout
    assert Topology.load(file).addresses == tuple(sorted(client.nthreads()))


def test_without_a_file_the_command_prints_json_and_the_table_beside_it(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = Topology(workers=3, flops=5e9)
    asked = []

    def instead(client: Client, repeats: int) -> Calibration:
        asked.append((client.scheduler.address, repeats))
        return Calibration(topology, {})

    monkeypatch.setattr(measuring, "calibration", instead)
    assert command.main(["calibrate", "--scheduler", client.scheduler.address, "--repeats", "5"]) == 0
    printed = capsys.readouterr()
    assert Topology.from_json(printed.out) == topology
    assert printed.err.startswith("figure ")
    assert asked == [(client.scheduler.address, 5)]


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "127.0.0.1"])
def test_a_scheduler_that_does_not_answer_is_named(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CONNECT", 1.0)
    assert command.main(["calibrate", "--scheduler", address]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"no scheduler answers at {address}: ")
    assert said.count("\n") == 1


def test_the_command_says_what_was_refused(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    address = client.scheduler.address
    assert command.main(["calibrate", "--scheduler", address, "--repeats", "0"]) == 2
    assert "0 repeats; expected at least 1" in capsys.readouterr().err
    assert command.main(["calibrate", "--scheduler", address, "--out", "no/such/file.json"]) == 2
    assert "cannot write no/such/file.json: there is no folder no/such" in capsys.readouterr().err
