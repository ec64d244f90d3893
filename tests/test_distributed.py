"""The hook where it runs with a cluster: in a scheduler's process that knows nothing of the client's settings."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

pytest.importorskip("distributed")

from distributed import Client, get_task_stream, wait

import dask_eindecomp.hook
from dask_eindecomp import Aggregate, EinDecomp, Topology, eindecomp, einsum, explain
from dask_eindecomp.annotations import AnnotationError
from dask_eindecomp.calibration import ask_workers
from dask_eindecomp.lift import ShapeError
from tests.cluster import cluster

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore:Sending large graph")]
PLANNED = EinDecomp(force=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the cluster's processes write."""
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def three_workers(folder: Path) -> Iterator[Client]:
    """A client of three workers, each a process of its own."""
    with cluster(folder, workers=3) as address, Client(address, set_as_default=False) as client:
        client.wait_for_workers(3, timeout=60)
        yield client


@pytest.fixture
def client(three_workers: Client) -> Iterator[Client]:
    """The same, the current one of this test."""
    with three_workers.as_current(), dask.config.set(scheduler=three_workers.get):
        # as a client does that is made without set_as_default=False
        yield three_workers


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def persisted(client: Client, *arrays: np.ndarray, chunks: int) -> tuple[da.Array, ...]:
    """The arrays on the workers."""
    lazy = dask.persist(*(da.from_array(array, chunks=chunks) for array in arrays))
    wait(lazy)
    return lazy


def joins_of(stream: get_task_stream) -> Counter[str]:
    """Tiles that ran, by the layer they are of, from what the workers say they ran."""
    layers = (record["key"][0] for record in stream.data if isinstance(record["key"], tuple))
    return Counter(name for name in layers if name.startswith("join-"))


def tiles_of(plan: Any, ran: Counter[str]) -> dict[str, int]:
    """Tiles that ran for every expression of a plan."""
    return {
        choice.name: sum(count for name, count in ran.items() if name.startswith(f"join-{choice.name}-"))
        for choice in plan.choices
    }


# the workers


@pytest.mark.parametrize("run", ["compute", "persist"])
def test_the_plan_is_made_for_the_schedulers_workers(client: Client, run: str) -> None:
    x, y = numbers(1200, 1200, seed=1), numbers(1200, 1200, seed=2)
    a, b = persisted(client, x, y, chunks=300)
    z = da.einsum("ij,jk->ik", a, b)
    with dask.config.set(array_optimize=EinDecomp()):
        plan = explain(z)
        with get_task_stream(client) as stream:
            result = z.compute() if run == "compute" else z.persist()
            wait(result)
    np.testing.assert_allclose(result, x @ y)
    assert plan.verdict.startswith("applied")
    assert plan.topology.workers == 3 and plan.topology.threads == 1
    assert plan.choices[-1].tiles % 3 == 0
    ran = tiles_of(plan, joins_of(stream))
    assert ran == {choice.name: choice.tiles for choice in plan.choices}
    busy = {record["worker"] for record in stream.data if str(record["key"][0]).startswith("join-")}
    # the restriction is loose: a worker that is late may lose its tiles to another
    assert busy <= set(plan.topology.addresses) and len(busy) > 1


def test_the_owners_of_persisted_blocks_are_planned_with(client: Client) -> None:
    x = numbers(600, 600)
    addresses = sorted(ask_workers(client))
    blocks = {
        ("held", n, 0): client.submit(
            np.array, x[n * 200 : (n + 1) * 200], key=("held", n, 0), workers=[addresses[2 - n]]
        )
        for n in range(3)
    }
    wait(list(blocks.values()))
    a = da.Array(blocks, "held", ((200,) * 3, (600,)), "float64")
    product = a @ a.T
    _, graph, _ = PLANNED.plan(product.dask, product.__dask_keys__())
    assert graph.inputs["held"].owners == (2, 1, 0)
    with dask.config.set(array_optimize=PLANNED):
        result = (a @ a.T).persist()
        wait(result)
    np.testing.assert_allclose(result, x @ x.T)


def test_every_contraction_of_a_chain_keeps_all_workers_busy(client: Client) -> None:
    arrays = [numbers(1200, 1200, seed=seed) for seed in range(3)]
    a, b, c = persisted(client, *arrays, chunks=300)
    z = da.einsum("ij,jk,kl->il", a, b, c)
    with dask.config.set(array_optimize=eindecomp):
        plan = explain(z)
        with get_task_stream(client) as stream:
            result = z.compute()
    np.testing.assert_allclose(result, arrays[0] @ arrays[1] @ arrays[2], atol=1e-8)
    ran = tiles_of(plan, joins_of(stream))
    assert len(ran) == 2
    assert all(tiles > 0 and tiles % 3 == 0 for tiles in ran.values())


def test_explain_names_the_clusters_workers(client: Client) -> None:
    x = da.ones((64, 64), chunks=16)
    topology = explain(x @ x).topology
    assert topology.addresses == tuple(sorted(ask_workers(client)))
    assert topology.memory == 2 << 30


def test_a_topology_of_the_user_comes_before_the_workers(client: Client) -> None:
    x = numbers(600, 600)
    (a,) = persisted(client, x, chunks=150)
    fast = Topology(workers=5, bandwidth=1e12, latency=0, flops=1e6, task_overhead=0)
    hook = EinDecomp(force=True, topology=fast)
    plan = explain(a @ a, hook=hook)
    with dask.config.set(array_optimize=hook), get_task_stream(client) as stream:
        np.testing.assert_allclose((a @ a).compute(), x @ x)
    assert plan.choices[-1].tiles % 5 == 0
    assert sum(joins_of(stream).values()) == plan.choices[-1].tiles


# settings travel


@pytest.mark.parametrize(("margin", "planned"), [(0.9999, False), (-1e9, True)])
@pytest.mark.parametrize("way", ["given", "configured"])
def test_the_margin_travels_to_the_scheduler(client: Client, margin: float, planned: bool, way: str) -> None:
    x = numbers(300, 300)
    (a,) = persisted(client, x, chunks=100)
    hook = EinDecomp(margin=margin) if way == "given" else EinDecomp()
    margins = {} if way == "given" else {"eindecomp.margin": margin}
    with dask.config.set({"array_optimize": hook} | margins), get_task_stream(client) as stream:
        np.testing.assert_allclose(da.einsum("ij,kj->ik", a, a).compute(), x @ x.T)
    assert bool(joins_of(stream)) is planned


def break_planner(reason: str | None) -> Any:
    """Make every plan fail in this process; None mends it."""
    from dask_eindecomp import decompose

    def fail(*args: Any, **keywords: Any) -> Any:
        raise LookupError(reason)

    dask_eindecomp.hook.decompose = decompose.decompose if reason is None else fail


@pytest.fixture
def broken_planner(client: Client) -> Iterator[str]:
    """Plans fail on the scheduler, for this reason."""
    reason = "no plan today"
    client.run_on_scheduler(break_planner, reason)
    yield reason
    client.run_on_scheduler(break_planner, None)


@pytest.mark.parametrize("way", ["given", "configured"])
def test_a_strict_hook_raises_in_the_client_what_fails_on_the_scheduler(
    client: Client, broken_planner: str, way: str
) -> None:
    x = da.ones((6, 6), chunks=3)
    hook = EinDecomp(force=True, strict=True if way == "given" else None)
    with (
        dask.config.set({"array_optimize": hook, "eindecomp.strict": way == "configured"}),
        pytest.raises(LookupError, match=broken_planner),
    ):
        (x @ x).compute()


@pytest.mark.parametrize("way", ["given", "configured"])
def test_a_hook_that_is_not_strict_runs_the_graph_as_it_came(
    client: Client, broken_planner: str, folder: Path, way: str
) -> None:
    x = da.ones((6, 6), chunks=3)
    hook = EinDecomp(force=True, strict=False if way == "given" else None)
    with dask.config.set({"array_optimize": hook, "eindecomp.strict": way == "given"}):
        for _ in range(2):
            assert (x @ x).sum().compute() == 216
    log = (folder / "scheduler.log").read_text()
    assert log.count(f"planning failed, the graph runs as it came: LookupError: {broken_planner}") == 1


def test_a_mistake_of_the_user_reaches_the_client(client: Client) -> None:
    product = da.ones((6, 6), chunks=3) @ da.ones((1, 6), chunks=3)  # NumPy refuses it, Dask does not
    with (
        dask.config.set(array_optimize=EinDecomp(strict=False)),
        pytest.raises(ShapeError, match=r"is 6 long in the left operand but 1 in the right; expected equal"),
    ):
        product.compute()


# no deadlock


def within(seconds: float, work: Callable[[], None]) -> None:
    """Run something that may hang."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"not done after {seconds:g} s"
    if failures:
        raise failures[0]


def test_computations_go_on_while_futures_come_and_go(client: Client) -> None:
    """Futures are dropped in the client's event loop: it waits while another thread pickles a graph.

    Whoever asks the cluster something while being pickled then waits for a loop that waits for him.
    """
    x = numbers(60, 60)
    (a,) = persisted(client, x, chunks=20)
    done = threading.Event()
    dropped = []

    def churn() -> None:
        while not done.wait(0.05):
            held = [client.submit(abs, -len(dropped), pure=False)]
            dropped.append(held)
            client.loop.add_callback(held.clear)

    def compute(number: int) -> None:
        product = da.einsum("ij,jk->ik", a + number, a)  # another graph each time
        np.testing.assert_allclose(product.compute(), (x + number) @ x, atol=1e-9)

    churning = threading.Thread(target=churn, daemon=True)
    churning.start()
    try:
        with dask.config.set(array_optimize=PLANNED):
            for number in range(50):
                within(60, partial(compute, number))
    finally:
        done.set()
        churning.join(10)
    assert len(dropped) >= 50


# a scheduler without the package


def test_a_scheduler_without_the_package_is_named_as_the_cause(tmp_path: Path) -> None:
    with (
        cluster(tmp_path, workers=1, lacking="dask_eindecomp") as address,
        Client(address) as client,
        dask.config.set(array_optimize=eindecomp),
    ):
        client.wait_for_workers(1, timeout=60)
        x = da.ones((6, 6), chunks=3)
        with pytest.raises(Exception) as caught:  # Dask's own, whatever it is
            (x @ x).compute()
        error: BaseException | None = caught.value
        chain = []
        while error is not None:
            chain.append(f"{type(error).__name__}: {error}")
            error = error.__cause__ or error.__context__
        assert any("dask_eindecomp" in one for one in chain), chain
        assert (x + 1).sum().compute(optimize_graph=False) == 72  # the cluster itself is well


# ways to run something


@pytest.fixture
def planned(client: Client) -> Iterator[tuple[np.ndarray, da.Array]]:
    """A matrix on the workers; every plan is applied."""
    x = numbers(60, 60, seed=7)
    (a,) = persisted(client, x, chunks=20)
    with dask.config.set(array_optimize=PLANNED):
        yield x, a


def test_compute(client: Client, planned: tuple[np.ndarray, da.Array]) -> None:
    x, a = planned
    with get_task_stream(client) as stream:
        np.testing.assert_allclose((a @ a).compute(), x @ x)
    assert joins_of(stream)


def test_persist_keeps_keys_chunks_and_dtype(client: Client, planned: tuple[np.ndarray, da.Array]) -> None:
    x, a = planned
    z = a @ a
    with get_task_stream(client) as stream:
        kept = z.persist()
        wait(kept)
    assert (kept.name, kept.chunks, kept.dtype) == (z.name, z.chunks, z.dtype)
    assert kept.__dask_keys__() == z.__dask_keys__()
    assert joins_of(stream)
    np.testing.assert_allclose(kept.blocks[1, 2], (x @ x)[20:40, 40:])
    np.testing.assert_allclose(kept, x @ x)


def test_the_lazy_array_can_be_used_while_its_persisted_twin_lives(
    planned: tuple[np.ndarray, da.Array],
) -> None:
    x, a = planned
    z = a @ a
    kept = z.persist()
    wait(kept)
    np.testing.assert_allclose(z.blocks[0, 1].compute(), (x @ x)[:20, 20:40])
    np.testing.assert_allclose((z @ z).compute(), x @ x @ x @ x, atol=1e-8)


def test_the_lazy_array_can_be_used_unplanned_while_its_persisted_twin_lives(
    planned: tuple[np.ndarray, da.Array],
) -> None:
    x, a = planned
    z = a @ a
    kept = z.persist()
    wait(kept)
    with dask.config.set(array_optimize=EinDecomp(margin=0.9999)):  # not worth a plan
        np.testing.assert_allclose(z.blocks[0, 1].compute(), (x @ x)[:20, 20:40])


def test_persisted_results_are_planned_again(planned: tuple[np.ndarray, da.Array]) -> None:
    x, a = planned
    kept = (a @ a).persist()
    np.testing.assert_allclose((kept @ kept).compute(), x @ x @ x @ x, atol=1e-8)


def test_two_arrays_together(client: Client, planned: tuple[np.ndarray, da.Array]) -> None:
    x, a = planned
    b = a @ a
    with get_task_stream(client) as stream:
        first, second = dask.compute(b + 1, b.sum(axis=0))
    np.testing.assert_allclose(first, x @ x + 1)
    np.testing.assert_allclose(second, (x @ x).sum(axis=0))
    products = {name: count for name, count in joins_of(stream).items() if "sum-aggregate" in name}
    assert len(products) <= 2


def test_optimize_then_compute(planned: tuple[np.ndarray, da.Array]) -> None:
    x, a = planned
    (graph,) = dask.optimize(a @ a)
    np.testing.assert_allclose(graph.compute(), x @ x)


def test_client_compute_gives_a_future(client: Client, planned: tuple[np.ndarray, da.Array]) -> None:
    x, a = planned
    np.testing.assert_allclose(client.compute(a @ a).result(), x @ x)


def test_store_into_zarr(planned: tuple[np.ndarray, da.Array], tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    x, a = planned
    (a @ a).to_zarr(str(tmp_path / "product.zarr"))
    np.testing.assert_allclose(zarr.open(str(tmp_path / "product.zarr"), mode="r")[:], x @ x)
    target = zarr.open(str(tmp_path / "stored.zarr"), mode="w", shape=(60, 60), chunks=(20, 20), dtype="f8")
    da.store(a @ a, target)
    np.testing.assert_allclose(target[:], x @ x)


def test_xarray_objects(client: Client, planned: tuple[np.ndarray, da.Array]) -> None:
    xarray = pytest.importorskip("xarray")
    x, a = planned
    left = xarray.DataArray(a, dims=("i", "j"), name="left")
    right = xarray.DataArray(a, dims=("j", "k"), name="right")
    product = xarray.dot(left, right, dim="j")
    with get_task_stream(client) as stream:
        np.testing.assert_allclose(product.compute().transpose("i", "k"), x @ x)
    assert joins_of(stream)
    np.testing.assert_allclose(product.persist().load().transpose("i", "k"), x @ x)
    assert explain(product).choices


# extended summation


def test_an_extended_summation_is_planned_on_the_scheduler_whatever_joins(client: Client) -> None:
    x, y = numbers(40, 30), numbers(50, 30, seed=1)
    a, b = persisted(client, x, y, chunks=20)
    lazy = einsum("ik,jk->ij", a, b, join=lambda x, y: abs(x - y), aggregate=Aggregate(0, lambda x, y: x + y))
    with get_task_stream(client) as stream, dask.config.set(array_optimize=PLANNED):
        np.testing.assert_allclose(lazy.compute(), abs(x[:, None] - y).sum(axis=-1))
    assert joins_of(stream)
    np.testing.assert_allclose(lazy.compute(), abs(x[:, None] - y).sum(axis=-1))


def test_a_cut_fixed_by_hand_and_layers_left_alone_reach_the_scheduler(client: Client) -> None:
    x = numbers(12, 12)
    (a,) = persisted(client, x, chunks=4)
    with dask.annotate(eindecomp={"partition": {"i": 1, "j": 6, "k": 1}}):
        fixed = da.einsum("ij,jk->ik", a, a)
    with dask.annotate(eindecomp=False):
        alone = a @ a
    with dask.config.set(array_optimize=eindecomp):
        with get_task_stream(client) as stream:
            np.testing.assert_allclose(fixed.compute(), x @ x)
        assert sum(joins_of(stream).values()) == 6
        with get_task_stream(client) as stream:
            np.testing.assert_allclose(alone.compute(), x @ x)
        assert not joins_of(stream)
        with dask.annotate(eindecomp={"partition": {"z": 2}}):
            wrong = a @ a
        with pytest.raises(AnnotationError, match=r"no label 'z' in .*; expected one of i, j, k"):
            wrong.compute()


def test_futures_in_a_graph_are_read_where_they_are(client: Client) -> None:
    x = numbers(12, 12)
    rows = [client.submit(np.asarray, x[start : start + 4]) for start in (0, 4, 8)]
    a = da.concatenate([da.from_delayed(row, (4, 12), x.dtype) for row in rows])
    with dask.config.set(array_optimize=PLANNED):
        np.testing.assert_allclose((a @ a.T).compute(), x @ x.T)
        np.testing.assert_allclose((a @ a.T).persist().sum(axis=0).compute(), (x @ x.T).sum(axis=0))


def refuse_large(block: np.ndarray) -> np.ndarray:
    """A user's function that fails in one block."""
    if block.size and block.max() > 100:
        raise OverflowError(f"{block.max():g} is beyond 100")
    return block


def test_what_a_users_function_raises_is_told_with_its_own_key_and_traceback(client: Client) -> None:
    x = np.ones((8, 8))
    x[7, 7] = 101
    a = da.from_array(x, chunks=4).map_blocks(refuse_large, meta=x[:0])
    with dask.config.set(array_optimize=PLANNED):
        future = client.compute((a @ a).sum())
        error = future.exception()
    assert isinstance(error, OverflowError) and str(error) == "101 is beyond 100"
    frames = traceback.extract_tb(future.traceback())
    assert "refuse_large" in [frame.name for frame in frames]
    erred = client.run_on_scheduler(
        lambda dask_scheduler: [str(key) for key, task in dask_scheduler.tasks.items() if task.exception]
    )
    assert any("refuse_large-" in key and key.endswith(", 1, 1)") for key in erred)
