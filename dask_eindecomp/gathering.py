"""Arrays that ``compute`` puts together in one piece: their blocks may be read in any chunks.

Dask wants one key then, of a task that reads every block of an array and nothing else::

    blocks ──▶ finalize-…        becomes        planned blocks ──▶ finalize-…
    (as promised)                               (as they are computed)
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from dask._task_spec import Alias, List, Task, TaskRef
from dask.array.core import finalize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

__all__ = ["gathered", "regathered", "without"]


def gathered(dsk: HighLevelGraph, keys: Any) -> dict[str, list[Any]]:
    """Of the keys wanted those of tasks that put an array together, and the keys of all its blocks.

    >>> import dask.array as da
    >>> from dask._task_spec import List, Task, TaskRef
    >>> x = da.ones((4,), chunks=2)
    >>> task = Task("end", finalize, List(*map(TaskRef, x.__dask_keys__())))
    >>> dsk = HighLevelGraph(x.dask.layers | {"end": MaterializedLayer({"end": task})}, x.dask.dependencies)
    >>> gathered(dsk, ["end"]) == {"end": x.__dask_keys__()}
    True
    """
    found = {}
    for key in flatten(keys, container=(list, set)):
        layer = dsk.layers.get(key) if isinstance(key, str) else None
        if isinstance(layer, MaterializedLayer) and len(layer) == 1:
            task = layer.mapping.get(key)
            if isinstance(task, Task) and task.func is finalize and len(task.args) == 1 and not task.kwargs:
                blocks = _every_block(task.args[0])
                if blocks and set(blocks) == _blocks(dsk, blocks[0][0]):
                    found[key] = blocks
    return found


def _blocks(dsk: HighLevelGraph, name: str) -> set[Any]:
    """Keys of an array's blocks; none if no layer has its name."""
    keys = dsk.layers[name].get_output_keys() if name in dsk.layers else ()
    return {key for key in keys if isinstance(key, tuple) and key[0] == name}


def regathered(key: str, name: str, numblocks: tuple[int, ...]) -> Task:
    """The task of a key that puts an array of so many blocks along each axis together."""
    return Task(key, finalize, _nested(name, numblocks))


def without(dsk: HighLevelGraph, names: Iterable[str]) -> HighLevelGraph:
    """The graph without some layers that no other reads."""
    gone = set(names)
    layers = {name: layer for name, layer in dsk.layers.items() if name not in gone}
    return HighLevelGraph(layers, {name: dsk.dependencies[name] for name in layers})


def _every_block(blocks: Any) -> list[Any]:
    """Keys of nested references, if these may be all blocks of one array; none if they are anything else."""
    shape, first = [], blocks
    while isinstance(first, List) and first.args:
        shape.append(len(first.args))
        first = first.args[0]
    key = _key(first)
    if not isinstance(key, tuple):
        return []
    name, *index = key
    numblocks = tuple(shape) if index else ()
    every = [(name, *at) for at in product(*map(range, numblocks))]
    return every if _keys(blocks) == every and len(index) == len(numblocks) else []


def _keys(blocks: Any) -> list[Any]:
    """Keys of nested references in order."""
    if isinstance(blocks, List):
        return [key for one in blocks.args for key in _keys(one)]
    return [_key(blocks)]


def _key(argument: Any) -> Any:
    """The key that an argument of a task refers to; None if it is none."""
    # a task of Dask 2025.4 holds an Alias for each TaskRef it is given
    if isinstance(argument, Alias):
        return argument.target
    return argument.key if isinstance(argument, TaskRef) else None


def _nested(name: str, numblocks: tuple[int, ...], *index: int) -> Any:
    """References to every block, nested as the keys of an array are."""
    if not numblocks:
        reference = TaskRef((name, *index))
        return reference if index else List(reference)
    return List(*(_nested(name, numblocks[1:], *index, number) for number in range(numblocks[0])))
