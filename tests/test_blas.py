"""BLAS's threads while tasks of one process run beside each other."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

from dask_eindecomp import EinDecomp, Topology
from dask_eindecomp.blas import CORES, Beside, _Cores

threadpoolctl = pytest.importorskip("threadpoolctl")


def threads(*blocks: Any) -> int:
    """Threads that BLAS would take now."""
    return max(one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas")


@pytest.fixture(autouse=True)
def four() -> Any:
    """BLAS with four threads, whatever this machine has, set by a thread that ends."""
    found = threadpoolctl.ThreadpoolController().select(user_api="blas")
    before = [one.num_threads for one in found.lib_controllers]

    def give(counts: list[int]) -> None:
        for library, count in zip(found.lib_controllers, counts):
            library.set_num_threads(count)

    def elsewhere(counts: list[int]) -> None:
        thread = threading.Thread(target=give, args=(counts,))
        thread.start()
        thread.join()

    elsewhere([4] * len(before))
    yield
    elsewhere(before)


@pytest.mark.parametrize(("tasks", "share"), [(2, 2), (3, 1), (4, 1), (9, 1)])
def test_a_tile_has_its_share_of_the_cores(tasks: int, share: int) -> None:
    assert Beside(threads, tasks)() == share
    assert threads() == 4


def test_the_share_is_kept_until_the_last_of_several_tasks_ends() -> None:
    both, first_is_gone = threading.Barrier(2), threading.Event()

    def first() -> int:
        both.wait(10)
        return threads()

    def second() -> int:
        both.wait(10)
        assert first_is_gone.wait(10)
        return threads()

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.submit(Beside(first, 4)), pool.submit(Beside(second, 4))
        assert one.result(10) == 1
        first_is_gone.set()
        assert other.result(10) == 1
    assert threads() == 4


def test_an_error_gives_the_cores_back() -> None:
    with pytest.raises(ZeroDivisionError):
        Beside(lambda: 1 // 0, 4)()
    assert threads() == 4
    assert CORES._running == 0


def test_what_a_user_has_limited_stays() -> None:
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        Beside(threads, 4)()
        assert threads() == 3


def test_without_threadpoolctl_nothing_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    cores = _Cores()
    with cores.among(4):
        assert cores._limits is None


def kernels(graph: Any) -> list[Any]:
    return [task.func for task in dict(graph).values() if hasattr(task, "func")]


def test_tiles_that_run_at_once_in_one_process_share_its_cores_and_others_do_not() -> None:
    x = np.random.default_rng(0).normal(size=(64, 64))
    a = da.from_array(x, chunks=16)
    shared: dict[str, list[int]] = {}
    for name, topology in {
        "threads": Topology.of_threads(4),
        "processes": Topology(workers=4),
        "one": Topology.of_threads(1),
    }.items():
        with dask.config.set(array_optimize=EinDecomp(topology=topology, force=True, objective="bytes")):
            (optimised,) = dask.optimize(a @ a)
            found = kernels(optimised.__dask_graph__())
            shared[name] = [one.tasks for one in found if isinstance(one, Beside)]
            np.testing.assert_allclose((a @ a).compute(scheduler="threads"), x @ x)
    assert shared["threads"] and set(shared["threads"]) == {4}
    assert not shared["processes"] and not shared["one"]
