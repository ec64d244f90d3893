"""A plan becomes layers with no more tasks and no more copies than it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Alias, Task
from dask.core import flatten

from dask_eindecomp import EinDecomp, Topology
from dask_eindecomp.contract import contract
from dask_eindecomp.estimate import price
from dask_eindecomp.graph import EinGraph
from dask_eindecomp.hook import apply
from dask_eindecomp.kernels import Elementwise
from dask_eindecomp.lift import ARRAY_TYPES, lift
from dask_eindecomp.lower import FAN_IN, Lowered, lower
from dask_eindecomp.partition import Partition
from tests.standin import StandIn

Parts = Mapping[str, int]
STAND_IN = f"{StandIn.__module__}.{StandIn.__qualname__}"


def graph_of(array: da.Array, array_types: frozenset[str] = ARRAY_TYPES) -> EinGraph:
    return contract(lift(array.dask, array.__dask_keys__(), array_types).graph)


def partitions(graph: EinGraph, *parts: Parts) -> dict[str, Partition]:
    """A balanced partition of every node, in the order of the graph; labels not named stay whole."""
    assert len(parts) == len(graph.nodes), [str(node.expression) for node in graph.nodes.values()]
    return {
        node.name: Partition.balanced(dict(node.extents), one)
        for node, one in zip(graph.nodes.values(), parts)
    }


def lowered(array: da.Array, *parts: Parts) -> Lowered:
    graph = graph_of(array)
    return lower(graph, partitions(graph, *parts))


def tasks(plan: Lowered) -> dict[str, int]:
    """Tasks by what they are for."""
    return dict(Counter(name.partition("-")[0] for name, layer in plan.layers.items() for _ in layer))


def planned(array: da.Array, *parts: Parts) -> Any:
    """The whole graph under the partitions given."""
    keys = array.__dask_keys__()
    lifted = lift(array.dask, keys)
    graph = contract(lifted.graph)
    plan = price(graph, partitions(graph, *parts), Topology(workers=2))
    return apply(array.dask, keys, lifted, graph, plan)


def computed(array: da.Array, *parts: Parts) -> Any:
    def hook(dsk: Any, keys: Any, **_: Any) -> Any:
        return planned(array, *parts)

    with dask.config.set(array_optimize=hook):
        (found,) = dask.persist(array, scheduler="synchronous")
    return found.compute(scheduler="synchronous")


def a(*shape: int, chunks: Any = 2, start: int = 0) -> da.Array:
    return da.from_array(np.arange(float(np.prod(shape))).reshape(shape) + start, chunks=chunks)


def b(*shape: int, chunks: Any = 2) -> da.Array:
    return a(*shape, chunks=chunks, start=1)


def test_layers_are_named_after_the_algebra() -> None:
    x, y = a(4, 4), b(4, 4)
    found = lowered(x @ y, {"i": 2, "j": 2}).layers
    assert {name.partition("-")[0] for name in found} == {"join", "aggregate", "repartition"}


def test_a_product_whose_tiles_are_the_blocks_has_one_task_a_tile() -> None:
    x, y = a(4, 6, chunks=(2, 6)), b(6, 4, chunks=(6, 2))
    plan = lowered(x @ y, {"i": 2, "k": 2})
    assert tasks(plan) == {"join": 4}
    assert set(key for layer in plan.layers.values() for key in layer) == set(
        flatten((x @ y).__dask_keys__())
    )
    assert plan.reads == set(flatten([x.__dask_keys__(), y.__dask_keys__()]))


def test_blocks_that_only_need_merging_get_no_task_of_their_own() -> None:
    x, y = a(8, 8), b(8, 8)
    assert tasks(lowered(x @ y, {"i": 4, "k": 4})) == {"join": 16}
    plan = lowered(x @ y, {"i": 2, "k": 2})
    assert tasks(plan) == {"join": 4, "repartition": 16}  # what leaves is cut back into the chunks promised
    join = next(layer for name, layer in plan.layers.items() if name.startswith("join"))
    assert all(len(task.dependencies) == 16 for task in join.values())
    np.testing.assert_array_equal(computed(x @ y, {"i": 2, "k": 2}), x.compute() @ y.compute())


def test_partial_results_are_added_up_in_one_task_a_tile() -> None:
    x, y = a(4, 8, chunks=(2, 2)), b(8, 4, chunks=(2, 2))
    assert tasks(lowered(x @ y, {"i": 2, "k": 2, "j": 4})) == {"join": 16, "aggregate": 4}


def test_a_part_of_a_block_is_cut_once_for_all_who_read_it() -> None:
    x, y = a(4, 4, chunks=4), b(4, 4, chunks=4)
    product = (x @ y).rechunk((1, 1))
    plan = lowered(product, {"i": 4, "k": 4})
    assert tasks(plan) == {"join": 16, "repartition": 8}  # four rows of x, four columns of y
    assert plan.reads == {(x.name, 0, 0), (y.name, 0, 0)}


def test_whole_blocks_are_never_cut() -> None:
    x = a(6, 6, chunks=((2, 4), (6,)))
    plan = lowered(x @ x.T, {"i": 3, "k": 1})
    cut = [
        task for name, layer in plan.layers.items() if name.startswith("repartition-array") for task in layer
    ]
    assert len(cut) == 2  # the block of four rows in halves


def test_an_elementwise_chain_runs_in_the_task_of_the_join_it_follows() -> None:
    x, y = a(4, 4, chunks=(2, 4)), b(4, 4, chunks=(4, 2))
    array = da.exp((x @ y) * 2 + 1)
    cut = {"i": 2, "j": 2}
    graph = graph_of(array)
    labels = [node.expression.output for node in graph.nodes.values()]
    plan = lower(
        graph,
        {
            n.name: Partition.balanced(dict(n.extents), dict.fromkeys(o, 2))
            for n, o in zip(graph.nodes.values(), labels)
        },
    )
    assert tasks(plan) == {"join": 4}
    assert cut
    np.testing.assert_allclose(
        dask.get(planned(array, *({o: 2 for o in out} for out in labels)).to_dict(), (array.name, 0, 0)),
        array.compute()[:2, :2],
    )


def test_an_elementwise_expression_of_other_tiles_is_a_layer_of_its_own() -> None:
    x, y = a(4, 4, chunks=(2, 4)), b(4, 4, chunks=(4, 2))
    array = (x @ y) + 1
    assert tasks(lowered(array, {"i": 2, "k": 2}, {"i": 2, "j": 2})) == {"join": 4}
    assert tasks(lowered(array, {"i": 2, "k": 1}, {"i": 2, "j": 2})) == {"join": 6, "repartition": 4}


def test_what_two_read_is_computed_once() -> None:
    x, y = a(4, 4, chunks=(2, 4)), b(4, 4, chunks=(4, 2))
    product = x @ y
    plan = lowered(product + product.T, {"i": 2, "k": 2}, {"i": 2, "j": 2})
    assert tasks(plan) == {"join": 8}


def test_an_input_block_is_computed_once() -> None:
    calls: list[int] = []

    def counted(block: np.ndarray) -> np.ndarray:
        calls.append(1)
        return block

    x, y = (
        a(8, 8).map_blocks(counted, dtype="f8", meta=np.zeros((0, 0))),
        a(8, 8).map_blocks(counted, dtype="f8", meta=np.zeros((0, 0)), token="other"),
    )
    product = (x + 1) @ (y + 1)
    with dask.config.set(array_optimize=EinDecomp(force=True, topology=Topology(workers=4))):
        found = product.compute(scheduler="synchronous")
    assert len(calls) == 32
    one = a(8, 8).compute() + 1
    np.testing.assert_array_equal(found, one @ one)


def test_an_elementwise_operand_is_computed_once_an_element(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = Elementwise.__call__

    def counted(self: Elementwise, *arguments: Any) -> Any:
        result = plain(self, *arguments)
        sizes.append(result.size)
        return result

    monkeypatch.setattr(Elementwise, "__call__", counted)
    with dask.config.set(array_optimize=EinDecomp(force=True, topology=Topology(workers=4))):
        ((a(8, 8) + 1) @ (b(8, 8) + 1)).compute(scheduler="synchronous")
    assert sum(sizes) == 2 * 64


def test_the_tasks_of_a_product_of_sums_are_counted() -> None:
    product = (a(8, 8) + 1) @ (b(8, 8) + 1)
    blocks = {"i": 4, "j": 4}
    assert tasks(lowered(product, blocks, blocks, {"i": 4, "k": 4})) == {"join": 16 + 16 + 16}


@pytest.mark.parametrize(
    ("partials", "levels"), [(FAN_IN, [1]), (FAN_IN + 1, [2, 1]), (FAN_IN**2 + 1, [FAN_IN + 1, 2, 1])]
)
def test_many_partial_results_are_added_up_in_a_tree(partials: int, levels: list[int]) -> None:
    x, y = a(2, partials, chunks=(2, -1)), b(partials, 2, chunks=(-1, 2))
    plan = lowered(x @ y, {"j": partials})
    (tree,) = (layer for name, layer in plan.layers.items() if name.startswith("aggregate"))
    assert len(tree) == sum(levels)
    assert max(len(task.dependencies) for task in tree.values()) <= FAN_IN
    np.testing.assert_allclose(computed(x @ y, {"j": partials}), x.compute() @ y.compute())


def test_half_precision_stays_single_between_partial_results() -> None:
    x = da.from_array(np.full((1, 4096), 0.25, "float16"), chunks=(1, -1))
    product = da.einsum("ij,kj->ik", x, x)
    found = computed(product, {"j": 64})
    assert found.dtype == "float16"
    assert found == 256


def test_an_output_that_is_wanted_twice_leaves_under_both_names() -> None:
    x = a(4, 4)
    product = x @ x
    again = product.rechunk(4)
    graph = contract(
        lift(
            da.core.HighLevelGraph.merge(product.dask, again.dask),
            [product.__dask_keys__(), again.__dask_keys__()],
        ).graph
    )
    plan = lower(
        graph,
        {
            name: Partition.balanced(dict(node.extents), {"i": 2, "k": 2})
            for name, node in graph.nodes.items()
        },
    )
    keys = {key for layer in plan.layers.values() for key in layer}
    assert {*flatten(product.__dask_keys__()), *flatten(again.__dask_keys__())} <= keys


def test_an_output_in_the_tiles_of_its_plan_is_no_task() -> None:
    x = a(4, 4)
    first = x @ x
    graph = contract(lift(first.dask, first.__dask_keys__()).graph)
    (output,) = graph.outputs
    twice = replace(graph, outputs=(output, replace(output, name="again")))
    plan = lower(twice, partitions(graph, {"i": 2, "k": 2}))
    assert [
        type(plan.layers[name][key])
        for name in plan.layers
        if name.startswith("repartition")
        for key in plan.layers[name]
    ] == [Alias] * 4


# keys


def internal(array: da.Array, *parts: Parts) -> set[Any]:
    return {key for layer in lowered(array, *parts).layers.values() for key in layer} - set(
        flatten(array.__dask_keys__())
    )


def test_two_plans_of_one_graph_share_no_key_but_those_promised() -> None:
    x = a(8, 8)
    array = (x @ x) @ x
    plans = [({"i": 2, "j": 2}, {"i": 4}), ({"i": 2, "j": 2}, {"k": 4}), ({"i": 4, "j": 2}, {"i": 4})]
    keys = [internal(array, *parts) for parts in plans]
    assert all(keys)
    for number, one in enumerate(keys):
        for two in keys[:number]:
            assert not one & two
    for parts in plans:
        assert set(flatten(array.__dask_keys__())) <= {
            key for layer in lowered(array, *parts).layers.values() for key in layer
        }


def test_one_plan_of_one_graph_has_the_same_keys_and_tasks_again() -> None:
    x = a(8, 8)
    one, two = (planned(x @ x, {"i": 2, "j": 2}) for _ in range(2))
    assert set(one.layers) == set(two.layers)
    assert dask.base.tokenize(dict(one)) == dask.base.tokenize(dict(two))


def test_two_functions_of_one_name_have_other_keys() -> None:
    x = a(4, 4)
    one, two = ((x @ x) * factor @ x for factor in (2, 3))
    cut = ({"i": 2, "j": 2}, {"i": 1}, {"i": 2, "j": 2})
    assert not internal(one, *cut) & internal(two, *cut)


SCRIPT = """
import dask.array as da, numpy as np
from dask_eindecomp import EinDecomp, Topology
x = da.from_array(np.arange(256.0).reshape(16, 16), chunks=4, name="x")
v = da.from_array(np.arange(16.0), chunks=4, name="v")
y = da.from_array(np.arange(64.0).reshape(8, 8), chunks=4, name="y")
z = da.einsum("ij,j,j->i", x, v, v) + (da.einsum("ij,jk->ik", x, x) @ x).max(axis=0) + 1  # one contracted label each: Dask's own names depend on the order of sets
hook = EinDecomp(force=True, topology=Topology(workers=4))
graph = hook(z.dask, z.__dask_keys__())
from dask.base import tokenize
for name in sorted(graph.layers):
    print(name, *sorted(map(str, graph.layers[name])))
print(tokenize(sorted((str(key), repr(task.func), str(task.args)) for key, task in dict(graph).items() if hasattr(task, "func"))))
print(hook.plan(z.dask, z.__dask_keys__())[2])
"""


def test_keys_are_the_same_in_every_process() -> None:
    root = str(Path(__file__).parents[1])
    found = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert "join-" in found[0]


# blocks that are not NumPy's


def stand_ins(*shape: int, chunks: Any = 2) -> da.Array:
    blocks = StandIn(np.arange(float(np.prod(shape))).reshape(shape) % 7)
    return da.from_array(blocks, chunks=chunks, asarray=False, meta=StandIn(np.zeros((0,) * len(shape))))


def on_stand_ins(xp: Any, x: Any, y: Any) -> dict[str, Any]:
    return {
        "product": x @ y,
        "einsum": xp.einsum("ij,kj->ik", x, y),
        "chain": xp.einsum("ij,jk,kl->il", x, y, x),
        "maps": xp.tanh(x @ y) * 2 + x,
        "views": (x.T @ y)[:, None] + 1,
        "softmax": xp.exp(x @ y - (x @ y).max(axis=1, keepdims=True)),
        "sum": (x @ y).sum(axis=0),
        "diagonal": xp.einsum("ii->i", x),
        "other tiles": xp.tensordot(x, y, axes=((0,), (1,))),
    }


@pytest.mark.parametrize("name", on_stand_ins(np, np.ones((2, 2)), np.ones((2, 2))))
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_blocks_of_another_library_stay_so(name: str, workers: int) -> None:
    x, y = stand_ins(6, 6), stand_ins(6, 6, chunks=(3, 2))
    assert x.name != y.name
    array = on_stand_ins(da, x, y)[name]
    types = frozenset({STAND_IN})
    hook = EinDecomp(force=True, topology=Topology(workers=workers), array_types=types)
    lifted = lift(array.dask, array.__dask_keys__(), types)
    assert array.name in lifted.graph.nodes
    assert set(dict(lifted.graph.left_alone)) <= {x.name, y.name}  # the data
    with dask.config.set(array_optimize=hook, scheduler="synchronous"):
        held = array.persist()
        blocks = [dict(held.dask)[key] for key in flatten(held.__dask_keys__())]
        blocks = [getattr(block, "value", block) for block in blocks]
    assert {type(block) for block in blocks} == {StandIn}
    expected = on_stand_ins(np, np.asarray(x_values()), np.asarray(x_values()))[name]
    found = (
        np.block(nested([block.values for block in blocks], held.numblocks)) if expected.ndim else blocks[0]
    )
    np.testing.assert_allclose(found, expected)


def x_values() -> np.ndarray:
    return np.arange(36.0).reshape(6, 6) % 7


def nested(flat: list[Any], shape: tuple[int, ...]) -> Any:
    if len(shape) == 1:
        return flat
    size = len(flat) // shape[0]
    return [nested(flat[n : n + size], shape[1:]) for n in range(0, len(flat), size)]


def test_blocks_of_a_type_nobody_named_are_left_alone() -> None:
    array = stand_ins(6, 6) @ stand_ins(6, 6)
    graph = lift(array.dask, array.__dask_keys__()).graph
    assert not graph.nodes
    assert array.name in dict(graph.left_alone)


def test_every_task_is_one_of_ours() -> None:
    x = a(8, 8)
    for layer in lowered((x @ x) + 1, {"i": 2, "j": 2, "k": 2}, {"i": 4}).layers.values():
        for key, task in layer.items():
            assert isinstance(task, (Task, Alias))
            assert task.key == key


def test_layers_read_each_other_in_one_direction() -> None:
    """What stays may read what is planned and be read by it; the graph of layers has no cycle all the same."""
    x = a(8, 8)
    array = (x @ x).map_blocks(np.linalg.pinv, dtype="f8") @ x
    graph = EinDecomp(force=True, topology=Topology(workers=2))(array.dask, array.__dask_keys__())
    graph.validate()
    assert set(graph._toposort_layers()) == set(graph.layers)
    assert set(graph.cull(set(flatten(array.__dask_keys__()))).to_dict()) == set(graph.to_dict())


def test_a_chain_over_chunks_of_length_0_runs_whole() -> None:
    x = np.arange(25.0).reshape(5, 5)
    lazy = da.from_array(x, chunks=((2, 0, 3), (5,)))
    for workers in (1, 2, 3):
        with dask.config.set(array_optimize=EinDecomp(force=True, topology=Topology(workers=workers))):
            np.testing.assert_allclose(((lazy + 1) * 2 + lazy).compute(scheduler="sync"), (x + 1) * 2 + x)


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_an_axis_in_more_chunks_than_elements_is_priced_and_runs(workers: int) -> None:
    machines = Topology(workers=workers, bandwidth=1e12, latency=0, flops=1e5, task_overhead=0, turn=0)
    x, y = np.arange(8.0).reshape(2, 2, 2), np.arange(4.0).reshape(2, 2)
    left = da.from_array(x, chunks=((0, 2, 0), (2,), (0, 1, 0, 1))).T
    right = da.from_array(y, chunks=((0, 2), (2,)))
    with dask.config.set(array_optimize=EinDecomp(force=True, topology=machines)):
        np.testing.assert_array_equal(left.dot(right).compute(scheduler="sync"), x.T.dot(y))
