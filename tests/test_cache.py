"""A plan is made once for all graphs that differ in names alone."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import dask.array as da
import numpy as np
import pytest

from dask_eindecomp import EinDecomp, Topology, explain, hook
from dask_eindecomp.cache import Plans, canonical
from dask_eindecomp.decompose import decompose
from dask_eindecomp.graph import EinGraph
from dask_eindecomp.plan import Plan

FOUR = Topology(workers=4)


def chain(prefix: str = "", extent: int = 16, aggregate: Any = "sum", **spec: Any) -> EinGraph:
    """A product of three matrices and its row sums, under names of one's own."""
    a, b, c, t, r, s = (f"{prefix}{name}" for name in "ABCTRS")
    return EinGraph.from_spec(
        {name: (extent, extent) for name in (a, b, c)},
        {
            t: ("ij,jk->ik", a, b),
            r: ("ij,jk->ik", t, c),
            s: ("ij->i", r, {"aggregate": aggregate}),
        },
        [s],
        **spec,
    )


class Counting:
    """Plans, and counts how often."""

    def __init__(self, graph: EinGraph) -> None:
        self.graph = graph
        self.calls = 0

    def __call__(self) -> Plan:
        self.calls += 1
        return decompose(self.graph, topology=FOUR)


def planned(plans: Plans, graph: EinGraph, settings: object = None) -> tuple[Plan, int]:
    """The plan of a graph and how often it was made anew for it."""
    make = Counting(graph)
    return plans.plan(graph, graph, settings, make), make.calls


def test_the_same_graph_is_planned_once() -> None:
    plans = Plans()
    first, made = planned(plans, chain())
    again, made_again = planned(plans, chain())
    assert (made, made_again) == (1, 0)
    assert first == again


def test_other_names_are_the_same_graph_and_the_plan_has_the_names_asked_for() -> None:
    plans = Plans()
    planned(plans, chain("x-"))
    graph = replace(chain("y-"), left_alone=(("layer", "reason"),))
    plan, made = planned(plans, graph)
    assert made == 0
    assert replace(plan, left_alone=()) == decompose(chain("y-"), topology=FOUR)
    assert plan.left_alone == graph.left_alone
    assert list(plan.partitions) == list(graph.nodes)


@pytest.mark.parametrize(
    "other",
    [
        chain(extent=17),
        chain(dtype="float32"),
        chain(aggregate="max"),
        chain(chunks={"A": ((8, 8), (16,))}),
        replace(chain(), outputs=(replace(chain().outputs[0], chunks=((16,),)),)),
        replace(chain(), outputs=(*chain().outputs, replace(chain().outputs[0], name="T", source="T"))),
        replace(chain(), nodes={n: replace(one, kernel="loop") for n, one in chain().nodes.items()}),
        replace(chain(), nodes={n: replace(one, tasks=7) for n, one in chain().nodes.items()}),
        replace(chain(), inputs={n: replace(one, stays=True) for n, one in chain().inputs.items()}),
    ],
)
def test_whatever_a_plan_depends_on_tells_graphs_apart(other: EinGraph) -> None:
    assert canonical(chain()) != canonical(other)
    plans = Plans()
    planned(plans, chain())
    assert planned(plans, other)[1] == 1


def test_which_tensor_an_expression_reads_tells_graphs_apart() -> None:
    inputs = {"A": (4, 4), "B": (4, 4)}
    same = EinGraph.from_spec(inputs, {"Z": ("ij,jk->ik", "A", "A"), "Y": ("ij->ij", "B")}, ["Z", "Y"])
    two = EinGraph.from_spec(inputs, {"Z": ("ij,jk->ik", "A", "B"), "Y": ("ij->ij", "B")}, ["Z", "Y"])
    assert canonical(same) != canonical(two)


def test_settings_tell_plans_apart() -> None:
    plans = Plans()
    assert [planned(plans, chain(), one)[1] for one in ("a", "b", "a")] == [1, 1, 0]


def test_what_was_asked_for_longest_ago_is_forgotten_first() -> None:
    plans = Plans(most=2)
    made = [planned(plans, chain(extent=n))[1] for n in (2, 3, 2, 4, 2, 3)]
    assert made == [1, 1, 0, 1, 0, 1]
    assert len(plans) == 2
    plans.clear()
    assert len(plans) == 0


def test_a_plan_that_fails_is_not_remembered() -> None:
    plans = Plans()

    def fail() -> Plan:
        raise LookupError("not today")

    with pytest.raises(LookupError, match="not today"):
        plans.plan(chain(), chain(), None, fail)
    assert planned(plans, chain())[1] == 1


def test_many_threads_may_ask_at_once() -> None:
    plans, found, barrier = Plans(most=3), [], threading.Barrier(8)

    def ask(number: int) -> None:
        barrier.wait()
        for step in range(40):
            extent = 4 + (number + step) % 5
            plan, _ = planned(plans, chain(f"{number}-", extent))
            found.append(plan == decompose(chain(f"{number}-", extent), topology=FOUR))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 * 40 and all(found)
    assert len(plans) == 3


# in the hook


def product(name: str, extent: int = 64) -> da.Array:
    """A product of an array of this name with itself."""
    x = da.from_array(np.ones((extent, extent)), chunks=16, name=name)
    return da.einsum("ij,jk,kl->il", x, x, x)


def test_the_hook_plans_a_graph_of_another_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = hook.decompose
    monkeypatch.setattr(hook, "decompose", lambda *a, **k: calls.append(a) or original(*a, **k))
    one, other = (explain(product(name), topology=FOUR) for name in ("one", "other"))
    assert len(calls) == 1
    assert [choice.partition for choice in one.choices] == [choice.partition for choice in other.choices]
    assert one.choices[-1].name != other.choices[-1].name
    assert (one.seconds, one.baseline_seconds) == (other.seconds, other.baseline_seconds)


@pytest.mark.parametrize(
    "setting",
    [
        {"topology": Topology(workers=3)},
        {"objective": "bytes"},
        {"memory_limit": 1 << 20},
        {"max_block_bytes": 1 << 14},
        {"max_tasks": 500},
    ],
)
def test_a_setting_that_matters_is_part_of_what_is_remembered(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]
) -> None:
    calls = []
    original = hook.decompose
    monkeypatch.setattr(hook, "decompose", lambda *a, **k: calls.append(a) or original(*a, **k))
    explain(product("one"), hook=EinDecomp(topology=FOUR))
    explain(product("one"), hook=EinDecomp(**({"topology": FOUR} | setting)))
    assert len(calls) == 2


def test_a_remembered_plan_computes_what_its_own_graph_says() -> None:
    planned_hook = EinDecomp(force=True, topology=FOUR)
    import dask

    for seed, name in enumerate(("one", "other")):
        x = np.random.default_rng(seed).normal(size=(64, 64))
        a = da.from_array(x, chunks=16, name=name)
        with dask.config.set(array_optimize=planned_hook, scheduler="synchronous"):
            np.testing.assert_allclose((a @ a + a).compute(), x @ x + x)
    assert len(hook.PLANS) == 1
