"""Planned layers and those that stay make one graph, in which no key has two meanings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph

from dask_eindecomp import EinDecomp, Topology
from dask_eindecomp.splice import taken_over

X = np.arange(144.0).reshape(12, 12)


def doubled(block: np.ndarray) -> np.ndarray:
    return 2 * block


def by_key(key: Any) -> int:
    return len(key)


def expression(later: Callable[[da.Array], da.Array] = lambda array: array) -> da.Array:
    """A product that something reads which nobody plans, then another product."""
    a = da.from_array(X, chunks=4)
    b = (a @ a).map_blocks(doubled, dtype=float)
    return later(b) @ a


def planned(array: da.Array, workers: int) -> HighLevelGraph:
    hook = EinDecomp(force=True, topology=Topology(workers=workers, flops=1e4))
    return hook(array.dask, array.__dask_keys__())


def tasks(graph: HighLevelGraph) -> dict[Any, Any]:
    return {key: task for layer in graph.layers.values() for key, task in layer.items()}


def computed(graph: HighLevelGraph, array: da.Array) -> np.ndarray:
    blocks = dask.get(graph, array.__dask_keys__())
    return np.block([[np.asarray(block) for block in row] for row in blocks])


def test_what_two_plans_make_differently_has_two_keys() -> None:
    array = expression()
    some, other = planned(array, 2), planned(array, 3)
    wanted = set(flatten(array.__dask_keys__()))
    shared = tasks(some).keys() & tasks(other).keys()
    assert shared > wanted
    for key in shared - wanted:  # the data, which no plan makes
        assert not tasks(some)[key].dependencies and not tasks(other)[key].dependencies
    for graph in (some, other):
        assert wanted <= tasks(graph).keys()
        np.testing.assert_allclose(computed(graph, array), 2 * X @ X @ X)


def test_the_same_plan_has_the_same_keys() -> None:
    some, other = planned(expression(), 3), planned(expression(), 3)
    assert tasks(some).keys() == tasks(other).keys()


def test_a_task_with_annotations_keeps_its_key() -> None:
    def annotated(array: da.Array) -> da.Array:
        with dask.annotate(priority=by_key):
            return array.map_blocks(doubled, dtype=float)

    array = expression(annotated)
    (name,) = (name for name, layer in array.dask.layers.items() if layer.annotations)
    graph = planned(array, 3)
    marked = {key for layer in graph.layers.values() if layer.annotations for key in layer}
    assert {key for key in marked if key[0] == name} == {(name, i, j) for i in range(3) for j in range(3)}
    np.testing.assert_allclose(computed(graph, array), 4 * X @ X @ X)


def test_what_a_scheduler_makes_in_another_way_is_made_in_that_way() -> None:
    array = expression()
    first, second = planned(array, 2), planned(array, 3)
    graph = taken_over(second, array.__dask_keys__(), tasks(first).get)
    for key in flatten(array.__dask_keys__()):
        assert tasks(graph)[key] is tasks(first)[key]
    for key, task in tasks(graph).items():
        assert task.dependencies <= tasks(graph).keys()
        if key in tasks(first):
            assert task.dependencies == tasks(first)[key].dependencies
    np.testing.assert_allclose(computed(graph, array), 2 * X @ X @ X)


def test_only_blocks_that_are_made_in_another_way_are_taken_over() -> None:
    array = expression()
    first, second = planned(array, 2), planned(array, 3)
    one, *others = flatten(array.__dask_keys__())
    graph = taken_over(
        second, array.__dask_keys__(), lambda key: tasks(first).get(key) if key not in others else None
    )
    assert tasks(graph)[one] is tasks(first)[one]
    for key in others:
        assert tasks(graph)[key] is tasks(second)[key]
    np.testing.assert_allclose(computed(graph, array), 2 * X @ X @ X)


def test_what_nobody_knows_or_makes_otherwise_is_left() -> None:
    array = expression()
    graph = planned(array, 3)
    for known in (lambda key: None, tasks(planned(array, 3)).get):
        assert taken_over(graph, array.__dask_keys__(), known) is graph


def test_what_rests_on_data_that_nobody_here_holds_is_not_taken_over() -> None:
    array = expression()
    second = planned(array, 3)
    first = {key: task for key, task in tasks(planned(array, 2)).items() if task.dependencies}
    lost = {key: task.substitute({data: "lost" for data in task.dependencies}) for key, task in first.items()}
    assert taken_over(second, array.__dask_keys__(), lost.get) is second


def test_data_of_the_user_is_not_made_again() -> None:
    array = expression()
    first, second = planned(array, 2), planned(array, 3)
    data = next(key for key, task in tasks(second).items() if not task.dependencies)
    other = tasks(first)[next(iter(flatten(array.__dask_keys__())))]
    known = tasks(first) | {data: other}
    graph = taken_over(second, array.__dask_keys__(), known.get)
    assert tasks(graph)[data] is tasks(second)[data]
