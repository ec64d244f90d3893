"""Programs that users reported: right with every plan, whatever the machines; what surrounds them stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

from benchmarks import bench_reported
from benchmarks.bench_reported import counted
from dask_eindecomp import EinDecomp, Topology, einsum, explain
from tests.cluster import cluster
from tests.reported import GALLERY, Case, lacking, wrong

pytestmark = pytest.mark.filterwarnings(
    "ignore:Increasing number of chunks", "ignore:Sending large graph", "ignore:invalid value encountered"
)

HOOKS = {
    "4 workers, forced": EinDecomp(topology=Topology(workers=4), force=True),
    "2 threads, forced": EinDecomp(topology=Topology.of_threads(2), force=True),
    "4 workers": EinDecomp(topology=Topology(workers=4)),
}


def made(name: str) -> Case:
    """A case, or the test is skipped."""
    if missing := lacking(name):
        pytest.skip(f"needs {', '.join(missing)}")
    return GALLERY[name]()


@pytest.fixture(params=HOOKS)
def hook(request: pytest.FixtureRequest) -> Iterator[EinDecomp]:
    """A hook in use."""
    with dask.config.set(array_optimize=HOOKS[request.param]):
        yield HOOKS[request.param]


@pytest.mark.parametrize("name", GALLERY)
def test_a_reported_case_is_right(name: str, hook: EinDecomp) -> None:
    case = made(name)
    if case.raises:
        with pytest.raises(case.raises, match=case.message):
            dask.compute(*case.collections, scheduler="synchronous")
    else:
        assert not wrong(case, dask.compute(*case.collections, scheduler="synchronous"))


@pytest.mark.parametrize("chunks", [(1, 1), (3, 7), (3, 40)], ids=str)
@pytest.mark.parametrize("dtype", [bool, "i1", "u1", "i2"])
def test_narrow_types_are_added_up_as_declared_whatever_the_cut(
    dtype: str, chunks: tuple[int, int], hook: EinDecomp
) -> None:
    a = np.random.default_rng(0).integers(0, 100, (3, 40)).astype(dtype)
    A = da.from_array(a, chunks=chunks)
    lazy = A @ A.T, da.tensordot(A, A, ([1], [1])), da.einsum("ik,jk->ij", A, A)
    for one, result in zip(lazy, dask.compute(*lazy, scheduler="synchronous")):
        wide = a.astype(one.dtype)
        assert result.dtype == one.dtype
        np.testing.assert_array_equal(result, wide @ wide.T)


@pytest.mark.parametrize("name", GALLERY)
def test_planning_a_planned_graph_changes_nothing(name: str) -> None:
    hook = HOOKS["4 workers, forced"]
    with dask.config.set(array_optimize=hook):
        case = made(name)
        if case.raises:
            pytest.skip("has no plan")
        once = dask.optimize(*case.collections)
        twice = dask.optimize(*once)
    assert keys(twice) == keys(dask.optimize(*once))
    if arrays := [one for one in once if isinstance(one, da.Array)]:
        assert not explain(*arrays, hook=hook).choices


def keys(collections: tuple[Any, ...]) -> set[Any]:
    """Keys of their graphs."""
    return {key for one in collections for key in dict(one.dask)}


@pytest.mark.parametrize("write", [da.einsum, einsum], ids=["dask", "dask_eindecomp"])
def test_a_diagonal_cannot_be_written(write: Callable[..., da.Array]) -> None:
    """numpy/numpy#21787"""
    with pytest.raises(ValueError, match=r"once|Repeated"):
        write("i->ii", da.ones(4, chunks=2))


# processes of their own


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of two workers."""
    distributed = pytest.importorskip("distributed")
    with (
        cluster(tmp_path_factory.mktemp("cluster"), workers=2) as address,
        distributed.Client(address, set_as_default=False) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        yield client


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "name",
    (
        "boolean_tensordot", "narrow_integers", "half_precision", "empty_chunks", "unknown_rows", "masked_dot",
        "many_chunks_inside", "weighted_gram", "distances_by_broadcasting", "shared_product", "random_sources",
        "delayed_on_both_sides",
    ),
)  # fmt: skip
def test_a_reported_case_is_right_on_a_cluster(name: str, client: Any) -> None:
    with client.as_current(), dask.config.set(array_optimize=EinDecomp(force=True), scheduler=client.get):
        case = made(name)
        assert not wrong(case, dask.compute(*case.collections))


@pytest.mark.timeout(180)
def test_what_the_hook_may_not_plan_is_refused_on_a_cluster(client: Any) -> None:
    with client.as_current(), dask.config.set(array_optimize=EinDecomp(force=True), scheduler=client.get):
        case = made("one_against_four")
        with pytest.raises(ValueError, match=case.message):
            dask.compute(*case.collections)


# the command


def test_the_command_compares_plain_dask_with_the_hook(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_reported.report(["boolean_tensordot", "weighted_gram", "one_against_four"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2][:3] == ["boolean_tensordot", "wrong", "right"]
    name, *right, plain, hook, better = lines[3][:6]
    assert (name, right) == ("weighted_gram", ["right", "right"])
    assert int(hook) <= int(better) < int(plain)
    assert lines[-1][:4] == ["all", "3", "1", "3"]


def test_the_command_tells_what_is_beyond_the_better_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_reported, "hook_for", lambda case: None)
    assert bench_reported.report(["boolean_tensordot", "chain_with_a_vector"]) == 2
    faults = capsys.readouterr().err
    assert "boolean_tensordot: result 0: other values" in faults
    assert "chain_with_a_vector: Counts(tasks=" in faults


def test_counts_are_those_of_a_graph_counted_by_hand() -> None:
    """Two tasks give 16 bytes each, one reads both, and gives 32."""
    halves = da.ones(4, chunks=2).map_blocks(np.negative)
    whole = dask.delayed(np.concatenate)(list(halves.to_delayed()))
    assert counted((whole,))[1] == bench_reported.Counts(tasks=3, nbytes=32, peak_nbytes=64)


def test_what_differs_is_named() -> None:
    lazy = da.ones(2, chunks=1)
    case = Case((lazy,), (np.ones(2),))
    assert not wrong(case, (np.ones(2),))
    assert wrong(case, (np.ones(3),)) == "result 0: shape (3,), expected (2,)"
    assert wrong(case, (np.full(2, 1 + 1e-6),)) == "result 0: other values"
    assert wrong(case, (np.ma.masked_greater(np.ones(2), 0),)) == "result 0: another mask"
    assert wrong(case, (np.ones(2, int),)).startswith("result 0: dtype int64, declared float64")
