"""What the scheduler's plugin keeps in place, and that nothing waits for a worker that is gone."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

pytest.importorskip("distributed")

from distributed import Client, get_task_stream, wait
from distributed.core import Status

from benchmarks.inputs import persisted, sent
from benchmarks.problems import GALLERY
from dask_eindecomp import EinDecomp, explain, register
from dask_eindecomp.calibration import ask_workers
from dask_eindecomp.scheduler import KeepsPlaced, Placing, dask_setup
from tests.cluster import Machines, machines

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore:Sending large graph")]
PLANNED = EinDecomp(force=True)
GUARD = 60
"""Seconds after which a computation counts as hanging."""


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.fixture(scope="module", params=["plugin", "no plugin"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Machines, Client]]:
    """A cluster that loses workers and gets others, with the plugin and without."""
    preload = "dask_eindecomp.scheduler" if request.param == "plugin" else ""
    with (
        machines(tmp_path_factory.mktemp("cluster"), preload=preload) as mine,
        Client(mine.address, set_as_default=False) as client,
        client.as_current(),
        dask.config.set(scheduler=client.get),
    ):
        yield mine, client


def filled(mine: Machines, client: Client, workers: int) -> None:
    """See to it that there are so many workers."""
    for _ in range(workers - len(ask_workers(client))):
        mine.add_worker()
    client.wait_for_workers(workers, timeout=60)


def inputs(client: Client, seed: int) -> tuple[np.ndarray, da.Array]:
    """A product of sums of matrices made on the workers, so that what is lost can be made again."""
    x = numbers(240, 240, seed=seed)
    a = da.from_array(x, chunks=60).map_blocks(slowly, dtype=x.dtype)
    a = a.persist()
    wait(a)
    return x, a


def slowly(block: np.ndarray) -> np.ndarray:
    time.sleep(0.002)
    return block


def expression(a: Any) -> Any:
    """Several products, sums and elementwise steps: enough levels to be interrupted anywhere."""
    b = a @ a / 100
    return (np.exp(-abs(b)) @ a.T).sum(axis=0) + (b @ a)[0]


def left_behind(dask_scheduler: Any) -> list[str]:
    """Tasks that a scheduler knows, tasks that wait for a worker, and what the plugin holds."""
    plugin = dask_scheduler.plugins.get("eindecomp")
    held = (
        [name for name, value in vars(plugin).items() if isinstance(value, (dict, set, list)) and value]
        if plugin
        else []
    )
    return [*map(str, dask_scheduler.tasks), *map(str, dask_scheduler.unrunnable), *held]


def nothing_left(client: Client) -> bool:
    """Whether everything is forgotten soon after it is no longer wanted."""
    until = time.monotonic() + 10
    while left := client.run_on_scheduler(left_behind):
        gc.collect()  # a graph may hold futures in a circle
        if time.monotonic() > until:
            raise AssertionError(f"still in the scheduler: {left}")
        time.sleep(0.05)
    return True


@pytest.mark.slow
def test_workers_killed_at_any_moment_change_no_result(cluster: tuple[Machines, Client]) -> None:
    mine, client = cluster
    draw = random.Random(1)
    for turn in range(20):
        filled(mine, client, 4)
        x, a = inputs(client, seed=turn)
        victim = draw.choice(
            [
                name
                for name, process in mine.processes.items()
                if name != "scheduler" and process.poll() is None
            ]
        )
        timer = threading.Timer(draw.uniform(0, 0.4), mine.kill, [victim])
        with dask.config.set(array_optimize=PLANNED):
            timer.start()
            result = client.compute(expression(a)).result(GUARD)
        timer.join()
        np.testing.assert_allclose(result, expression(x))
        del a
        assert nothing_left(client)


@pytest.mark.slow
def test_workers_retired_at_any_moment_change_no_result(cluster: tuple[Machines, Client]) -> None:
    mine, client = cluster
    draw = random.Random(2)
    for turn in range(10):
        filled(mine, client, 4)
        x, a = inputs(client, seed=turn)
        victim = draw.choice(sorted(ask_workers(client)))
        with dask.config.set(array_optimize=PLANNED):
            future = client.compute(expression(a))
            time.sleep(draw.uniform(0, 0.3))
            client.retire_workers([victim])
            result = future.result(GUARD)
        np.testing.assert_allclose(result, expression(x))
        del a, future
        assert nothing_left(client)


@pytest.mark.parametrize("preload", ["dask_eindecomp.scheduler", ""])
def test_a_paused_worker_holds_nothing_up(tmp_path: Path, preload: str) -> None:
    def pause(dask_worker: Any, status: str) -> None:
        dask_worker.status = Status[status]

    with machines(tmp_path, preload=preload) as mine, Client(mine.address, set_as_default=False) as client:
        filled(mine, client, 3)
        with client.as_current(), dask.config.set(scheduler=client.get):
            x, a = inputs(client, seed=3)
        address = sorted(ask_workers(client))[0]
        with dask.config.set(array_optimize=PLANNED):
            future = client.compute(expression(a))
            client.run(pause, status="paused", workers=[address])
            np.testing.assert_allclose(future.result(GUARD), expression(x))
            # planned while it is paused: for the others
            np.testing.assert_allclose(client.compute(expression(a) + 1).result(GUARD), expression(x) + 1)
        del a, future
        assert nothing_left(client)


def test_tiles_stay_where_they_are_planned_only_with_the_plugin(cluster: tuple[Machines, Client]) -> None:
    mine, client = cluster
    filled(mine, client, 3)
    x, a = inputs(client, seed=4)
    plan = explain(a @ a, hook=PLANNED)
    estimate = "bytes are an estimate, since Dask may move tiles" in str(plan)
    has_plugin = client.run_on_scheduler(lambda dask_scheduler: "eindecomp" in dask_scheduler.plugins)
    assert estimate == plan.loose == (not has_plugin)
    del a
    assert nothing_left(client)


def test_registering_twice_is_registering_once(cluster: tuple[Machines, Client]) -> None:
    _, client = cluster
    first = client.run_on_scheduler(lambda dask_scheduler: id(dask_scheduler.plugins.get("eindecomp")))
    had = client.run_on_scheduler(lambda dask_scheduler: "eindecomp" in dask_scheduler.plugins)
    register(client)
    second = client.run_on_scheduler(lambda dask_scheduler: id(dask_scheduler.plugins["eindecomp"]))
    register(client)
    assert client.run_on_scheduler(lambda dask_scheduler: id(dask_scheduler.plugins["eindecomp"])) == second
    assert (first == second) == had
    assert client.run_on_scheduler(policies) == ["KeepsPlaced"]
    if not had:
        client.unregister_scheduler_plugin("eindecomp")
        until = time.monotonic() + 10
        while client.run_on_scheduler(watching) and time.monotonic() < until:
            time.sleep(0.05)
        assert not client.run_on_scheduler(watching)
    assert client.run_on_scheduler(policies) == ["KeepsPlaced" if had else "ReduceReplicas"]


def policies(dask_scheduler: Any) -> list[str]:
    """By what the scheduler drops copies."""
    from distributed.active_memory_manager import ReduceReplicas

    every = dask_scheduler.extensions["amm"].policies  # there may be others, of workers that retire
    return [type(policy).__name__ for policy in every if isinstance(policy, ReduceReplicas)]


def watching(dask_scheduler: Any) -> bool:
    from dask_eindecomp.scheduler import PLUGINS

    return dask_scheduler.address in PLUGINS


def test_two_clients_compute_at_once_each_with_its_own_settings(cluster: tuple[Machines, Client]) -> None:
    mine, client = cluster
    filled(mine, client, 3)
    x, y = numbers(120, 120, seed=5), numbers(90, 90, seed=6)
    hooks = EinDecomp(force=True, objective="bytes"), EinDecomp(force=True, max_block_bytes=40_000)

    settings = threading.Lock()  # a process has one configuration, which is read when a graph is submitted

    def run(values: np.ndarray, hook: EinDecomp, chunks: int) -> list[Any]:
        with Client(mine.address, set_as_default=False) as own:
            a = da.from_array(values, chunks=chunks)
            futures = []
            for turn in range(5):
                with settings, dask.config.set(array_optimize=hook):
                    futures.append(own.compute((a + turn) @ a))
            return [future.result(GUARD) for future in futures]

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run, x, hooks[0], 40), pool.submit(run, y, hooks[1], 30)]
        results = [job.result(GUARD) for job in jobs]
    for values, found in zip((x, y), results):
        for turn, result in enumerate(found):
            np.testing.assert_allclose(result, (values + turn) @ values)


def test_an_asynchronous_client_works(cluster: tuple[Machines, Client]) -> None:
    mine, client = cluster
    filled(mine, client, 3)
    x = numbers(120, 120, seed=7)

    async def run() -> Any:
        async with Client(mine.address, asynchronous=True, set_as_default=False) as own:
            await register(own)
            a = da.from_array(x, chunks=40)
            with dask.config.set(array_optimize=PLANNED):
                return await own.compute(a @ a.T)

    had = client.run_on_scheduler(lambda dask_scheduler: "eindecomp" in dask_scheduler.plugins)
    try:
        np.testing.assert_allclose(asyncio.run(run()), x @ x.T)
    finally:
        if not had:
            client.unregister_scheduler_plugin("eindecomp")


def test_what_dask_has_made_by_its_own_graph_is_not_made_again_by_a_plan(
    cluster: tuple[Machines, Client],
) -> None:
    mine, client = cluster
    filled(mine, client, 3)
    x, a = inputs(client, seed=8)
    log = mine.folder / "scheduler.log"
    before = log.read_text().count("run_spec")
    plain = (a @ a + 1).persist()
    wait(plain)
    with dask.config.set(array_optimize=PLANNED):
        planned = (a @ a + 1).persist()
        wait(planned)
        again = (a @ a + 1).persist()
        wait(again)
    for result in (plain, planned, again):
        np.testing.assert_allclose(result.compute(), x @ x + 1)
    assert log.read_text().count("run_spec") == before
    del a, plain, planned, again, result
    assert nothing_left(client)


@pytest.mark.parametrize("preload", ["dask_eindecomp.scheduler", ""])
def test_what_a_plan_has_made_is_there_for_dasks_own_graph(tmp_path: Path, preload: str) -> None:
    with (
        machines(tmp_path, preload=preload) as mine,
        Client(mine.address, set_as_default=False) as client,
        client.as_current(),
        dask.config.set(scheduler=client.get),
    ):
        filled(mine, client, 3)
        x, a = inputs(client, seed=9)
        with dask.config.set(array_optimize=PLANNED):
            planned = (a @ a + 2).persist()
            wait(planned)
        plain = (a @ a + 2).persist()
        wait(plain)
        further = ((a @ a + 2).T + a).persist()
        for result in (planned, plain):
            np.testing.assert_allclose(result.compute(), x @ x + 2)
        np.testing.assert_allclose(further.compute(), (x @ x + 2).T + x)
        if preload:
            assert "run_spec" not in (mine.folder / "scheduler.log").read_text()
            # the same once more where a worker with some of it is gone
            mine.kill("worker-1")
            np.testing.assert_allclose(plain.compute(), x @ x + 2)
            del a, plain, planned, further, result
            assert nothing_left(client)


@pytest.mark.slow
def test_workers_that_come_and_go_between_computations_change_no_result(
    cluster: tuple[Machines, Client],
) -> None:
    mine, client = cluster
    filled(mine, client, 2)
    started: list[str] = []
    for turn in range(20):
        if turn == 5:
            started = [mine.add_worker() for _ in range(4)]  # not waited for: they come while others compute
        if turn == 12:
            client.retire_workers(names=started, close_workers=True)
        x, a = inputs(client, seed=20 + turn)
        with dask.config.set(array_optimize=PLANNED):
            result = client.compute(expression(a)).result(GUARD)
        np.testing.assert_allclose(result, expression(x))
    del a
    assert nothing_left(client)


# machines of their own


@pytest.fixture
def uneven(tmp_path: Path) -> Iterator[Client]:
    """Four workers with one, one, two and four threads and as many GiB."""
    with (
        machines(tmp_path, preload="dask_eindecomp.scheduler") as mine,
        Client(mine.address, set_as_default=False) as client,
        client.as_current(),
        dask.config.set(scheduler=client.get),
    ):
        for threads in (1, 1, 2, 4):
            mine.add_worker(threads, f"{threads}GiB")
        client.wait_for_workers(4, timeout=60)
        yield client


def test_workers_get_tiles_in_proportion_to_their_threads(uneven: Client) -> None:
    x = numbers(640, 640)
    a = da.from_array(x, chunks=160)
    with dask.config.set(array_optimize=EinDecomp(force=True, objective="bytes")):
        plan = explain(a @ a, hook=EinDecomp(force=True, objective="bytes"))
        with get_task_stream(uneven) as stream:
            np.testing.assert_allclose((a @ a).compute(), x @ x)
    assert plan.topology.slots == 8 and plan.topology.memory == 1 << 30
    threads = {address: one["nthreads"] for address, one in ask_workers(uneven).items()}
    ran = Counter(one["worker"] for one in stream.data if str(one["key"]).startswith("('join-"))
    assert sum(ran.values()) == plan.choices[-1].tiles
    for address, count in threads.items():
        assert abs(ran[address] / sum(ran.values()) - count / 8) <= 0.2 * count / 8


@pytest.mark.parametrize(
    "name", ["chain_square", "chain_skewed", "attention", "mttkrp", "ttm_chain", "ffnn_step", "gram", "abcd"]
)
def test_the_bytes_that_move_are_those_predicted(exact: Client, name: str) -> None:
    problem = GALLERY[name]
    arrays = persisted(exact, problem, problem.input_shapes("small"))
    results = problem.expression(**arrays)
    plan = explain(*results, hook=PLANNED)
    assert not plan.loose
    before = sent(exact)
    with dask.config.set(array_optimize=PLANNED):
        done = dask.persist(*results)
    wait(done)
    assert sent(exact) - before == plan.traffic.nbytes
    del arrays, results, done
    assert nothing_left(exact)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Three workers and the plugin."""
    with (
        machines(tmp_path_factory.mktemp("exact"), preload="dask_eindecomp.scheduler") as mine,
        Client(mine.address, set_as_default=False) as client,
        client.as_current(),
        dask.config.set(scheduler=client.get),
    ):
        for _ in range(3):
            mine.add_worker()
        client.wait_for_workers(3, timeout=60)
        yield client


LONGEST = 0.05
"""Seconds that the scheduler's event loop may wait while a graph is planned."""


def test_the_scheduler_answers_while_it_plans(exact: Client) -> None:
    values = numbers(32, 32) / 8
    x = da.from_array(values, chunks=16)
    y, expected = x, values
    for _ in range(1000):
        y, expected = da.maximum(y @ x, 0.5), np.maximum(expected @ values, 0.5)
    exact.run_on_scheduler(listen)
    with dask.config.set(array_optimize=EinDecomp(force=True, planning_timeout=60.0)):
        result = exact.compute(y).result(GUARD)
    np.testing.assert_allclose(result, expected)
    planned, beats = exact.run_on_scheduler(heard)
    assert len(planned) == 1 and planned[0][2] >= 1000  # a layer for each product and the maximum of it
    ((start, stop, _),) = planned
    # before and after the loop itself reads the graph that was sent, and takes up the tasks
    during = [
        min(later, stop) - max(earlier, start) - BEAT
        for earlier, later in pairwise(beats)
        if earlier < stop and later > start
    ]
    assert len(during) > 10
    assert max(during) <= LONGEST


BEAT = 0.005


def listen(dask_scheduler: Any) -> None:
    """Note the times at which the event loop answers, and when and how long graphs are planned."""
    import asyncio
    from time import perf_counter

    from dask_eindecomp import hook

    beats: list[float] = []
    planned: list[tuple[float, float, int]] = []
    plan = hook.EinDecomp._rewrite

    def timed(self: Any, *arguments: Any) -> Any:
        start = perf_counter()
        result = plan(self, *arguments)
        planned.append((start, perf_counter(), 0 if result is None else len(result.layers)))
        return result

    async def beat() -> None:
        while not dask_scheduler.eindecomp_heard[2]:
            beats.append(perf_counter())
            await asyncio.sleep(BEAT)

    hook.EinDecomp._rewrite = timed
    dask_scheduler.eindecomp_heard = [planned, beats, False, plan]
    dask_scheduler.loop.add_callback(beat)


def heard(dask_scheduler: Any) -> Any:
    """What was noted; nothing more is."""
    from dask_eindecomp import hook

    planned, beats, _, plan = dask_scheduler.eindecomp_heard
    dask_scheduler.eindecomp_heard[2] = True
    hook.EinDecomp._rewrite = plan
    return planned, beats


# the plugin by itself


class Pretended:
    """As much of a scheduler as the plugin looks at: one task for each state, all meant for worker "a"."""

    def __init__(self, status: Any) -> None:
        self.address = "pretended"
        self.tasks = {name: self.task(name) for name in ("waiting", "processing", "no-worker")}
        self.tasks["other"] = self.task("no-worker", annotations=None)
        self.unrunnable = {ts: 0.0 for ts in self.tasks.values() if ts.state == "no-worker"}
        self.worker = SimpleNamespace(address="a", status=status, processing=[self.tasks["processing"]])
        self.workers = {"a": self.worker}
        self.running = [SimpleNamespace(address="b")]
        self.stealable: list[Any] = []
        self.moved: dict[str, str] = {}
        self.closed: list[Any] = []
        self.extensions = {"stealing": SimpleNamespace(put_key_in_stealable=self.stealable.append)}
        self.plugins: dict[str, Any] = {}
        self.loop = SimpleNamespace(add_callback=self.closed.append)

    def task(self, state: str, annotations: Any = ("eindecomp-placed",)) -> Any:
        return Task(state, annotations)

    def transitions(self, recommendations: dict[str, str], stimulus_id: str) -> None:
        self.moved |= recommendations


class Task:
    """A task of a scheduler."""

    def __init__(self, state: str, annotations: Any) -> None:
        self.key = self.state = state
        self.annotations = annotations
        self.processing_on = None
        self.worker_restrictions: set[str] | None = {"a"}


def watched(status: Any) -> tuple[Placing, Pretended]:
    scheduler = Pretended(status)
    plugin = scheduler.plugins["eindecomp"] = Placing()
    plugin.scheduler = scheduler
    return plugin, scheduler


def test_tasks_of_a_worker_that_is_gone_are_free() -> None:
    plugin, scheduler = watched(Status.closed)
    plugin.remove_worker(scheduler, "a", stimulus_id="gone")
    assert [ts.worker_restrictions for ts in scheduler.tasks.values()] == [None, None, None, {"a"}]
    assert scheduler.moved == {"no-worker": "processing"}
    assert scheduler.stealable == [scheduler.tasks["processing"]]


def test_tasks_of_another_worker_are_not() -> None:
    plugin, scheduler = watched(Status.running)
    plugin.remove_worker(scheduler, "b", stimulus_id="gone")
    assert all(ts.worker_restrictions == {"a"} for ts in scheduler.tasks.values())


def test_tasks_that_wait_for_a_paused_worker_are_free_but_not_those_of_others() -> None:
    plugin, scheduler = watched(Status.paused)
    plugin.look()
    # what has to wait for other things may find the worker running again
    assert scheduler.tasks["waiting"].worker_restrictions == {"a"}
    assert scheduler.tasks["processing"].worker_restrictions is None
    assert scheduler.tasks["no-worker"].worker_restrictions is None
    assert scheduler.tasks["other"].worker_restrictions == {"a"}


def test_a_plugin_that_was_unregistered_stops_watching() -> None:
    plugin, scheduler = watched(Status.paused)
    del scheduler.plugins["eindecomp"]
    plugin.look()
    assert scheduler.closed == [plugin.close]
    assert scheduler.tasks["processing"].worker_restrictions == {"a"}


class Worker:
    """A worker of a scheduler."""

    def __init__(self, address: str) -> None:
        self.address = address


class Copied:
    """A block that three workers have and that a task each of some workers waits for."""

    def __init__(self, waiting: list[set[str] | None], annotations: Any) -> None:
        self.who_has = [Worker(one) for one in "abc"]
        self.waiters = []
        for restrictions in waiting:
            waiter = Task("waiting", annotations)
            waiter.worker_restrictions = restrictions
            self.waiters.append(waiter)


@pytest.mark.parametrize(
    ("waiting", "annotations", "dropped"),
    [
        (
            [{"a"}, {"b"}],
            ("eindecomp-placed",),
            [{"c"}],
        ),  # one copy is too many: that which nobody waits for goes
        ([{"a", "b"}, {"c"}], ("eindecomp-placed",), []),
        ([{"a"}, {"b"}], (), [None]),  # a restriction of the user's says nothing of copies
        ([None, None], ("eindecomp-placed",), [None]),  # set free
    ],
)
def test_copies_stay_where_a_placed_task_has_yet_to_read_them(
    waiting: list[set[str] | None], annotations: Any, dropped: list[Any]
) -> None:
    policy = KeepsPlaced()
    copied = Copied(waiting, annotations)
    policy.manager = SimpleNamespace(scheduler=SimpleNamespace(replicated_tasks=[copied]), pending={})
    found = list(policy.run())
    assert [one.op for one in found] == ["drop"] * len(dropped)
    assert [one.candidates and {worker.address for worker in one.candidates} for one in found] == dropped


def test_a_preload_adds_the_plugin() -> None:
    added: list[Any] = []
    dask_setup(SimpleNamespace(add_plugin=lambda plugin, idempotent: added.append((plugin, idempotent))))
    ((plugin, idempotent),) = added
    assert isinstance(plugin, Placing) and idempotent
