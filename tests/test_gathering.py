"""What ``compute`` puts together is read as it was computed."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Alias, List, Task, TaskRef
from dask.array.core import finalize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_eindecomp import EinDecomp, Topology
from dask_eindecomp.gathering import gathered, regathered, without

PLANNED = EinDecomp(force=True, topology=Topology(workers=2))
X = np.arange(144.0).reshape(12, 12)


class Seen:
    """The hook, and the graphs it was given and gave."""

    def __init__(self) -> None:
        self.graphs: list[tuple[Any, Any, Any]] = []

    def __call__(self, dsk: Any, keys: Any, **options: Any) -> Any:
        result = PLANNED(dsk, keys, **options)
        self.graphs.append((dsk, keys, result))
        return result


def computed(*arrays: da.Array) -> tuple[tuple[Any, ...], dict[Any, Any]]:
    """Results, and the tasks that ran."""
    seen = Seen()
    with dask.config.set(array_optimize=seen, scheduler="synchronous"):
        results = dask.compute(*arrays)
    ((_, _, graph),) = seen.graphs
    return results, {key: task for layer in graph.layers.values() for key, task in layer.items()}


def names(tasks: dict[Any, Any]) -> set[Any]:
    return {key[0] if isinstance(key, tuple) else key for key in tasks}


def ending(array: da.Array, blocks: Any) -> HighLevelGraph:
    """An array with a task that reads these blocks."""
    end = MaterializedLayer({"end": Task("end", finalize, blocks)})
    return HighLevelGraph(array.dask.layers | {"end": end}, array.dask.dependencies | {"end": {array.name}})


@pytest.mark.parametrize("chunks", [12, 4, (12, 2), (5, 7)])
def test_a_result_that_is_put_together_is_not_cut_again(chunks: Any) -> None:
    a = da.from_array(X, chunks=chunks)
    product = a @ a.T
    (result,), tasks = computed(product)
    np.testing.assert_allclose(result, X @ X.T)
    assert product.name not in names(tasks)
    made = {str(key[0]).partition("-")[0] for key in tasks if isinstance(key, tuple)}
    assert made <= {"array", "join", "aggregate"}
    assert not [key for key in tasks if str(key[0]).startswith("repartition")]


def test_all_results_of_one_compute_are_put_together_from_what_was_planned() -> None:
    a = da.from_array(X, chunks=3)
    some, total, scalar = a @ a, (a @ a).sum(axis=0), (a * a).sum()
    results, tasks = computed(some, total, scalar)
    for result, expected in zip(results, (X @ X, (X @ X).sum(axis=0), (X * X).sum())):
        np.testing.assert_allclose(result, expected)
    assert not names(tasks) & {some.name, total.name, scalar.name}


def test_what_something_else_reads_in_its_chunks_keeps_them() -> None:
    a = da.from_array(X, chunks=3)
    product = a @ a
    shapes = product.map_blocks(lambda block: np.full(block.shape, block.shape[0]), dtype=int)
    (result, lengths), tasks = computed(product, shapes)
    np.testing.assert_allclose(result, X @ X)
    assert (lengths == 3).all()


@pytest.mark.parametrize("subscripts", ["ij,jk->ik", "ij,jk->i", "ij,jk->"])
def test_what_something_outside_reads_is_wanted_too(subscripts: str) -> None:
    a = da.from_array(X, chunks=4)
    product = da.einsum(subscripts, a, a)
    expected = np.einsum(subscripts, X, X)
    (stacked, result), _ = computed(da.stack([product, product]), product)
    np.testing.assert_allclose(stacked, [expected, expected])
    np.testing.assert_allclose(result, expected)


def test_what_is_not_planned_is_put_together_as_ever() -> None:
    a = da.from_array(X, chunks=3)
    opaque = (a @ a).map_blocks(np.tril, dtype=float)
    (result, product), _ = computed(opaque, a @ a)
    tiles = (X @ X).reshape(4, 3, 4, 3).transpose(0, 2, 1, 3)
    np.testing.assert_allclose(result, np.tril(tiles).transpose(0, 2, 1, 3).reshape(12, 12))
    np.testing.assert_allclose(product, X @ X)


def test_the_same_array_twice_in_two_ways() -> None:
    a = da.from_array(X, chunks=3)
    product = a @ a
    first, second, part = computed(product, product, product[0])[0]
    np.testing.assert_allclose(first, X @ X)
    np.testing.assert_allclose(second, X @ X)
    np.testing.assert_allclose(part, (X @ X)[0])


def test_what_is_wanted_block_by_block_too_keeps_its_blocks() -> None:
    a = da.from_array(X, chunks=3)
    product = a @ a
    block = (product.name, 0, 0)
    graph = PLANNED(ending(product, _blocks(product.__dask_keys__())), ["end", block])
    whole, corner = dask.get(graph, ["end", block])
    np.testing.assert_allclose(whole, X @ X)
    np.testing.assert_allclose(corner, (X @ X)[:3, :3])


def test_a_single_block_is_a_copy() -> None:
    a = da.from_array(X, chunks=12)
    with dask.config.set(array_optimize=PLANNED, scheduler="synchronous"):
        result = (a @ a).compute()
    result[0, 0] = -1  # nobody else has it
    assert result.flags.owndata and result.flags.writeable


def test_two_plans_give_a_result_two_names() -> None:
    a = da.from_array(X, chunks=3)
    product = a @ a
    found = []
    for workers in (2, 3):
        hook = EinDecomp(force=True, topology=Topology(workers=workers, flops=1e4))
        dsk = ending(product, _blocks(product.__dask_keys__()))
        graph = hook(dsk, ["end"])
        found.append({key for layer in graph.layers.values() for key in layer})
    assert all(not task or str(task).startswith(("end", "('array-")) for task in found[0] & found[1])


def _blocks(keys: Any) -> Any:
    return List(*map(_blocks, keys)) if isinstance(keys, list) else TaskRef(keys)


@pytest.mark.parametrize(
    "change",
    [
        lambda keys: keys[::-1],
        lambda keys: keys[:-1],
        lambda keys: [row[:1] for row in keys] + [keys[0]],
        lambda keys: keys[0],
        lambda keys: [],
    ],
)
def test_anything_but_all_blocks_in_order_is_left(change: Any) -> None:
    a = da.from_array(X, chunks=4)
    assert gathered(ending(a, _blocks(a.__dask_keys__())), ["end"]) == {
        "end": [key for row in a.__dask_keys__() for key in row]
    }
    assert gathered(ending(a, _blocks(change(a.__dask_keys__()))), ["end"]) == {}


def test_blocks_may_stand_as_aliases() -> None:
    a = da.from_array(X, chunks=(12, 6))
    keys = a.__dask_keys__()[0]
    assert gathered(ending(a, List(List(*map(Alias, keys)))), ["end"]) == {"end": keys}


def test_another_function_is_left() -> None:
    a = da.from_array(X, chunks=4)
    dsk = ending(a, _blocks(a.__dask_keys__()))
    other = MaterializedLayer({"end": Task("end", len, _blocks(a.__dask_keys__()))})
    assert gathered(HighLevelGraph(dsk.layers | {"end": other}, dsk.dependencies), ["end"]) == {}


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 2)])
def test_a_task_made_anew_is_recognised(shape: tuple[int, ...]) -> None:
    task = regathered("end", "x", shape)
    dsk = HighLevelGraph({"end": MaterializedLayer({"end": task})}, {"end": set()})
    every = [("x", *index) for index in np.ndindex(*shape)]
    dsk = HighLevelGraph(
        dsk.layers | {"x": MaterializedLayer(dict.fromkeys(every, 0))}, {"end": {"x"}, "x": set()}
    )
    assert gathered(dsk, ["end"]) == {"end": every}
    assert task.dependencies == set(every)


def test_a_graph_without_its_ends_is_the_same_otherwise() -> None:
    a = da.from_array(X, chunks=4)
    dsk = without(ending(a, List()), ["end"])
    assert dict(dsk.dependencies) == dict(a.dask.dependencies)
