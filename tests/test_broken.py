"""Graphs that are broken or say what is not so: Dask's own error or a clear one, and never a wait without end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer

from dask_eindecomp import EinDecomp, Topology

HOOK = EinDecomp(force=True, topology=Topology(workers=4))
BLOCKS = [*product(range(2), range(2))]


def array(layers: Mapping[str, Any], dependencies: Mapping[str, set[str]] | None = None) -> da.Array:
    """Four blocks of two by two, they say, of the first layer."""
    made = {name: one if isinstance(one, Layer) else MaterializedLayer(one) for name, one in layers.items()}
    needed = {name: (dependencies or {}).get(name, set()) for name in made}
    return da.Array(HighLevelGraph(made, needed), next(iter(made)), ((2, 2), (2, 2)), meta=np.empty((0, 0)))


def product_of(broken: da.Array) -> da.Array:
    return broken @ da.from_array(np.ones((4, 4)), chunks=2)


def of_blocks(block: Any) -> da.Array:
    return array({"a": {("a", *at): block for at in BLOCKS}})


def error_of(lazy: da.Array, **settings: Any) -> Exception:
    with dask.config.set(settings), pytest.raises(Exception) as found:
        dask.compute(lazy, scheduler="sync")
    return found.value


def waits_for_another() -> da.Array:
    return array({"a": {("a", *at): ("nowhere", *at) for at in BLOCKS}}, {"a": {"nowhere"}})


def lacks_a_block() -> da.Array:
    return array({"a": {("a", *at): np.ones((2, 2)) for at in BLOCKS[:3]}})


def layers_in_a_circle() -> da.Array:
    one, two = ({(name, *at): (other, *at) for at in BLOCKS} for name, other in ("ab", "ba"))
    return array({"a": one, "b": two}, {"a": {"b"}, "b": {"a"}})


@pytest.mark.parametrize("make", [waits_for_another, lacks_a_block, layers_in_a_circle])
def test_what_dask_cannot_run_ends_in_dasks_own_kind_of_error(make: Callable[[], da.Array]) -> None:
    plain = error_of(product_of(make()))
    assert type(error_of(product_of(make()), array_optimize=HOOK)) is type(plain)


def tasks_in_a_circle() -> da.Array:
    circle: dict[Any, Any] = {("a", 1, 0): np.ones((2, 2)), ("a", 1, 1): np.ones((2, 2))}
    circle |= {("a", 0, 0): (np.negative, ("a", 0, 1)), ("a", 0, 1): (np.negative, ("a", 0, 0))}
    return array({"a": circle})


def test_tasks_in_a_circle_are_named() -> None:
    error = error_of(product_of(tasks_in_a_circle()), array_optimize=HOOK)
    assert isinstance(error, RuntimeError)
    assert "('a', 0, " in str(error) and "waits for itself; expected a graph without a cycle" in str(error)
    lenient = {"array_optimize": HOOK, "eindecomp.strict": False}
    plain = error_of(product_of(tasks_in_a_circle()))
    assert type(error_of(product_of(tasks_in_a_circle()), **lenient)) is type(plain)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (np.ones((3, 2)), r"operand 0 of 'ij,jk->ik' has a block of shape \(3, 2\); expected \(2, 2\)"),
        (np.ones(2), r"has a block of shape \(2,\); expected \(2, 2\)"),
        (None, r"has a block that is no array but a NoneType; expected an array of shape \(2, 2\)"),
        ("block", "has a block that is no array but a str"),
        (np.full((2, 2), "x"), "could not convert string to float"),
    ],
)
def test_blocks_that_are_not_what_the_graph_says_are_named(block: Any, message: str) -> None:
    with dask.config.set(array_optimize=HOOK), pytest.raises(ValueError, match=message):
        product_of(of_blocks(block)).compute(scheduler="sync")


def test_blocks_of_another_element_type_than_the_graph_says_count_as_what_they_are_worth() -> None:
    with dask.config.set(array_optimize=HOOK):
        found = product_of(of_blocks(np.full((2, 2), 3, dtype="int8"))).compute(scheduler="sync")
    np.testing.assert_array_equal(found, np.full((4, 4), 12.0))


class Strange(Layer):
    """A kind of layer that nobody has heard of."""

    def __getitem__(self, key: Any) -> Any:
        return np.ones((2, 2))

    def __iter__(self) -> Any:
        return iter([("strange", *at) for at in BLOCKS])

    def __len__(self) -> int:
        return len(BLOCKS)

    def is_materialized(self) -> bool:
        return False

    def get_output_keys(self) -> set[Any]:
        return {*self}

    def cull(self, keys: set[Any], all_hlg_keys: Any) -> tuple[Layer, Mapping[Any, set[Any]]]:
        return self, {key: set() for key in self}


def test_an_unknown_kind_of_layer_is_run_as_it_is() -> None:
    with dask.config.set(array_optimize=HOOK):
        found = product_of(array({"strange": Strange()})).compute(scheduler="sync")
    np.testing.assert_array_equal(found, np.full((4, 4), 4.0))


def test_chunks_changed_behind_a_graphs_back_are_not_planned_with() -> None:
    x = da.from_array(np.arange(16.0).reshape(4, 4), chunks=2)
    y = x @ x
    y._chunks = ((1, 3), (2, 2))
    with dask.config.set(array_optimize=HOOK):
        np.testing.assert_array_equal((y + 1).compute(scheduler="sync"), x.compute() @ x.compute() + 1)


def test_axes_in_very_many_blocks_are_planned() -> None:
    ones = da.ones(20_000, chunks=1)
    with dask.config.set(array_optimize=HOOK):
        graph = dict(dask.optimize(ones @ ones)[0].__dask_graph__())
    assert len(graph) == 20_001  # the blocks, and one task that multiplies them all


def test_what_is_far_too_large_is_left_to_dask_with_what_it_would_take() -> None:
    large = da.ones((10**6, 10**6), chunks=10**5)
    plan = HOOK.plan((large @ large).dask, (large @ large).__dask_keys__())[2]
    assert "needs" in plan.refused and "more workers would do" in plan.refused
