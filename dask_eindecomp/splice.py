"""Planned layers put back into the graph they came from.

Layers that stay go through Dask's own optimiser as if the planned arrays were data, so they fuse among themselves and
never across the border.  Dask walks graphs layer by layer, so layers must read each other in one direction: what stays
is sorted into layers by how many planned layers lie between it and the data.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from dask._task_spec import DataNode, convert_legacy_graph
from dask.array.optimization import optimize as dask_optimize
from dask.base import tokenize
from dask.blockwise import fuse_roots, optimize_blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer

from dask_eindecomp.plan import PLACED, PLANNED

__all__ = ["fused_blockwise", "splice", "taken_over"]

Tasks = dict[Any, Any]


def splice(
    dsk: HighLevelGraph,
    keys: Any,
    outside: frozenset[str],
    planned: Mapping[str, Tasks],
    reads: Iterable[Any],
    outputs: Iterable[str],
    token: str,
    workers: Mapping[Any, str],
    strict: bool = False,
    ends: Mapping[str, Layer] | None = None,
    purposes: Mapping[str, str] | None = None,
) -> HighLevelGraph:
    """One graph of planned layers and those that stay.

    What is wanted keeps its keys.  Other tasks that planned layers give, or that depend on them, carry the plan in their
    keys: a scheduler that gets two graphs with one expression in common, planned in two ways, must not take them for
    the same.

    Parameters
    ----------
    dsk, keys
        The graph as it came and what is wanted of it.
    outside
        Names of the layers that stay.
    planned
        Tasks of every planned layer.
    reads
        Keys of layers that stay which planned layers read.
    outputs
        Names of the arrays that planned layers give.
    token
        Digest of the plan.
    workers
        Address of the worker that a task is meant for.
    strict
        Whether no other may run it; else another may if that one is busy or gone.
    ends
        Layers to add that read what planned layers give.
    purposes
        For a scheduler that is to know the tasks for a plan's, what planned layers do.
    """
    promised = set(outputs) & set(dsk.layers)
    wanted = [key for key in flatten(keys, container=(list, set)) if _name(key) not in promised]
    staying = _staying(dsk, outside, [*wanted, *sorted(reads, key=str)], promised)
    own = _own_keys(planned, staying, set(flatten(keys, container=(list, set))), promised, token[:16])
    planned = {name: _renamed(tasks, own) for name, tasks in planned.items()}
    staying = {marks: _renamed(tasks, own) for marks, tasks in staying.items()}
    workers = {own.get(key, key): worker for key, worker in workers.items()}
    layers: dict[str, Layer] = {
        name: MaterializedLayer(tasks, annotations=_meant_for(tasks, workers, strict))
        for name, tasks in planned.items()
    }
    for (level, marks), tasks in _by_level(planned, staying).items():
        name = f"outside-{level}-{tokenize(token, level, marks)[:16]}"
        made = {
            key: task for key, task in tasks.items() if not task.dependencies
        }  # others run where their data are
        layers[name] = MaterializedLayer(
            tasks, annotations=dict(marks) if marks else _meant_for(made, workers, strict)
        )
    for name, layer in (ends or {}).items():
        layers[name] = MaterializedLayer(_renamed(dict(layer), own), annotations=layer.annotations)
    if purposes is not None:
        layers = {
            name: MaterializedLayer(
                dict(layer), annotations={**(layer.annotations or {}), PLANNED: purposes.get(name, "")}
            )
            for name, layer in layers.items()
        }
    return _linked(layers)


def _linked(layers: Mapping[str, Layer]) -> HighLevelGraph:
    """The graph of these layers."""
    owners = {key: name for name, layer in layers.items() for key in layer}
    dependencies = {
        name: {owners[key] for task in layer.values() for key in task.dependencies if key in owners} - {name}
        for name, layer in layers.items()
    }
    return HighLevelGraph(layers, dependencies)


def _own_keys(
    planned: Mapping[str, Tasks],
    staying: Mapping[Hashable, Tasks],
    wanted: set[Any],
    promised: set[str],
    mark: str,
) -> dict[Any, Any]:
    """New keys of tasks that are what they are by the plan and that nobody outside the graph knows."""
    readers: dict[Any, list[Any]] = {}
    for tasks in staying.values():
        for key, task in tasks.items():
            for source in task.dependencies:
                readers.setdefault(source, []).append(key)
    given = [key for tasks in planned.values() for key in tasks]
    after: set[Any] = set()
    stack = list(given)
    while stack:
        for key in readers.get(stack.pop(), ()):
            if key not in after:
                after.add(key)
                stack.append(key)
    # what users wrote on a task may look at its key
    free = {key for marks, tasks in staying.items() if marks is None for key in tasks}
    mine = [key for key in given if _name(key) in promised] + [*(after & free)]
    return {key: _marked(key, mark) for key in mine if key not in wanted}


def _marked(key: Any, mark: str) -> Any:
    """A key of its own for one plan."""
    return (f"{key[0]}-{mark}", *key[1:]) if isinstance(key, tuple) else f"{key}-{mark}"


def _renamed(tasks: Tasks, own: Mapping[Any, Any]) -> Tasks:
    """The same tasks under their own keys, reading others under theirs."""
    return {
        own.get(key, key): task.substitute(own, key=own.get(key, key))
        if key in own or not own.keys().isdisjoint(task.dependencies)
        else task
        for key, task in tasks.items()
    }


def taken_over(graph: HighLevelGraph, keys: Any, known: Callable[[Any], Any]) -> HighLevelGraph:
    """The graph with what is wanted made as a scheduler already makes it, where it does so in another way.

    Of two ways to make one key a scheduler keeps the first, warns, and may mix both.

    Parameters
    ----------
    graph, keys
        A graph and what is wanted of it.
    known
        Gives for a key the task that makes it, or None.
    """
    stack = [key for key in flatten(keys, container=(list, set)) if known(key) is not None]
    if not stack:
        return graph
    mine = {key: task for layer in graph.layers.values() for key, task in layer.items()}
    theirs: Tasks = {}
    while stack:
        key = stack.pop()
        task = None if key in theirs else known(key)
        if task is None and key not in theirs and key not in mine:
            return graph  # data that nobody here holds: it may be gone by the time it is needed
        if task is None or (key in mine and mine[key].dependencies in (set(), task.dependencies)):
            continue  # nobody makes it, or as is done here; a future of the user's has no task here that reads others
        theirs[key] = task
        stack += task.dependencies
    if not theirs:
        return graph
    name = f"known-{tokenize(sorted(map(str, theirs)))[:16]}"
    kept = {
        one: {key: task for key, task in layer.items() if key not in theirs}
        for one, layer in graph.layers.items()
    }
    layers = {
        one: MaterializedLayer(tasks, annotations=graph.layers[one].annotations)
        for one, tasks in kept.items()
    }
    return _linked(layers | {name: MaterializedLayer(theirs)})


def fused_blockwise(dsk: HighLevelGraph, keys: Any) -> HighLevelGraph:
    """What Dask's optimiser makes of layers before it looks at tasks: after that, what users wrote on them is lost."""
    return fuse_roots(optimize_blockwise(dsk, keys=keys), keys=keys)


def _meant_for(tasks: Tasks, workers: Mapping[Any, str], strict: bool) -> dict[str, Any] | None:
    """Annotations that put the tasks of a layer on their workers."""
    places = {key: workers[key] for key in tasks if key in workers}
    if not places:
        return None
    return {"workers": places.get, "allow_other_workers": not strict, PLACED: True}


def _name(key: Any) -> Any:
    """First element of a key of an array; other keys stand for themselves."""
    return key[0] if isinstance(key, tuple) else key


def _staying(
    dsk: HighLevelGraph, outside: frozenset[str], keys: list[Any], promised: set[str]
) -> dict[Hashable, Tasks]:
    """Tasks that stay, by the annotations they carry (None for none)."""
    if not outside:
        return {}
    layers: dict[str, Any] = {name: layer for name, layer in dsk.layers.items() if name in outside}
    dependencies = {name: dsk.dependencies[name] & (outside | promised) for name in layers}
    annotated = any(layer.annotations for layer in layers.values())
    stubs = [
        key for name in sorted(promised) for key in dsk.layers[name].get_output_keys() if _name(key) == name
    ]
    for name in promised:
        layers[name] = MaterializedLayer({key: DataNode(key, None) for key in stubs if _name(key) == name})
        dependencies[name] = set()
    part = HighLevelGraph(layers, dependencies)
    every = [*keys, *stubs]
    if not annotated:
        tasks = convert_legacy_graph(dict(dask_optimize(part, every)))
        return {None: {key: task for key, task in tasks.items() if _name(key) not in promised}}
    fused = fused_blockwise(part, every)
    marks = {key: _frozen(layer.annotations) for layer in fused.layers.values() for key in layer}
    tasks = convert_legacy_graph(fused.to_dict())
    found: dict[Hashable, Tasks] = {}
    stack = list(keys)
    seen = set(stubs)
    while stack:
        key = stack.pop()
        if key not in seen and key in tasks:
            seen.add(key)
            found.setdefault(marks.get(key), {})[key] = tasks[key]
            stack += tasks[key].dependencies
    return found


class _Annotations(tuple[Any, ...]):
    """Items of a layer's annotations, told apart by identity where they cannot be hashed."""

    def __hash__(self) -> int:
        return hash(str(self))


def _frozen(annotations: Mapping[str, Any] | None) -> Hashable:
    """Annotations as a key to group tasks by."""
    return _Annotations(sorted(annotations.items())) if annotations else None


def _by_level(
    planned: Mapping[str, Tasks], staying: Mapping[Hashable, Tasks]
) -> dict[tuple[int, Any], Tasks]:
    """Tasks that stay by their level and annotations.

    A task is one level above the planned layers it reads, and above tasks with other annotations; a planned layer is
    as high as the highest it reads.
    """
    owners = {key: name for name, tasks in planned.items() for key in tasks}
    single = {key: task for tasks in staying.values() for key, task in tasks.items()}
    marked = {key: marks for marks, tasks in staying.items() for key in tasks}

    def reads(unit: Any) -> list[Any]:
        tasks = planned[unit[1]].values() if unit[0] else [single[unit[1]]]
        found = {key for task in tasks for key in task.dependencies}
        units = {(True, owners[key]) if key in owners else (False, key) for key in found}
        return [one for one in units if one != unit and (one[0] or one[1] in single)]

    def crosses(unit: Any, source: Any) -> bool:
        return not unit[0] and (source[0] or marked[source[1]] != marked[unit[1]])

    levels: dict[Any, int] = {}
    below: dict[Any, list[Any]] = {}
    for start in [*((True, name) for name in planned), *((False, key) for key in single)]:
        stack = [start]
        while stack:
            unit = stack[-1]
            if unit in levels:
                stack.pop()
                continue
            if unit not in below:
                below[unit] = reads(unit)
                stack += [one for one in below[unit] if one not in levels]
                continue
            stack.pop()
            found = below.pop(unit)
            if any(one not in levels for one in found):
                raise RuntimeError(f"{unit[1]!r} waits for itself; expected a graph without a cycle")
            levels[unit] = max((levels[one] + crosses(unit, one) for one in found), default=0)
    grouped: dict[tuple[int, Any], Tasks] = {}
    for key, task in single.items():
        grouped.setdefault((levels[(False, key)], marked[key]), {})[key] = task
    return grouped
