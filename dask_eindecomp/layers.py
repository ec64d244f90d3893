"""What a materialised Dask layer does, checked task by task.

Dask writes out rechunks, insertions of axes, broadcasts and the trees of reductions as plain tasks.  Each reader here
takes such a layer, the layout of the one array it reads and of the one it gives, and tells what it is, or ``None``
if a single task is not what it should be.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from math import prod
from typing import Any

import dask.array.chunk
import dask.array.core
import numpy as np
from dask._task_spec import Alias, List, Task, TaskRef
from dask.array.reductions import _concatenate2
from dask.highlevelgraph import Layer, MaterializedLayer
from dask.utils import methodcaller
from tlz import compose

from dask_eindecomp.partition import Chunks, boundaries

__all__ = [
    "Layout",
    "broadcast_axes",
    "getitem_axes",
    "is_rechunk",
    "read_task",
    "reshape_axes",
    "tree_base",
    "tree_function",
]

Compose: Any = type(compose(len, str))  # toolz and cytoolz each have their own
GETITEMS = (operator.getitem, dask.array.chunk.getitem)
Axes = tuple["int | None", ...]
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What Dask says of an array."""

    name: str
    """First element of its keys."""
    shape: tuple[int, ...]
    """Length of each axis."""
    dtype: np.dtype[Any]
    """Element type."""
    chunks: Chunks
    """How each axis is cut."""
    kind: str
    """Qualified name of the type of its blocks."""

    @property
    def numblocks(self) -> tuple[int, ...]:
        """Blocks along each axis."""
        return tuple(map(len, self.chunks))

    def block(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one block."""
        return tuple(chunks[i] for chunks, i in zip(self.chunks, index))

    def box(self, index: tuple[int, ...]) -> Box:
        """Where one block begins and ends along each axis."""
        edges = [boundaries(chunks) for chunks in self.chunks]
        return tuple((edge[i], edge[i + 1]) for edge, i in zip(edges, index))


def read_task(task: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    """Function, positional and keyword arguments of a task in either of Dask's spellings; keys stand bare."""
    if isinstance(task, Task) and not isinstance(task, List):
        return (
            task.func,
            tuple(map(_bare, task.args)),
            {name: _bare(value) for name, value in task.kwargs.items()},
        )
    if isinstance(task, tuple) and task and callable(task[0]):
        return task[0], task[1:], {}
    return None


def is_held(layer: Layer) -> bool:
    """Whether a layer's blocks are there already, as a persisted array's are, and not made by tasks.

    >>> tasks = {("x", 0): np.ones(2)}, {("x", 0): (np.ones, 2)}
    >>> [is_held(MaterializedLayer(one)) for one in tasks]
    [True, False]
    """
    # any other kind of layer writes its tasks when it is asked for them
    if not isinstance(layer, MaterializedLayer):
        return False
    return all(read_task(task) is None and not isinstance(task, (Alias, List)) for task in layer.values())


def _bare(argument: Any) -> Any:
    """An argument with references to keys replaced by the keys."""
    if isinstance(argument, TaskRef):
        return argument.key
    if isinstance(argument, Alias):
        return argument.target
    if isinstance(argument, List):
        return [_bare(item) for item in argument.args]
    return argument


def _blocks(layer: Mapping[Any, Any], output: Layout) -> Iterator[tuple[tuple[int, ...], Any]] | None:
    """Index and task of every block, if the layer holds them all."""
    indices = list(product(*map(range, output.numblocks)))
    if any((output.name, *index) not in layer for index in indices):
        return None
    return ((index, layer[(output.name, *index)]) for index in indices)


def _source(key: Any, name: str) -> tuple[int, ...] | None:
    """Block index of a key of the array ``name``."""
    if isinstance(key, tuple) and key and key[0] == name:
        return key[1:]
    return None


def getitem_axes(layer: Mapping[Any, Any], source: Layout, output: Layout) -> Axes | None:
    """Source axis behind each axis of the result if the layer only inserts and drops axes of length 1."""
    blocks = _blocks(layer, output)
    if blocks is None or len(layer) != prod(output.numblocks):
        return None
    found: Axes | None = None
    for index, task in blocks:
        if isinstance(task, Alias):
            axes: Axes | None = tuple(range(len(source.shape)))
            before = _source(task.target, source.name)
        else:
            read = read_task(task)
            if read is None or read[0] not in GETITEMS or len(read[1]) != 2 or read[2]:
                return None
            before = _source(read[1][0], source.name)
            axes = None if before is None else _index_axes(read[1][1], source, before)
        if before is None or axes is None or (found is not None and axes != found):
            return None
        if found is None and not _lengths_agree(axes, source, output):
            return None
        if not _lines_up(axes, before, index, source):
            return None
        found = axes
    return found


def _index_axes(index: Any, source: Layout, before: tuple[int, ...]) -> Axes | None:
    """Axes that an index keeps, if all it does is to insert or drop axes of length 1."""
    if not isinstance(index, tuple):
        return None
    axes: list[int | None] = []
    axis = 0
    for item in index:
        if item is None:
            axes.append(None)
            continue
        if axis >= len(source.shape):
            return None
        if isinstance(item, slice):
            if item.indices(source.chunks[axis][before[axis]]) != (0, source.chunks[axis][before[axis]], 1):
                return None
            axes.append(axis)
        elif not (isinstance(item, (int, np.integer)) and source.shape[axis] == 1 and item in (0, -1)):
            return None
        axis += 1
    return (*axes, *range(axis, len(source.shape)))


def _lengths_agree(axes: Axes, source: Layout, output: Layout) -> bool:
    """Whether the axes of a result are cut as those of the source that they are, all others of length 1."""
    if len(axes) != len(output.shape):
        return False
    kept = all(
        wanted == ((1,) if axis is None else source.chunks[axis]) for axis, wanted in zip(axes, output.chunks)
    )
    return kept and all(source.chunks[axis] == (1,) for axis in range(len(source.shape)) if axis not in axes)


def _lines_up(axes: Axes, before: tuple[int, ...], after: tuple[int, ...], source: Layout) -> bool:
    """Whether a block of the result is the block of the source that the axes say."""
    return len(before) == len(source.shape) and all(
        axis is None or before[axis] == place for axis, place in zip(axes, after)
    )


def reshape_axes(layer: Mapping[Any, Any], source: Layout, output: Layout) -> Axes | None:
    """Source axis behind each axis of the result if the layer is a reshape that moves only axes of length 1."""
    long = [axis for axis, extent in enumerate(source.shape) if extent != 1]
    if [source.shape[axis] for axis in long] != [extent for extent in output.shape if extent != 1]:
        return None
    rest = iter(long)
    axes: Axes = tuple(next(rest) if extent != 1 else None for extent in output.shape)
    blocks = _blocks(layer, output)
    if blocks is None or len(layer) != prod(output.numblocks) or not _lengths_agree(axes, source, output):
        return None
    for index, task in blocks:
        read = read_task(task)
        if read is None or not _is_reshape(read[0]) or len(read[1]) != 2 or read[2]:
            return None
        before = _source(read[1][0], source.name)
        if before is None or tuple(read[1][1]) != output.block(index):
            return None
        if not _lines_up(axes, before, index, source):
            return None
    return axes


def _is_reshape(function: Any) -> bool:
    return function is np.reshape or (isinstance(function, methodcaller) and function.method == "reshape")


def broadcast_axes(layer: Mapping[Any, Any], source: Layout, output: Layout) -> Axes | None:
    """Source axis behind each axis of the result, None where it was broadcast, if the layer is ``broadcast_to``."""
    extra = len(output.shape) - len(source.shape)
    blocks = _blocks(layer, output)
    if extra < 0 or blocks is None or len(layer) != prod(output.numblocks):
        return None
    axes: Axes = tuple(
        position - extra if position >= extra and source.shape[position - extra] == extent else None
        for position, extent in enumerate(output.shape)
    )
    for index, task in blocks:
        read = read_task(task)
        if read is None or not _is_broadcast(read[0]) or len(read[1]) != 2:
            return None
        before = _source(read[1][0], source.name)
        if before is None or tuple(read[1][1]) != output.block(index):
            return None
        for position, axis in enumerate(axes):
            if axis is None:
                if position >= extra and (
                    source.shape[position - extra] != 1 or before[position - extra] != 0
                ):
                    return None
            elif before[axis] != index[position] or source.chunks[axis] != output.chunks[position]:
                return None
    return axes


def _is_broadcast(function: Any) -> bool:
    return function is np.broadcast_to or (
        isinstance(function, partial)
        and function.func is np.broadcast_to
        and set(function.keywords) <= {"subok"}
    )


def is_rechunk(layer: Mapping[Any, Any], source: Layout, output: Layout) -> bool:
    """Whether every block of the result is the same region of the source, whatever pieces it is put together from."""
    blocks = _blocks(layer, output)
    if blocks is None or source.shape != output.shape:
        return False
    seen: dict[Any, Box | None] = {}
    return all(
        _region((output.name, *index), layer, source, seen) == output.box(index) for index, _ in blocks
    )


def _region(key: Any, layer: Mapping[Any, Any], source: Layout, seen: dict[Any, Box | None]) -> Box | None:
    """The region of the source that a key of a rechunk holds."""
    if key in seen:
        return seen[key]
    index = _source(key, source.name)
    if index is not None:
        known = len(index) == len(source.shape) and all(0 <= i < n for i, n in zip(index, source.numblocks))
        return source.box(index) if known else None
    seen[key] = None  # a cycle ends here
    seen[key] = region = _task_region(layer.get(key), layer, source, seen)
    return region


def _task_region(
    task: Any, layer: Mapping[Any, Any], source: Layout, seen: dict[Any, Box | None]
) -> Box | None:
    if isinstance(task, Alias):
        return _region(task.target, layer, source, seen)
    read = read_task(task)
    if read is None:
        return None
    function, args, keywords = read
    if function in GETITEMS and len(args) == 2 and not keywords:
        whole = _region(args[0], layer, source, seen)
        return None if whole is None else _slice_region(whole, args[1])
    name = getattr(function, "__name__", "")
    if getattr(function, "__module__", "").startswith("dask.array") and not keywords:
        if name == "concatenate_shaped" and len(args) == 2:
            boxes = [_region(key, layer, source, seen) for key in args[0]]
            return _joined(np.array([*boxes, None], dtype=object)[:-1], tuple(args[1]))
        if name == "concatenate3" and len(args) == 1:
            flat, shape = _flatten(args[0])
            boxes = [_region(key, layer, source, seen) for key in flat]
            return _joined(np.array([*boxes, None], dtype=object)[:-1], shape)
    return None


def _slice_region(whole: Box, index: Any) -> Box | None:
    if not isinstance(index, tuple) or len(index) != len(whole):
        return None
    parts = []
    for (start, stop), item in zip(whole, index):
        if not isinstance(item, slice):
            return None
        first, last, step = item.indices(stop - start)
        if step != 1:
            return None
        parts.append((start + first, start + max(first, last)))
    return tuple(parts)


def _flatten(nested: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Leaves of nested lists in row-major order, and how many lists there are at each depth."""
    shape = []
    level = [nested]
    while level and isinstance(level[0], list):
        shape.append(len(level[0]))
        level = [item for group in level for item in group]
    return level, tuple(shape)


def _joined(boxes: Any, shape: tuple[int, ...]) -> Box | None:
    """The region that a grid of regions covers, if they lie side by side without gap or overlap."""
    if any(box is None for box in boxes) or len(boxes) != prod(shape):
        return None
    grid = boxes.reshape(shape)
    axes = len(boxes[0])
    if len(shape) != axes:
        return None
    edges = []
    for axis in range(axes):
        line = [grid[tuple(i if a == axis else 0 for a in range(axes))][axis] for i in range(shape[axis])]
        if any(one[1] != other[0] for one, other in pairwise(line)):
            return None
        edges.append(line)
    for index in product(*map(range, shape)):
        if any(grid[index][axis] != edges[axis][i] for axis, i in enumerate(index)):
            return None
    return tuple((line[0][0], line[-1][1]) for line in edges)


def tree_function(
    layer: Mapping[Any, Any], source: str, before: tuple[int, ...], output: str, axes: tuple[int, ...]
) -> tuple[Callable[..., Any], bool, tuple[int, ...]] | None:
    """One level of a reduction tree: its function, whether it keeps the reduced axes, its blocks with them kept.

    Every block of the source must be read exactly once, blocks along a reduced axis in order, and results must lie
    in that order, too.  ``before`` is how many blocks the source has along each axis.
    """
    function: Callable[..., Any] | None = None
    token = None
    used: set[Any] = set()
    places: dict[tuple[int, ...], tuple[int, ...]] = {}
    for key, task in layer.items():
        read = read_task(task)
        if read is None or len(read[1]) != 1 or read[2] or not isinstance(key, tuple) or key[0] != output:
            return None
        flat, shape = _flatten(read[1][0])
        if token is None:
            function, token = read[0], _function_token(read[0])
        elif read[0] is not function and _function_token(read[0]) != token:
            return None
        if len(shape) != len(axes) or prod(shape) != len(flat):
            return None
        indices = [_source(one, source) for one in flat]
        first = indices[0]
        if first is None or len(first) != len(before):
            return None
        ranges = [range(i, i + 1) for i in first]
        for axis, length in zip(axes, shape):
            ranges[axis] = range(first[axis], first[axis] + length)
        if indices != [*product(*ranges)] or not used.isdisjoint(indices):
            return None
        used.update(indices)
        places[key[1:]] = first
    if function is None or len(used) != prod(before):
        return None
    settings = _function_settings(function)
    if settings is None or tuple(settings.get("axis", ())) != axes:
        return None
    keeps = bool(settings.get("keepdims"))
    groups = tuple(
        len({place[axis] for place in places.values()}) if axis in axes else before[axis]
        for axis in range(len(before))
    )
    # where results go along a reduced axis follows where their blocks come from
    starts = [
        {start: number for number, start in enumerate(sorted({first[axis] for first in places.values()}))}
        for axis in range(len(before))
    ]
    for place, first in places.items():
        if keeps and any(place[axis] != starts[axis][first[axis]] for axis in axes):
            return None
        expected = tuple(i for axis, i in enumerate(first) if axis not in axes)
        kept = tuple(i for axis, i in enumerate(place) if axis not in axes) if keeps else place
        if kept != expected:
            return None
    return function, keeps, groups


def _function_settings(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Keywords bound to the aggregating part of a tree's function."""
    if isinstance(function, Compose):
        inner = function.first
        if len(function.funcs) != 1 or not (isinstance(inner, partial) and inner.func is _concatenate2):
            return None
        function = function.funcs[0]
    return dict(function.keywords) if isinstance(function, partial) else None


def _function_token(function: Callable[..., Any]) -> Any:
    """What two tasks of one tree level must have in common."""
    if isinstance(function, Compose):
        return ("compose", _function_token(function.first), tuple(map(_function_token, function.funcs)))
    if isinstance(function, partial):
        bound = tuple(sorted((name, repr(value)) for name, value in function.keywords.items()))
        return ("partial", _function_token(function.func), repr(function.args), bound)
    return function


def tree_base(function: Callable[..., Any]) -> Any:
    """The function itself, bound keywords and concatenation taken off."""
    if isinstance(function, Compose) and function.funcs:
        return tree_base(function.funcs[0])
    return tree_base(function.func) if isinstance(function, partial) else function
