"""What the scheduler's plugin keeps in place, and that nothing waits for a worker that is gone."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

pytest.importorskip("distributed")

from distributed import Client, wait

from dask_eindecomp import EinDecomp, explain, register
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
    ):
        yield mine, client


def filled(mine: Machines, client: Client, workers: int) -> None:
    """See to it that there are so many workers."""
    for _ in range(workers - len(client.scheduler_info(n_workers=-1)["workers"])):
        mine.add_worker()
    client.wait_for_workers(workers, timeout=60)


def inputs(client: Client, seed: int) -> tuple[np.ndarray, da.Array]:
    """A product of sums of matrices made on the workers, so that what is lost can be made again."""
    x = numbers(240, 240, seed=seed)
    a = da.from_array(x, chunks=60).map_blocks(slowly, dtype=x.dtype)
    with dask.config.set(scheduler=client.get, array_optimize=None):
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
        victim = draw.choice(sorted(client.scheduler_info(n_workers=-1)["workers"]))
        with dask.config.set(array_optimize=PLANNED):
            future = client.compute(expression(a))
            time.sleep(draw.uniform(0, 0.3))
            client.retire_workers([victim])
            result = future.result(GUARD)
        np.testing.assert_allclose(result, expression(x))
        del a, future
        assert nothing_left(client)


def test_a_paused_worker_holds_nothing_up(cluster: tuple[Machines, Client]) -> None:
    mine, client = cluster
    filled(mine, client, 3)
    x, a = inputs(client, seed=3)
    address = sorted(client.scheduler_info(n_workers=-1)["workers"])[0]

    def pause(dask_worker: Any, status: str) -> None:
        from distributed.core import Status

        dask_worker.status = Status[status]

    with dask.config.set(array_optimize=PLANNED):
        future = client.compute(expression(a))
        client.run(pause, status="paused", workers=[address])
        try:
            np.testing.assert_allclose(future.result(GUARD), expression(x))
            # planned while it is paused: for the others
            np.testing.assert_allclose(client.compute(expression(a) + 1).result(GUARD), expression(x) + 1)
        finally:
            client.run(pause, status="running", workers=[address])
    del a, future
    assert nothing_left(client)


def test_tiles_stay_where_they_are_planned_only_with_the_plugin(cluster: tuple[Machines, Client]) -> None:
    mine, client = cluster
    filled(mine, client, 3)
    with client.as_current(), dask.config.set(scheduler=client.get):
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
    if not had:
        client.unregister_scheduler_plugin("eindecomp")
        until = time.monotonic() + 10
        while client.run_on_scheduler(watching) and time.monotonic() < until:
            time.sleep(0.05)
        assert not client.run_on_scheduler(watching)


def watching(dask_scheduler: Any) -> bool:
    from dask_eindecomp.scheduler import PLUGINS

    return dask_scheduler.address in PLUGINS


def test_two_clients_compute_at_once_each_with_its_own_settings(cluster: tuple[Machines, Client]) -> None:
    mine, client = cluster
    filled(mine, client, 3)
    x, y = numbers(120, 120, seed=5), numbers(90, 90, seed=6)
    hooks = EinDecomp(force=True, objective="bytes"), EinDecomp(force=True, max_block_bytes=40_000)

    def run(values: np.ndarray, hook: EinDecomp, chunks: int) -> list[Any]:
        with Client(mine.address, set_as_default=False) as own:
            a = da.from_array(values, chunks=chunks)
            dsk, keys = dask.base.collections_to_expr([a @ a]), None
            del dsk, keys
            found = []
            for turn in range(5):
                with dask.config.set(array_optimize=hook, scheduler=own.get):
                    found.append(((a + turn) @ a).compute())
            return found

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


def test_an_expression_planned_and_unplanned_while_the_other_result_lives(
    cluster: tuple[Machines, Client], caplog: pytest.LogCaptureFixture
) -> None:
    mine, client = cluster
    filled(mine, client, 3)
    x, a = inputs(client, seed=8)
    results = []
    with dask.config.set(scheduler=client.get):
        for hook in (None, PLANNED, None, PLANNED):
            with dask.config.set(array_optimize=hook) if hook else dask.config.set({}):
                results.append((a @ a + len(results) // 2).persist())
                wait(results[-1])
        for number, result in enumerate(results):
            np.testing.assert_allclose(result.compute(), x @ x + number // 2)
    log = (mine.folder / "scheduler.log").read_text()
    assert "run_spec" not in log
    del a, results, result
    assert nothing_left(client)
