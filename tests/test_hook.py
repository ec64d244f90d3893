"""The hook as a value, and what it does in this process: whatever runs gives what plain Dask gives."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.array.optimization import optimize as dask_optimize
from dask.base import tokenize
from dask.core import flatten
from dask.system import CPU_COUNT

import dask_eindecomp
from dask_eindecomp import EinDecomp, QueryPlanningError, Topology, eindecomp, explain, hook, optimize
from dask_eindecomp.calibration import ask_workers
from dask_eindecomp.lift import ShapeError
from dask_eindecomp.machines import find_topology
from dask_eindecomp.topology import TopologyError

ROOT = Path(__file__).parents[1]
FAST = Topology(workers=3, bandwidth=1e12, latency=0, flops=1e5, task_overhead=0)
"""Machines so slow, on a network so fast, that even a small problem is shared."""
PLANNED = EinDecomp(force=True, topology=FAST)


def threads_here(count: int) -> Topology:
    """So many threads of this machine and all its memory."""
    return replace(
        Topology.of_threads(count), memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def increment(block: Any) -> Any:
    return block + 1


def matrix(seed: int = 0, extent: int = 12, chunks: int = 4) -> tuple[np.ndarray, da.Array]:
    x = numbers(extent, extent, seed=seed)
    return x, da.from_array(x, chunks=chunks)


def keys_of(array: da.Array) -> list[Any]:
    return [array.__dask_keys__()]


def all_keys(graph: Any) -> set[Any]:
    """Keys of all tasks of a graph, layered or not."""
    return set(dict(graph))


def joins(graph: Any) -> set[Any]:
    """Keys of join tasks."""
    names = {key: key[0] if isinstance(key, tuple) else key for key in all_keys(graph)}
    return {key for key, name in names.items() if name.startswith("join-")}


@pytest.fixture
def applied() -> Iterator[None]:
    """Every plan is applied."""
    with dask.config.set(array_optimize=PLANNED, scheduler="synchronous"):
        yield


# a value


def test_the_default_hook_is_one_with_default_settings() -> None:
    assert eindecomp == EinDecomp()
    assert isinstance(eindecomp, EinDecomp)


def test_a_hook_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        eindecomp.force = True  # type: ignore[misc]


def test_equal_hooks_are_equal_and_hash_alike() -> None:
    one, other = (EinDecomp(force=True, topology=Topology(workers=2)) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert len({one, other, EinDecomp(), EinDecomp(objective="bytes")}) == 3


def test_a_hook_survives_pickling() -> None:
    one = EinDecomp(
        topology=FAST, objective="bytes", force=True, memory_limit=1 << 20, max_block_bytes=1 << 18, max_tasks=99,
        planning_timeout=1.0, margin=0.5, strict=True,
    )  # fmt: skip
    assert pickle.loads(pickle.dumps(one)) == one


def test_settings_are_resolved_when_the_hook_is_pickled() -> None:
    names = {"margin": 0.25, "strict": False, "max_tasks": 7, "max_block_bytes": 8, "planning_timeout": 9.0}
    with dask.config.set({f"eindecomp.{name.replace('_', '-')}": value for name, value in names.items()}):
        sent = pickle.dumps(EinDecomp())
    assert pickle.loads(sent) == EinDecomp(**names)


def test_arrays_of_equal_hooks_share_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    rewrite = EinDecomp._rewrite
    monkeypatch.setattr(EinDecomp, "_rewrite", lambda *args: calls.append(args) or rewrite(*args))
    x, a = matrix()
    with dask.config.set(array_optimize=PLANNED):
        first, second = dask.compute(a @ a, a @ a.T, scheduler="synchronous")
    np.testing.assert_allclose(first, x @ x)
    np.testing.assert_allclose(second, x @ x.T)
    assert len(calls) == 1


# errors at the door


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown objective 'fast'; expected seconds, bytes or paper"):
        EinDecomp(objective="fast")


def test_a_topology_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="topology is 4; expected a Topology or None"):
        EinDecomp(topology=4)  # type: ignore[arg-type]


def test_a_topology_without_workers_is_refused() -> None:
    with pytest.raises(TopologyError, match="topology has 0 workers; expected at least 1"):
        Topology(workers=0)


def test_query_planning_is_refused_and_what_to_set_is_said() -> None:
    x = da.ones((4, 4), chunks=2)
    with dask.config.set({"array.query-planning": True}):
        for call in (explain, optimize):
            with pytest.raises(
                QueryPlanningError, match=r"array\.query-planning is True.*expected False or None"
            ):
                call(x @ x)


def test_query_planning_is_warned_of_at_import() -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "import dask_eindecomp"],
        env=os.environ | {"DASK_ARRAY__QUERY_PLANNING": "True", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "dask.config.set({'array.query-planning': False})" in done.stderr


@pytest.mark.parametrize("strict", [False, True])
def test_extents_that_numpy_refuses_are_always_refused(strict: bool) -> None:
    product = da.ones((6, 6), chunks=3) @ da.ones((1, 6), chunks=3)
    with (
        dask.config.set(array_optimize=EinDecomp(strict=strict)),
        pytest.raises(ShapeError, match="contracted axis is 6 long in the left operand but 1 in the right"),
    ):
        product.compute(scheduler="synchronous")


@pytest.mark.parametrize("call", [explain, optimize])
def test_what_is_no_array_is_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="ndarray"):
        call(np.ones(3))


# ways to run something


def test_while_a_graph_is_planned_other_threads_wait_less(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = sys.getswitchinterval(), gc.get_threshold()
    seen = []

    def refused(*arguments: Any) -> None:
        with hook.OTHERS.come_first():  # as another thread would
            pass
        seen.append((sys.getswitchinterval(), gc.get_threshold()))
        raise ValueError("no plan")

    monkeypatch.setattr(EinDecomp, "_rewrite", refused)
    x = da.ones((4, 4), chunks=2)
    with pytest.raises(ValueError, match="no plan"), dask.config.set(array_optimize=PLANNED):
        (x @ x).compute()
    ((switch, (_, _, full)),) = seen
    assert switch < usual[0] and full > 1 << 20
    assert (sys.getswitchinterval(), gc.get_threshold()) == usual


@pytest.mark.parametrize("scheduler", ["synchronous", "threads", "processes"])
def test_every_scheduler_gives_the_same(scheduler: str) -> None:
    x, a = matrix()
    with dask.config.set(array_optimize=EinDecomp(force=True), scheduler=scheduler, num_workers=2):
        np.testing.assert_allclose((a @ a).compute(), x @ x)
        np.testing.assert_allclose(da.einsum("ij,jk,lk->li", a, a + 1, a).compute(), (x @ (x + 1) @ x.T).T)


@pytest.mark.usefixtures("applied")
def test_compute_runs_the_plan() -> None:
    x, a = matrix()
    assert joins(PLANNED((a @ a).dask, keys_of(a @ a)))
    np.testing.assert_allclose((a @ a).compute(), x @ x)
    np.testing.assert_allclose(np.asarray(a @ a), x @ x)
    np.testing.assert_allclose(float((a @ a).sum()), (x @ x).sum())


@pytest.mark.usefixtures("applied")
def test_persist_keeps_keys_chunks_and_dtype() -> None:
    x, a = matrix()
    z = da.einsum("ij,kj->ik", a.astype("f4"), a.astype("f4"))
    kept = z.persist()
    assert (kept.name, kept.chunks, kept.dtype) == (z.name, z.chunks, z.dtype)
    assert set(kept.dask) == set(flatten(z.__dask_keys__()))
    for index in np.ndindex(*z.numblocks):
        block = kept.dask[(z.name, *index)]
        assert block.shape == tuple(chunks[i] for chunks, i in zip(z.chunks, index))
        assert block.dtype == np.float32
    np.testing.assert_allclose(kept, x @ x.T, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("applied")
def test_two_arrays_are_computed_together() -> None:
    x, a = matrix()
    b = a @ a
    first, (second, third) = dask.compute(b, [b.sum(axis=1), 7])
    np.testing.assert_allclose(first, x @ x)
    np.testing.assert_allclose(second, (x @ x).sum(axis=1))
    assert third == 7


@pytest.mark.usefixtures("applied")
def test_dask_optimize_keeps_names_and_chunks() -> None:
    x, a = matrix()
    z, total = a @ a, (a @ a).sum()
    one, other = dask.optimize(z, total)
    assert joins(one.dask)
    assert (one.name, one.chunks, one.dtype) == (z.name, z.chunks, z.dtype)
    np.testing.assert_allclose(one.compute(), x @ x)
    np.testing.assert_allclose(other.compute(), (x @ x).sum())


@pytest.mark.usefixtures("applied")
def test_to_delayed_gives_the_blocks() -> None:
    x, a = matrix()
    np.testing.assert_allclose((a @ a).to_delayed()[1, 2].compute(), (x @ x)[4:8, 8:])


@pytest.mark.usefixtures("applied")
def test_a_delayed_function_reads_a_planned_array() -> None:
    x, a = matrix()
    np.testing.assert_allclose(dask.delayed(np.trace)(a @ a).compute(), np.trace(x @ x))


@pytest.mark.usefixtures("applied")
def test_store_writes_what_numpy_gives() -> None:
    x, a = matrix()
    target, other = np.zeros((12, 12)), np.zeros((12, 12))
    da.store([a @ a, a @ a + 1], [target, other], lock=False)
    np.testing.assert_allclose(target, x @ x)
    np.testing.assert_allclose(other, x @ x + 1)


@pytest.mark.usefixtures("applied")
def test_stored_arrays_can_be_read_again() -> None:
    x, a = matrix()
    target = np.zeros((12, 12))
    stored = da.store(a @ a, target, return_stored=True, lock=False)
    (stored,) = stored if isinstance(stored, tuple) else (stored,)
    np.testing.assert_allclose(stored.compute(), x @ x)


@pytest.mark.usefixtures("applied")
def test_to_zarr_writes_what_numpy_gives(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    x, a = matrix()
    (a @ a).to_zarr(str(tmp_path / "product.zarr"))
    written = zarr.open(str(tmp_path / "product.zarr"), mode="r")
    np.testing.assert_allclose(written[:], x @ x)
    assert written.chunks == (4, 4)


@pytest.mark.usefixtures("applied")
def test_xarray_objects_are_planned() -> None:
    xarray = pytest.importorskip("xarray")
    x, a = matrix()
    left = xarray.DataArray(a, dims=("i", "j"), coords={"i": range(12)}, name="left")
    product = xarray.dot(left, xarray.DataArray(a, dims=("j", "k")), dim="j")
    assert explain(product).choices
    for result in (product.compute(), product.persist(), product.load()):
        np.testing.assert_allclose(result.transpose("i", "k"), x @ x)
        assert list(result.coords) == ["i"]


def test_what_is_not_optimized_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EinDecomp, "_rewrite", lambda *_: pytest.fail("was planned"))
    x, a = matrix()
    with dask.config.set(array_optimize=PLANNED):
        np.testing.assert_allclose((a @ a).compute(scheduler="synchronous", optimize_graph=False), x @ x)


def test_four_threads_plan_and_run_at_once() -> None:
    inputs = [matrix(seed=seed) for seed in range(12)]

    def run(number: int) -> None:
        x, a = inputs[number]
        np.testing.assert_allclose((a @ a + number).compute(scheduler="synchronous"), x @ x + number)
        assert explain(a @ a, hook=PLANNED).verdict == "applied: forced"

    with dask.config.set(array_optimize=PLANNED), ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(12)))


# nothing to lift

NOTHING: dict[str, Callable[[], da.Array]] = {
    "map_blocks": lambda: da.ones((8, 8), chunks=2).map_blocks(increment).map_blocks(increment),
    "overlap": lambda: da.overlap.overlap(da.ones((8, 8), chunks=4), depth=1, boundary="reflect"),
    "map_overlap": lambda: da.ones((8, 8), chunks=4).map_overlap(increment, depth=1, boundary=0),
    "cumsum": lambda: da.cumsum(da.ones((8, 8), chunks=4), axis=0),
    "fft": lambda: da.fft.fft(da.ones((8, 8), chunks=(2, 8))),
    "elementwise": lambda: da.ones((8, 8), chunks=4) * 2 + 1,
    "sum": lambda: da.ones((8, 8), chunks=4).sum(axis=0),
    "rechunk": lambda: da.arange(8, chunks=4).rechunk(3),
    "indexing": lambda: da.arange(8, chunks=4)[[1, 5, 2]],
}


@pytest.mark.parametrize("build", NOTHING.values(), ids=NOTHING.keys())
def test_a_graph_with_nothing_to_plan_is_what_dask_makes_of_it(build: Callable[[], da.Array]) -> None:
    array = build()
    mine, theirs = (dict(optimizer(array.dask, keys_of(array))) for optimizer in (EinDecomp(), dask_optimize))
    assert mine.keys() == theirs.keys()
    assert {key: tokenize(task) for key, task in mine.items()} == {
        key: tokenize(task) for key, task in theirs.items()
    }


def test_a_graph_that_is_no_high_level_graph_goes_to_dask() -> None:
    _, a = matrix()
    graph = dict((a @ a).dask)
    mine, theirs = (dict(one(graph, keys_of(a @ a))) for one in (PLANNED, dask_optimize))
    assert mine.keys() == theirs.keys()


def test_a_plan_that_is_not_cheaper_is_left_to_dask() -> None:
    _, a = matrix()
    z = a @ a
    mine = dict(EinDecomp(margin=0.9999)(z.dask, keys_of(z)))
    assert mine.keys() == dict(dask_optimize(z.dask, keys_of(z))).keys()
    assert explain(z, hook=EinDecomp(margin=0.9999)).verdict == (
        "left to Dask: not 100% cheaper than the graph as it came"
    )


@pytest.mark.parametrize(
    ("bandwidth", "verdict"),
    [
        (1e9, "left to Dask: ships more than the graph as it came, and not 20% cheaper than it"),
        (2e9, "applied: about 1.4 times as fast as the graph as it came"),
    ],
)
def test_a_plan_that_ships_more_than_the_graph_as_it_came_has_to_be_clearly_cheaper(
    bandwidth: float, verdict: str
) -> None:
    a = da.from_array(np.ones((256, 256)), chunks=-1).persist(scheduler="synchronous")
    quick = {"latency": 0.0, "task_overhead": 0.0, "turn": 0.0, "small_tile": 0, "memory_bandwidth": 1e15}
    plan = explain(a @ a.T, topology=Topology(workers=2, bandwidth=bandwidth, **quick))
    assert plan.baseline is not None and plan.baseline_seconds is not None
    assert plan.traffic.nbytes > plan.baseline.nbytes == 0
    assert plan.seconds < 0.95 * plan.baseline_seconds
    assert plan.verdict == verdict


def test_a_graph_without_contraction_is_said_to_be_left_alone() -> None:
    x = da.ones((8, 8), chunks=4)
    assert explain(x + 1).verdict == "left to Dask: no expression joins and aggregates"
    assert explain(x.map_blocks(increment)).verdict.startswith("nothing to plan")


# planned already


@pytest.mark.parametrize("again", [EinDecomp(), PLANNED], ids=["default", "forced"])
def test_planning_a_planned_graph_changes_nothing(again: EinDecomp) -> None:
    x, a = matrix()
    z = (a + 1) @ a
    with dask.config.set(array_optimize=PLANNED, scheduler="synchronous"):
        (planned,) = dask.optimize(z)
    with dask.config.set(array_optimize=again, scheduler="synchronous"):
        (twice,) = dask.optimize(planned)
        np.testing.assert_allclose(planned.compute(), (x + 1) @ x)
        np.testing.assert_allclose(twice.compute(), (x + 1) @ x)
    assert joins(planned.dask)
    assert joins(twice.dask) <= joins(planned.dask)
    assert twice.name == planned.name and twice.chunks == planned.chunks


def test_the_graph_the_hook_gives_is_not_planned_again() -> None:
    _, a = matrix()
    z = a @ a
    once = PLANNED(z.dask, keys_of(z))
    twice = PLANNED(once, keys_of(z))
    assert joins(once)
    assert joins(twice) <= joins(once)


@pytest.mark.usefixtures("applied")
def test_persisted_inputs_are_read_as_they_are() -> None:
    x, a = matrix()
    kept = (a @ a).persist()
    (planned,) = dask.optimize(kept)
    assert not joins(planned.dask)
    assert all_keys(planned.dask) == all_keys(kept.dask)
    np.testing.assert_allclose((kept @ kept).compute(), x @ x @ x @ x)


def test_the_same_graph_is_planned_into_the_same_keys() -> None:
    _, a = matrix()
    first, second = (PLANNED((a @ a).dask, keys_of(a @ a)) for _ in range(2))
    assert all_keys(first) == all_keys(second)


def test_another_plan_shares_no_internal_key() -> None:
    _, a = matrix()
    z = a @ a
    three = PLANNED(z.dask, keys_of(z))
    two = replace(PLANNED, topology=replace(FAST, workers=2))(z.dask, keys_of(z))
    assert joins(three) and joins(two)
    assert not joins(three) & joins(two)


# planning fails


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> str:
    """Plans fail, for this reason."""

    def fail(*args: Any, **keywords: Any) -> Any:
        raise LookupError("no plan today")

    monkeypatch.setattr(dask_eindecomp.hook, "decompose", fail)
    monkeypatch.setattr(hook, "_logged", set())
    return "LookupError: no plan today"


def test_a_failed_plan_is_logged_once_and_the_graph_runs_as_it_came(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    x, a = matrix()
    with (
        dask.config.set({"eindecomp.strict": False, "array_optimize": PLANNED}),
        caplog.at_level(logging.WARNING, logger="dask_eindecomp"),
    ):
        for _ in range(3):
            np.testing.assert_allclose((a @ a).compute(scheduler="synchronous"), x @ x)
    (record,) = [record for record in caplog.records if record.name == "dask_eindecomp"]
    assert record.getMessage() == f"planning failed, the graph runs as it came: {broken}"
    assert record.exc_info is not None and isinstance(record.exc_info[1], LookupError)


def test_after_a_failed_plan_the_graph_is_what_dask_makes_of_it(broken: str) -> None:
    _, a = matrix()
    z = a @ a
    mine = dict(replace(PLANNED, strict=False)(z.dask, keys_of(z)))
    assert mine.keys() == dict(dask_optimize(z.dask, keys_of(z))).keys()


@pytest.mark.parametrize("given", [True, None])
def test_a_strict_hook_raises_instead(broken: str, given: bool | None) -> None:
    _, a = matrix()
    with (
        dask.config.set(
            {"eindecomp.strict": given is None, "array_optimize": replace(PLANNED, strict=given)}
        ),
        pytest.raises(LookupError, match="no plan today"),
    ):
        (a @ a).compute(scheduler="synchronous")


# layers outside the plan


def test_annotations_outside_the_plan_survive() -> None:
    x, a = matrix()
    with dask.annotate(priority=7):
        before = a.map_blocks(increment, dtype=a.dtype)
    product = before @ before
    with dask.annotate(resources={"GPU": 1}):
        after = product.map_blocks(increment, dtype=a.dtype)
    graph = PLANNED(after.dask, keys_of(after))
    assert joins(graph)
    annotated = {
        name: layer.annotations for name, layer in graph.layers.items() if getattr(layer, "annotations", None)
    }
    assert {"priority": 7} in annotated.values()
    assert {"resources": {"GPU": 1}} in annotated.values()
    with dask.config.set(array_optimize=PLANNED):
        np.testing.assert_allclose(after.compute(scheduler="synchronous"), (x + 1) @ (x + 1) + 1)


@pytest.mark.parametrize("hook_", [EinDecomp(topology=FAST), PLANNED])
def test_annotations_survive_on_a_graph_that_is_left_to_dask(hook_: EinDecomp) -> None:
    x, a = matrix()
    with dask.annotate(resources={"GPU": 1}, retries=2):
        product = a @ a
    with dask.annotate(priority=3):
        more = product + 1
    graph = hook_(more.dask, keys_of(more))
    marks = {key[0]: layer.annotations for layer in graph.layers.values() for key in layer}
    assert (marks.pop(a.name), marks.pop(more.name)) == (None, {"priority": 3})
    assert len(marks) == 2  # the layers of a product, of which Dask fuses two
    assert all(one == {"resources": {"GPU": 1}, "retries": 2} for one in marks.values())
    with dask.config.set(array_optimize=hook_):
        np.testing.assert_allclose(more.compute(scheduler="synchronous"), x @ x + 1)


def test_each_block_that_both_sides_read_is_computed_once() -> None:
    _, a = matrix()
    z = (a + 1) @ (a + 1)
    graph = PLANNED(z.dask, keys_of(z))
    assert len(all_keys(graph)) < len(dict(dask_optimize(z.dask, keys_of(z))))


def test_layers_before_between_and_after_keep_their_results() -> None:
    x, a = matrix()
    sums = da.cumsum(a, axis=0)
    middle = (sums @ a).map_blocks(increment, dtype=a.dtype)
    last = da.fft.fft((middle @ sums).rechunk((4, 12)))
    with dask.config.set(array_optimize=PLANNED):
        found = last.compute(scheduler="synchronous")
    total = np.cumsum(x, axis=0)
    np.testing.assert_allclose(found, np.fft.fft((total @ x + 1) @ total))


# the machines


@pytest.mark.parametrize("name", ["sync", "synchronous", "single-threaded"])
def test_without_threads_there_is_one_worker_of_one_thread(name: str) -> None:
    with dask.config.set(scheduler=name):
        assert find_topology() == threads_here(1)


def test_threads_are_as_many_as_dask_would_start() -> None:
    with dask.config.set(scheduler="threads", num_workers=3):
        assert find_topology() == threads_here(3)
    with dask.config.set(scheduler="threads", num_workers=None):
        assert find_topology() == threads_here(CPU_COUNT)


@pytest.mark.parametrize("name", ["processes", "multiprocessing"])
def test_processes_are_workers(name: str) -> None:
    with dask.config.set(scheduler=name, num_workers=5):
        assert find_topology() == Topology(workers=5, memory=threads_here(1).memory // 5)


def test_without_a_word_threads_run_arrays() -> None:
    with dask.config.set(scheduler=None, num_workers=2):
        assert find_topology() == threads_here(2)


def test_the_hooks_topology_comes_first() -> None:
    x = da.ones((8, 8), chunks=4)
    assert explain(x @ x, hook=PLANNED).topology == FAST
    assert explain(x @ x, topology=Topology(workers=7)).topology.workers == 7


@pytest.fixture(scope="module")
def local() -> Iterator[Any]:
    """A cluster in this process: three workers of two threads."""
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=3, threads_per_worker=2, processes=False, dashboard_address=":0", memory_limit="1 GiB"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def test_a_client_brings_its_workers(local: Any) -> None:
    with local.as_current():
        topology = find_topology()
    assert (topology.workers, topology.threads, topology.memory) == (3, 2, 1 << 30)
    assert topology.addresses == tuple(sorted(ask_workers(local)))


def test_explain_plans_what_a_cluster_would_run(local: Any) -> None:
    x = numbers(48, 48)
    with local.as_current():
        a = da.from_array(x, chunks=12)
        plan = explain(a @ a, hook=EinDecomp(force=True))
        with dask.config.set(array_optimize=EinDecomp(force=True)):
            np.testing.assert_allclose((a @ a).compute(), x @ x)
    assert plan.topology.workers == 3
    assert plan.topology.slots == 6


def test_a_scheduler_in_the_configuration_comes_before_the_client(local: Any) -> None:
    with local.as_current(), dask.config.set(scheduler="threads", num_workers=2):
        assert find_topology() == threads_here(2)


def test_a_cluster_of_this_process_is_found_from_its_scheduler(
    local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    original = hook.find_topology
    monkeypatch.setattr(hook, "find_topology", lambda *args: found.append(original(*args)) or found[-1])
    x, a = matrix()
    with local.as_current(), dask.config.set(array_optimize=EinDecomp(force=True)):
        np.testing.assert_allclose((a @ a).compute(), x @ x)
    (topology,) = found
    assert (topology.workers, topology.threads) == (3, 2)
    assert topology.addresses == tuple(sorted(ask_workers(local)))


def test_of_two_schedulers_in_one_process_each_plans_with_its_own_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from distributed import Client, LocalCluster

    found = []
    original = hook.find_topology
    monkeypatch.setattr(hook, "find_topology", lambda *args: found.append(original(*args)) or found[-1])
    settings = {"threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    x, a = matrix()
    with LocalCluster(n_workers=2, **settings) as two, LocalCluster(n_workers=3, **settings) as three:
        for cluster in (two, three, two):
            with Client(cluster), dask.config.set(array_optimize=EinDecomp(force=True)):
                np.testing.assert_allclose((a @ a).compute(), x @ x)
    assert [topology.workers for topology in found] == [2, 3, 2]


# limits


def test_a_limit_that_cannot_be_kept_leaves_the_graph_to_dask_and_says_what_would_do() -> None:
    x, a = matrix()
    hook_ = EinDecomp(force=True, topology=FAST, memory_limit=1)
    plan = explain(a @ a, hook=hook_)
    assert "(ij,jk->ik) needs" in plan.refused and "a memory limit of" in plan.refused
    assert plan.verdict == f"left to Dask: {plan.refused}"
    assert "no plan, the graph as it came" in str(plan)
    assert plan.refused in plan.to_json()
    with dask.config.set(array_optimize=hook_, scheduler="synchronous"):
        (graph,) = dask.optimize(a @ a)
        np.testing.assert_allclose((a @ a).compute(), x @ x)
    assert not joins(graph.__dask_graph__())


@pytest.mark.parametrize("way", ["given", "configured"])
def test_no_planned_block_is_larger_than_the_setting_allows(way: str) -> None:
    x, a = matrix(extent=64, chunks=64)
    settings_ = {"max_block_bytes": 8 * 16 * 16} if way == "given" else {}
    with dask.config.set({"eindecomp.max-block-bytes": 8 * 16 * 16} if way == "configured" else {}):
        plan = explain(a @ a, hook=EinDecomp(force=True, topology=FAST, **settings_))
    (choice,) = plan.choices
    rows, columns = choice.cuts.grid(("i", "k"))
    assert max(rows) * max(columns) * 8 <= 8 * 16 * 16
    free = explain(a @ a, hook=EinDecomp(force=True, topology=FAST)).choices[0]
    assert free.tiles < choice.tiles


@pytest.mark.parametrize("way", ["given", "configured"])
def test_no_plan_has_more_tasks_than_the_setting_allows(way: str) -> None:
    x, a = matrix(extent=64, chunks=64)
    free = explain(a @ a @ a, hook=EinDecomp(force=True, topology=FAST))
    assert free.traffic.tasks > 5
    settings_ = {"max_tasks": 5} if way == "given" else {}
    with dask.config.set({"eindecomp.max-tasks": 5} if way == "configured" else {}):
        hook_ = EinDecomp(force=True, topology=FAST, **settings_)
        plan = explain(a @ a @ a, hook=hook_)
        with dask.config.set(array_optimize=hook_, scheduler="synchronous"):
            np.testing.assert_allclose((a @ a @ a).compute(), x @ x @ x)
    assert not plan.refused and plan.traffic.tasks <= 5


@pytest.mark.parametrize(
    ("chunks", "limit", "allowed", "named"),
    [
        (64, "memory_limit", 50_000, "memory_limit"),
        (64, "max_block_bytes", 1 << 14, "max-block-bytes"),
        (16, "max_tasks", 20, "max-tasks"),
    ],
)
def test_a_limit_that_the_graph_as_it_came_breaks_is_kept_though_that_saves_nothing(
    chunks: int, limit: str, allowed: int, named: str
) -> None:
    x, a = matrix(extent=64, chunks=chunks)
    product = (a @ a).sum(axis=0)
    quick = EinDecomp(topology=Topology(workers=4, task_overhead=0.0, small_tile=0), margin=0.97)
    assert "not 97% cheaper" in explain(product, hook=quick).verdict
    limited = replace(quick, **{limit: allowed})
    verdict = explain(product, hook=limited).verdict
    assert re.fullmatch(rf"applied: as it came, [\d,]+ are beyond the {named} of {allowed:,}", verdict), (
        verdict
    )
    with dask.config.set(array_optimize=limited, scheduler="synchronous"):
        np.testing.assert_allclose(product.compute(), (x @ x).sum(axis=0))


def test_a_plan_that_takes_too_long_leaves_the_graph_to_dask() -> None:
    x, a = matrix()
    hook_ = EinDecomp(force=True, topology=FAST, planning_timeout=1e-9)
    plan = explain(a @ a, hook=hook_)
    assert plan.verdict == (
        "left to Dask: planning took more than 1e-09 s; expected less, or a larger planning-timeout"
    )
    with dask.config.set(array_optimize=hook_, scheduler="synchronous"):
        np.testing.assert_allclose((a @ a).compute(), x @ x)
    # once there is time, there is a plan
    assert not explain(a @ a, hook=replace(hook_, planning_timeout=60.0)).refused


def test_the_setting_for_planning_time_is_two_seconds() -> None:
    from dask_eindecomp.config import DEFAULTS

    assert DEFAULTS["eindecomp"]["planning-timeout"] == 2.0


# measured machines


def test_figures_of_a_file_are_planned_with_and_the_workers_are_those_found(tmp_path: Path) -> None:
    file = tmp_path / "topology.json"
    measured = Topology(workers=99, flops=123.0, task_overhead=0.25, contention=1.5)
    file.write_text(measured.to_json())
    a = matrix()[1]
    with dask.config.set({"eindecomp.topology": str(file), "scheduler": "synchronous"}):
        topology = explain(a @ a).topology
        sent = pickle.loads(pickle.dumps(EinDecomp()))
    assert (topology.workers, topology.threads) == (1, 1)
    assert (topology.flops, topology.task_overhead, topology.contention) == (123.0, 0.25, 1.5)
    # it travels to the scheduler, where there is no such file
    file.unlink()
    with dask.config.set(scheduler="synchronous"):
        assert explain(a @ a, hook=sent).topology.flops == 123.0


def test_a_file_that_is_no_topology_is_an_error_that_names_it(tmp_path: Path) -> None:
    a = matrix()[1]
    missing = dask.config.set({"eindecomp.topology": str(tmp_path / "none.json")})
    with missing, pytest.raises(TopologyError, match=r"cannot read a topology from .*none\.json"):
        explain(a @ a)


def test_a_topology_of_the_user_comes_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "topology.json"
    file.write_text(Topology(flops=123.0).to_json())
    a = matrix()[1]
    with dask.config.set({"eindecomp.topology": str(file)}):
        assert explain(a @ a, topology=FAST).topology == FAST


# unknown shapes


def test_of_a_graph_with_unknown_chunks_the_part_that_is_known_is_planned() -> None:
    x, a = matrix()
    known = a @ a
    unknown = known[known.sum(axis=1) > 0]
    assert np.isnan(unknown.shape[0])
    total = unknown.T @ unknown
    hook_ = EinDecomp(force=True, topology=FAST)
    plan = explain(total, hook=hook_)
    assert [choice.einsum for choice in plan.choices][:1] == ["ij,jk->ik"]
    assert any("nan" in reason or "unknown" in reason for _, reason in plan.left_alone)
    with dask.config.set(array_optimize=hook_, scheduler="synchronous"):
        result = total.compute()
    y = x @ x
    y = y[y.sum(axis=1) > 0]
    np.testing.assert_allclose(result, y.T @ y)


# products ordered anew


def test_a_chain_that_ends_in_a_vector_makes_no_product_of_matrices_if_it_may_be_ordered_anew() -> None:
    size = 4000
    a, b = (da.ones((size, size), chunks=1000) for _ in range(2))
    lazy = (a @ b) @ da.ones(size, chunks=1000)
    topology = Topology(workers=4)
    assert explain(lazy, topology=topology).traffic.flops > size**3
    plan = explain(lazy, hook=EinDecomp(topology=topology, reassociate=True))
    assert plan.traffic.flops < 3 * size**2


def test_a_chain_ordered_anew_differs_by_rounding_alone() -> None:
    random = np.random.default_rng(0)
    x, y, v = random.normal(size=(60, 50)), random.normal(size=(50, 40)), random.normal(size=40)
    a, b, w = (da.from_array(one, chunks=20) for one in (x, y, v))
    with dask.config.set(
        array_optimize=EinDecomp(force=True, topology=Topology(workers=4), reassociate=True)
    ):
        np.testing.assert_allclose(((a @ b) @ w).compute(scheduler="synchronous"), x @ y @ v, rtol=1e-12)
    # remembered apart from the plan that keeps the order
    kept = explain((a @ b) @ w, topology=Topology(workers=4))
    assert kept.traffic.flops >= 60 * 50 * 40
