"""A layer written out task by task is known by all its tasks, and by none if one of them is not what it should be."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Alias, List, Task, TaskRef

from dask_eindecomp import layers
from dask_eindecomp.layers import Layout

Reader = Callable[[dict[Any, Any], Layout, Layout], Any]
Tasks = dict[Any, Any]


def layout(array: da.Array) -> Layout:
    return Layout(array.name, array.shape, array.dtype, array.chunks, "numpy.ndarray")


def tasks_of(layer: Any) -> Tasks:
    """The tasks of a layer, all in the newer of Dask's spellings."""

    def reference(argument: Any) -> Any:
        if isinstance(argument, list):
            return List(*map(reference, argument))
        return TaskRef(argument) if isinstance(argument, tuple) and isinstance(argument[0], str) else argument

    return {
        key: Task(key, task[0], *map(reference, task[1:])) if isinstance(task, tuple) else task
        for key, task in layer.items()
    }


def a(*extents: int, chunks: Any = 2) -> da.Array:
    return da.from_array(np.arange(float(np.prod(extents))).reshape(extents), chunks=chunks)


# one array read, one given


AXES: dict[str, tuple[Reader, da.Array, Callable[[da.Array], da.Array], Any]] = {
    "[:, None]": (layers.getitem_axes, a(4, 6), lambda x: x[:, None], (0, None, 1)),
    "[None]": (layers.getitem_axes, a(4, 6), lambda x: x[None], (None, 0, 1)),
    "[..., None]": (layers.getitem_axes, a(5), lambda x: x[..., None], (0, None)),
    "[None, :, None, :, None]": (
        layers.getitem_axes, a(4, 6), lambda x: x[None, :, None, :, None], (None, 0, None, 1, None),
    ),
    "[:, 0]": (layers.getitem_axes, a(4, 1, 6), lambda x: x[:, 0], (0, 2)),
    "[:, -1, None]": (layers.getitem_axes, a(4, 1, 6), lambda x: x[:, -1, None], (0, None, 2)),
    "expand_dims": (layers.reshape_axes, a(4, 6), lambda x: da.expand_dims(x, 1), (0, None, 1)),
    "reshape": (layers.reshape_axes, a(4, 6), lambda x: x.reshape((4, 1, 6)), (0, None, 1)),
    "reshape away": (layers.reshape_axes, a(4, 1, 6), lambda x: x.reshape((4, 6)), (0, 2)),
    "broadcast_to more rows": (
        layers.broadcast_axes, a(1, 6), lambda x: da.broadcast_to(x, (4, 6), chunks=((2, 2), (2, 2, 2))), (None, 1),
    ),
    "broadcast_to more axes": (layers.broadcast_axes, a(4, 6), lambda x: da.broadcast_to(x, (3, 4, 6)), (None, 0, 1)),
    "broadcast_to both": (
        layers.broadcast_axes, a(4, 1), lambda x: da.broadcast_to(x, (2, 3, 4, 6)), (None, None, 0, None),
    ),
}  # fmt: skip
"""Reader, source, what is done to it, and the source axis behind each axis."""


def read(name: str) -> tuple[Reader, Tasks, Layout, Layout, Any]:
    reader, source, make, axes = AXES[name]
    array = make(source)
    layer = array.dask.layers[array.name]
    return reader, tasks_of(layer), layout(source), layout(array), axes


@pytest.mark.parametrize("name", AXES)
def test_a_layer_that_moves_axes_says_which(name: str) -> None:
    reader, tasks, source, output, axes = read(name)
    assert reader(tasks, source, output) == axes


@pytest.mark.parametrize("name", [name for name in AXES if len(AXES[name][2](AXES[name][1]).dask) > 2])
def test_a_layer_with_a_block_missing_is_not_known(name: str) -> None:
    reader, tasks, source, output, _ = read(name)
    del tasks[next(reversed(tasks))]
    assert reader(tasks, source, output) is None


@pytest.mark.parametrize("name", AXES)
def test_a_layer_with_another_function_in_one_task_is_not_known(name: str) -> None:
    reader, tasks, source, output, _ = read(name)
    key, task = list(tasks.items())[-1]
    tasks[key] = Task(key, np.roll, *task.args, **task.kwargs)
    assert reader(tasks, source, output) is None


@pytest.mark.parametrize("name", AXES)
def test_a_layer_with_two_blocks_swapped_is_not_known(name: str) -> None:
    reader, tasks, source, output, _ = read(name)
    first, *_, last = tasks
    one, two = tasks[first], tasks[last]
    tasks[first] = Task(first, one.func, two.args[0], *one.args[1:], **one.kwargs)
    tasks[last] = Task(last, two.func, one.args[0], *two.args[1:], **two.kwargs)
    assert reader(tasks, source, output) is None


@pytest.mark.parametrize("name", AXES)
def test_a_layer_that_reads_another_array_in_one_task_is_not_known(name: str) -> None:
    reader, tasks, source, output, _ = read(name)
    key, task = list(tasks.items())[-1]
    tasks[key] = Task(
        key, task.func, TaskRef(("other", *task.args[0].key[1:])), *task.args[1:], **task.kwargs
    )
    assert reader(tasks, source, output) is None


@pytest.mark.parametrize("name", [name for name in AXES if AXES[name][0] is layers.getitem_axes])
@pytest.mark.parametrize("part", [slice(1, None), slice(None, None, -1), slice(None, 1), slice(0, 2, 2)])
def test_a_getitem_with_another_slice_in_one_task_is_not_known(name: str, part: slice) -> None:
    reader, tasks, source, output, _ = read(name)
    key, task = next(iter(tasks.items()))
    index = [part if one == slice(None) else one for one in task.args[1]]
    tasks[key] = Task(key, task.func, task.args[0], tuple(index))
    assert reader(tasks, source, output) is None


@pytest.mark.parametrize("name", [name for name in AXES if AXES[name][0] is not layers.getitem_axes])
def test_a_reshape_or_broadcast_to_another_shape_in_one_task_is_not_known(name: str) -> None:
    reader, tasks, source, output, _ = read(name)
    key, task = list(tasks.items())[-1]
    tasks[key] = Task(key, task.func, task.args[0], (7, *task.args[1][1:]), **task.kwargs)
    assert reader(tasks, source, output) is None


def test_real_slices_are_no_change_of_axes() -> None:
    source = a(4, 6)
    for array in (source[1:], source[::-1], source[:, 2:4], source[0], source[[1, 0]], source[:, ::2]):
        tasks = dict(array.dask.layers[array.name].items())
        for reader in (layers.getitem_axes, layers.reshape_axes, layers.broadcast_axes):
            assert reader(tasks, layout(source), layout(array)) is None
        assert not layers.is_rechunk(tasks, layout(source), layout(array))


def test_a_reshape_that_moves_values_is_not_known() -> None:
    source = a(4, 6, chunks=(4, 6))
    for array in (source.reshape((6, 4)), source.reshape((24,)), source.reshape((2, 2, 6))):
        tasks = dict(array.dask.layers[array.name].items())
        assert layers.reshape_axes(tasks, layout(source), layout(array)) is None


def test_a_reshape_of_a_column_to_a_row_is_a_view() -> None:
    source = a(6, 1)
    array = source.reshape((1, 6))
    tasks = dict(array.dask.layers[array.name].items())
    assert layers.reshape_axes(tasks, layout(source), layout(array)) == (None, 0)


def test_an_alias_of_every_block_is_the_array_itself() -> None:
    source = a(4, 6)
    output = Layout("same", source.shape, source.dtype, source.chunks, "numpy.ndarray")
    tasks = {("same", i, j): Alias(("same", i, j), (source.name, i, j)) for i in range(2) for j in range(3)}
    assert layers.getitem_axes(tasks, layout(source), output) == (0, 1)
    assert layers.is_rechunk(tasks, layout(source), output)
    tasks["same", 0, 0] = Alias(("same", 0, 0), (source.name, 0, 1))
    assert layers.getitem_axes(tasks, layout(source), output) is None
    assert not layers.is_rechunk(tasks, layout(source), output)


def test_integers_drop_only_axes_of_length_one() -> None:
    source = a(4, 1, chunks=(2, 1))
    output = Layout("out", (4,), source.dtype, ((2, 2),), "numpy.ndarray")
    for index, known in (((slice(None), 0), True), ((slice(None), -1), True), ((slice(None), 1), False)):
        tasks = {
            ("out", i): Task(("out", i), operator.getitem, TaskRef((source.name, i, 0)), index)
            for i in range(2)
        }
        assert (layers.getitem_axes(tasks, layout(source), output) == (0,)) is known
    tasks = {
        ("out", i): Task(("out", i), operator.getitem, TaskRef((source.name, i, 0)), 0) for i in range(2)
    }
    assert layers.getitem_axes(tasks, layout(source), output) is None


# rechunks


def rechunked(source: da.Array, chunks: Any, **keywords: Any) -> tuple[Tasks, Layout, Layout]:
    """All tasks between an array and its rechunk, which may take several steps, as one layer."""
    array = source.rechunk(chunks, method="tasks", **keywords)
    tasks: Tasks = {}
    for name in array.dask._toposort_layers():
        if name not in source.dask.layers:
            tasks |= dict(array.dask.layers[name].items())
    return tasks, layout(source), layout(array)


RECHUNKS = {
    "merged": (a(6, 8), (6, 8)),
    "cut": (a(6, 8, chunks=(6, 8)), 2),
    "shifted": (a(6, 8, chunks=(3, 4)), ((2, 3, 1), (5, 3))),
    "one axis": (a(6, 8), {0: 3}),
    "transposed": (a(12, 12, chunks=(12, 1)), (1, 12)),
    "unbalanced": (a(9, chunks=((4, 1, 4),)), ((2, 7),)),
    "three axes": (a(4, 4, 4), (4, 1, 3)),
    "empty chunks": (a(4, chunks=((2, 2),)), ((0, 4),)),
}


@pytest.mark.parametrize("name", RECHUNKS)
def test_a_rechunk_is_known(name: str) -> None:
    assert layers.is_rechunk(*rechunked(*RECHUNKS[name]))


def test_a_rechunk_in_several_steps_is_known_step_by_step() -> None:
    source = a(64, 64, chunks=(64, 1))
    array = source.rechunk((1, 64), method="tasks", threshold=1, block_size_limit=4000)
    steps = [name for name in array.dask._toposort_layers() if name not in source.dask.layers]
    assert len([name for name in steps if name.startswith("rechunk-merge")]) > 1
    assert layers.is_rechunk(*rechunked(source, (1, 64), threshold=1, block_size_limit=4000))


def getitems(tasks: Tasks) -> list[Any]:
    return [key for key, task in tasks.items() if isinstance(task, Task) and task.func in layers.GETITEMS]


def test_a_rechunk_that_cuts_another_slice_is_not_known() -> None:
    for name in ("cut", "shifted", "transposed", "unbalanced", "three axes"):
        tasks, source, output = rechunked(*RECHUNKS[name])
        cutting = getitems(tasks)
        if not cutting:
            continue
        task = tasks[cutting[0]]
        block = task.args[1]
        first = block[0]
        moved = (slice(first.start + 1, first.stop + 1), *block[1:])
        tasks[cutting[0]] = Task(cutting[0], task.func, task.args[0], moved)
        assert not layers.is_rechunk(tasks, source, output), name
        backwards = (slice(first.start, first.stop, -1), *block[1:])
        tasks[cutting[0]] = Task(cutting[0], task.func, task.args[0], backwards)
        assert not layers.is_rechunk(tasks, source, output), name


@pytest.mark.parametrize("name", ["merged", "shifted", "one axis", "unbalanced", "three axes"])
def test_a_rechunk_with_two_blocks_swapped_is_not_known(name: str) -> None:
    tasks, source, output = rechunked(*RECHUNKS[name])
    key = next(
        key for key in tasks if "concatenate" in getattr(getattr(tasks[key], "func", None), "__name__", "")
    )
    task = tasks[key]
    arguments = swapped(list(task.args))
    tasks[key] = Task(key, task.func, *arguments)
    assert not layers.is_rechunk(tasks, source, output)


def swapped(arguments: list[Any]) -> list[Any]:
    """Arguments of a concatenation with the first and the last of its blocks exchanged."""

    def leaves(item: Any) -> list[Any]:
        return [leaf for one in item.args for leaf in leaves(one)] if isinstance(item, List) else [item]

    order = leaves(arguments[0])
    order = iter([order[-1], *order[1:-1], order[0]])

    def again(item: Any) -> Any:
        return List(*map(again, item.args)) if isinstance(item, List) else next(order)

    return [again(arguments[0]), *arguments[1:]]


@pytest.mark.parametrize("name", RECHUNKS)
def test_a_rechunk_with_another_function_is_not_known(name: str) -> None:
    tasks, source, output = rechunked(*RECHUNKS[name])
    key = next(key for key, task in tasks.items() if isinstance(task, Task))
    tasks[key] = Task(key, np.roll, *tasks[key].args, **tasks[key].kwargs)
    assert not layers.is_rechunk(tasks, source, output)


@pytest.mark.parametrize("name", RECHUNKS)
def test_a_rechunk_with_a_block_missing_is_not_known(name: str) -> None:
    tasks, source, output = rechunked(*RECHUNKS[name])
    del tasks[(output.name, *(0 for _ in output.shape))]
    assert not layers.is_rechunk(tasks, source, output)


def test_a_rechunk_that_reads_what_is_not_there_is_not_known() -> None:
    tasks, source, output = rechunked(*RECHUNKS["cut"])
    key = getitems(tasks)[0]
    task = tasks[key]
    for place in ((source.name, 5, 0), (source.name, 0), ("other", 0, 0), key):
        tasks[key] = Task(key, task.func, TaskRef(place), *task.args[1:])
        assert not layers.is_rechunk(tasks, source, output)


def test_two_blocks_of_one_axis_cannot_overlap() -> None:
    source = Layout("x", (4,), np.dtype("f8"), ((2, 2),), "numpy.ndarray")
    output = Layout("y", (4,), np.dtype("f8"), ((4,),), "numpy.ndarray")

    def joined(*places: int) -> Tasks:
        key = ("y", 0)
        references = List(*(TaskRef(("x", place)) for place in places))
        return {key: Task(key, da.core.concatenate3, references)}

    assert layers.is_rechunk(joined(0, 1), source, output)
    for places in ((0, 0), (1, 0), (1, 1), (0,), (0, 1, 1)):
        assert not layers.is_rechunk(joined(*places), source, output)


# trees


def tree(
    make: Callable[[da.Array], da.Array],
    source: da.Array,
    axes: tuple[int, ...],
    spelling: Callable[[Any], Tasks] = tasks_of,
) -> tuple[Tasks, str, tuple[int, ...], str, tuple[int, ...]]:
    """Arguments of ``tree_function`` for the first level of a reduction's tree."""
    array = make(source)
    names = [name for name in array.dask._toposort_layers() if name not in source.dask.layers]
    chunked, first = names[0], names[1]
    return (
        tasks_of(array.dask.layers[first]),
        chunked,
        source.numblocks,
        first,
        axes,
    )


TREES = {
    "sum of an axis": (lambda x: x.sum(axis=1), (1,), False, (3, 1)),
    "sum kept": (lambda x: x.sum(axis=1, keepdims=True), (1,), True, (3, 1)),
    "sum of all": (lambda x: x.sum(split_every=16), (0, 1), False, (1, 1)),
    "max": (lambda x: x.max(axis=0), (0,), False, (1, 4)),
    "mean": (lambda x: x.mean(axis=1), (1,), False, (3, 1)),
    "var": (lambda x: x.var(axis=0), (0,), False, (1, 4)),
    "any": (lambda x: x.any(axis=(0, 1)), (0, 1), True, (2, 2)),
    "partial sums": (lambda x: x.sum(axis=1, split_every=2), (1,), True, (3, 2)),
    "partial means": (lambda x: x.mean(axis=(0, 1), split_every=4), (0, 1), True, (2, 2)),
    "uneven partial maxima": (lambda x: x.max(axis=1, split_every=3), (1,), True, (3, 2)),
}


def level(name: str) -> tuple[Tasks, str, tuple[int, ...], str, tuple[int, ...]]:
    make, axes, *_ = TREES[name]
    return tree(make, a(6, 8), axes)


@pytest.mark.parametrize("name", TREES)
def test_a_level_of_a_tree_says_what_it_does(name: str) -> None:
    *_, keeps, groups = TREES[name]
    make, axes, *_ = TREES[name]
    for arguments in (level(name), tree(make, a(6, 8), axes, spelling=dict)):
        read = layers.tree_function(*arguments)
        assert read is not None
        function, kept, numblocks = read
        assert callable(function)
        assert (kept, numblocks) == (keeps, groups)


def test_the_function_of_a_tree_is_named_without_what_is_bound_to_it() -> None:
    function, *_ = layers.tree_function(*level("mean")) or (None,)
    assert layers.tree_base(function) is da.reductions.mean_agg
    function, *_ = layers.tree_function(*level("partial means")) or (None,)
    assert layers.tree_base(function) is da.reductions.mean_combine
    assert layers.tree_base(partial(partial(np.sum, axis=0), keepdims=True)) is np.sum


@pytest.mark.parametrize("name", TREES)
def test_a_tree_with_another_function_in_one_task_is_not_known(name: str) -> None:
    tasks, *rest = level(name)
    key, task = list(tasks.items())[-1]
    tasks[key] = Task(key, partial(np.max, axis=rest[-1], keepdims=False), *task.args)
    if len(tasks) > 1:
        assert layers.tree_function(tasks, *rest) is None
    tasks[key] = Task(key, np.ravel, *task.args)
    assert layers.tree_function(tasks, *rest) is None


@pytest.mark.parametrize("name", TREES)
def test_a_tree_with_two_blocks_swapped_is_not_known(name: str) -> None:
    tasks, *rest = level(name)
    key, task = next(iter(tasks.items()))
    tasks[key] = Task(key, task.func, *swapped(list(task.args)))
    assert layers.tree_function(tasks, *rest) is None


@pytest.mark.parametrize("name", TREES)
def test_a_tree_with_a_task_missing_is_not_known(name: str) -> None:
    tasks, *rest = level(name)
    tasks.popitem()
    assert layers.tree_function(tasks, *rest) is None


@pytest.mark.parametrize("name", [name for name in TREES if TREES[name][3] not in ((1, 1),)])
def test_a_tree_whose_results_are_swapped_is_not_known(name: str) -> None:
    tasks, *rest = level(name)
    first, *_, last = tasks
    one, two = tasks[first], tasks[last]
    tasks[first], tasks[last] = Task(first, two.func, *two.args), Task(last, one.func, *one.args)
    assert layers.tree_function(tasks, *rest) is None


@pytest.mark.parametrize("name", TREES)
def test_a_tree_that_reads_a_block_twice_is_not_known(name: str) -> None:
    tasks, *rest = level(name)
    key, task = next(iter(tasks.items()))

    def again(item: Any) -> Any:
        return List(*map(again, item.args)) if isinstance(item, List) else TaskRef(wanted)

    first = task.args[0]
    while isinstance(first, List):
        first = first.args[0]
    wanted = first.key
    tasks[key] = Task(key, task.func, again(task.args[0]))
    assert layers.tree_function(tasks, *rest) is None


def test_a_tree_over_other_axes_is_not_known() -> None:
    tasks, source, before, output, _ = level("sum of an axis")
    assert layers.tree_function(tasks, source, before, output, (0,)) is None
    assert layers.tree_function(tasks, source, before, output, (0, 1)) is None
    assert layers.tree_function({}, source, before, output, (1,)) is None


def test_tasks_of_either_spelling_are_read() -> None:
    assert layers.read_task((np.add, ("x", 0), 1)) == (np.add, (("x", 0), 1), {})
    task = Task("k", np.sum, TaskRef(("x", 0)), axis=0)
    assert layers.read_task(task) == (np.sum, (("x", 0),), {"axis": 0})
    assert layers.read_task(Alias("k", "x")) is None
    assert layers.read_task(3) is None
