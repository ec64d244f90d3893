"""``dask.annotate(eindecomp=...)``: layers left alone, and cuts fixed by hand around which the rest is planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

from dask_eindecomp import EinDecomp, Plan, Topology, einsum, explain
from dask_eindecomp.annotations import AnnotationError

MACHINES = Topology(workers=4)
HOOK = EinDecomp(force=True, topology=MACHINES)
VALUES = np.random.default_rng(0).integers(0, 9, (12, 12))


def lazy(chunks: int = 3) -> da.Array:
    return da.from_array(VALUES, chunks=chunks)


def annotated(
    said: Any, make: Callable[[da.Array], da.Array] = lambda x: da.einsum("ba,ac->bc", x, x)
) -> da.Array:
    with dask.annotate(eindecomp=said):
        return make(lazy())


def planned(*arrays: da.Array, hook: EinDecomp = HOOK) -> Plan:
    return explain(*arrays, hook=hook)


def cuts(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Cuts of the plan's only expression."""
    (choice,) = plan.choices
    return dict(choice.cuts.cuts)


def test_false_leaves_the_layers_alone_and_plans_the_rest() -> None:
    x = lazy()
    inner = annotated(False)
    plan = planned(inner @ x)
    assert len(plan.choices) == 1
    assert {reason for name, reason in plan.left_alone} == {"annotated with eindecomp=False"}
    with dask.config.set(array_optimize=HOOK):
        assert ((inner @ x).compute(scheduler="sync") == VALUES @ VALUES @ VALUES).all()


def test_what_is_left_alone_altogether_is_what_dask_makes_of_it() -> None:
    plain = da.einsum("ba,ac->bc", lazy(), lazy())
    with dask.config.set(array_optimize=HOOK):
        alone = dask.optimize(annotated(False))[0].__dask_graph__()
    assert set(dict(alone)) == set(dict(dask.optimize(plain)[0].__dask_graph__()))


def test_true_and_none_say_nothing() -> None:
    bare = planned(da.einsum("ba,ac->bc", lazy(), lazy()))
    for said in (True, None):
        plan = planned(annotated(said))
        assert plan.partitions == bare.partitions
        assert plan.verdict == "applied: forced"


def test_parts_of_a_label_that_the_user_wrote_are_kept() -> None:
    # the plan's own letters are i, j, k: of b, a, c
    for label, mine in {"b": "i", "a": "j", "c": "k"}.items():
        plan = planned(annotated({"partition": {label: 6}}))
        assert cuts(plan)[mine] == (2,) * 6
        assert plan.choices[0].reason == f"fixed by hand: {mine}"


def test_the_other_labels_are_planned_around_it() -> None:
    plan = planned(annotated({"partition": {"a": 1, "b": 2}}))
    found = cuts(plan)
    assert (len(found["i"]), len(found["j"])) == (2, 1)
    every = [planned(annotated({"partition": {"a": 1, "b": 2, "c": parts}})) for parts in (1, 2, 4, 8)]
    assert plan.cost == min(one.cost for one in every)


def test_parts_may_be_chunks_of_any_length() -> None:
    plan = planned(annotated({"partition": {"c": (1, 4, 7), "a": np.int64(2)}}))
    assert (cuts(plan)["k"], cuts(plan)["j"]) == ((1, 4, 7), (6, 6))


def test_parts_fixed_by_hand_count_among_the_tiles() -> None:
    hook = EinDecomp(force=True, topology=MACHINES, objective="bytes")
    (choice,) = planned(annotated({"partition": {"a": 2}}), hook=hook).choices
    assert choice.tiles == 4
    (choice,) = planned(annotated({"partition": {"a": 6}}), hook=hook).choices
    assert choice.tiles == 6


def test_equal_expressions_beside_it_are_free() -> None:
    fixed = annotated({"partition": {"a": (1, 4, 7)}})
    x = da.from_array(VALUES + 1, chunks=3)
    plan = planned(fixed, da.einsum("ba,ac->bc", x, x))
    assert [dict(one.cuts.cuts)["j"] == (1, 4, 7) for one in plan.choices].count(True) == 1


def test_without_subscripts_labels_are_those_of_the_plan() -> None:
    plan = planned(annotated({"partition": {"j": 3}}, lambda x: x @ x))
    assert cuts(plan)["j"] == (4, 4, 4)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [((6, -1), ((6, 6), (12,))), (4, ((4, 4, 4),) * 2), ({0: 2}, ((2,) * 6, (12,))), (((5, 7), (12,)), ((5, 7), (12,)))],
)  # fmt: skip
def test_chunks_of_a_result_are_kept_in_any_of_dasks_spellings(chunks: Any, expected: Any) -> None:
    found = cuts(planned(annotated({"chunks": chunks})))
    assert (found["i"], found["k"]) == expected


def test_chunks_of_so_many_bytes_know_the_element_type() -> None:
    values = VALUES.astype("float32")
    with dask.annotate(eindecomp={"chunks": "144 B"}):
        array = da.einsum("ij,jk->ik", values, da.from_array(values, chunks=3))
    found = cuts(planned(array))
    assert (max(found["i"]), max(found["k"])) == (6, 6)


def test_a_result_keeps_its_values_chunks_and_keys() -> None:
    array = annotated({"partition": {"a": 4}, "chunks": (2, 12)})
    with dask.config.set(array_optimize=HOOK):
        kept = array.persist(scheduler="sync")
        assert (kept.compute(scheduler="sync") == VALUES @ VALUES).all()
    assert (kept.chunks, kept.__dask_keys__()) == (array.chunks, array.__dask_keys__())


def test_a_fixed_cut_is_applied_though_it_costs_more() -> None:
    array = annotated({"partition": {"a": 12, "b": 12}})
    plan = planned(array, hook=EinDecomp(topology=MACHINES))
    assert plan.verdict == "applied: cuts are fixed by hand"
    assert plan.baseline_seconds is not None and plan.seconds > plan.baseline_seconds


def test_elementwise_code_may_be_cut_by_hand_where_nothing_is_contracted() -> None:
    array = annotated({"chunks": (12, 2)}, lambda x: x + 1)
    hook = EinDecomp(topology=MACHINES)
    assert cuts(planned(array, hook=hook)) == {"i": (12,), "j": (2,) * 6}
    with dask.config.set(array_optimize=hook):
        tasks = {str(key[0]) for key in dict(dask.optimize(array)[0].__dask_graph__())}
        assert any(name.startswith("join-") for name in tasks)
        assert (array.compute(scheduler="sync") == VALUES + 1).all()


def test_every_product_of_many_operands_keeps_the_cut() -> None:
    array = annotated(
        {"partition": {"b": (1, 4, 7)}}, lambda x: da.einsum("ab,bc,bd->ad", x, x, x, optimize=True)
    )
    plan = planned(array)
    assert len(plan.choices) == 2
    for choice in plan.choices:
        # b is the second label of all that it is in
        assert dict(choice.cuts.cuts)["j"] == (1, 4, 7)


def test_extended_summations_are_cut_by_hand_too() -> None:
    def nearest(x: da.Array) -> da.Array:
        return einsum("pq,qr->pr", x, x, join="add", aggregate="min")

    array = annotated({"partition": {"q": 4}}, nearest)
    assert cuts(planned(array))["j"] == (3, 3, 3, 3)
    with dask.config.set(array_optimize=HOOK):
        found = array.compute(scheduler="sync")
    assert (found == (VALUES[:, :, None] + VALUES[None]).min(axis=1)).all()


def test_a_label_that_only_some_of_the_expressions_have_is_cut_in_these() -> None:
    array = annotated({"partition": {"k": 4}}, lambda x: (x @ x).sum(axis=1))
    plan = planned(array)
    assert [len(dict(choice.cuts.cuts).get("k", ())) for choice in plan.choices] == [4, 0]


def test_other_annotations_leave_a_layer_alone_as_ever() -> None:
    with dask.annotate(priority=3):
        array = annotated({"partition": {"a": 4}})
    plan = planned(array)
    assert not plan.choices
    assert {reason for _, reason in plan.left_alone} == {"annotated with priority"}


def test_reordered_products_keep_their_cuts() -> None:
    x = lazy()
    inner = annotated({"partition": {"a": 3}})
    hook = EinDecomp(force=True, topology=MACHINES, reassociate=True)
    plan = explain(da.einsum("ij,j->i", inner, x[0]), hook=hook)
    assert any(dict(choice.cuts.cuts)["j"] == (4, 4, 4) for choice in plan.choices)
    assert len(plan.choices) == 2


def test_no_worker_hears_of_it() -> None:
    with dask.annotate(retries=2):
        left = annotated({"partition": {"a": 4}}).map_blocks(lambda block: block)
    alone = annotated(False, lambda x: x @ x).map_blocks(lambda block: block)
    both = alone + annotated({"partition": {"a": 4}})
    for array in (left, both):
        with dask.config.set(array_optimize=HOOK):
            graph = dask.optimize(array)[0].__dask_graph__()
        said = [layer.annotations or {} for layer in graph.layers.values()]
        assert not any("eindecomp" in one for one in said)


def test_plans_with_and_without_a_fixed_cut_are_not_taken_for_each_other() -> None:
    free = planned(da.einsum("ba,ac->bc", lazy(), lazy()))
    fixed = planned(annotated({"partition": {"a": 6}}))
    again = planned(da.einsum("ba,ac->bc", lazy(), lazy()))
    assert free.partitions == again.partitions != fixed.partitions


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("yes", "annotated with eindecomp='yes'; expected False, True, or a dictionary with partition"),
        ({"parts": 3}, "annotated with eindecomp={'parts': 3}; expected False"),
        ({"partition": 3}, "annotated with partition=3; expected parts or chunks by label"),
        ({"partition": {3: 3}}, "annotated with partition={3: 3}; expected parts or chunks by label"),
        ({"partition": {"z": 3}}, "no label 'z' in sum-aggregate-.*; expected one of b, a, c"),
        ({"partition": {"a": 13}}, "label 'a' of sum-aggregate-.* is to be cut into 13: cannot cut 12 elements"),
        ({"partition": {"a": "xy"}}, "label 'a' of .* is to be cut into 'xy': "),
        ({"partition": {"a": (5, 5)}}, r"label 'a' of .* is 12 long, but is to be cut into \(5, 5\); expected .* 12"),
        ({"partition": {"a": (13, -1)}}, r"label 'a' of .* is 12 long, but is to be cut into \(13, -1\)"),
        ({"chunks": (3, 3, 3)}, r"chunks \(3, 3, 3\) fit no result of sum-aggregate-.*; expected chunks of its shape"),
        ({"chunks": (3, 3), "partition": {"b": 2}}, r"chunks \(3, 3, 3, 3\) along the axis .* into \(6, 6\); expected"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_named(said: Any, message: str) -> None:
    array = annotated(said)
    with pytest.raises(AnnotationError, match=message):
        planned(array)
    # a mistake of the user, which nothing is silent about
    with dask.config.set({"array_optimize": HOOK, "eindecomp.strict": False}), pytest.raises(ValueError):
        array.compute(scheduler="sync")


def test_what_stands_on_no_expression_is_told_by_the_plan() -> None:
    plan = planned(annotated({"partition": {"z": 3}}, lambda x: x.map_blocks(np.sort)) @ lazy())
    assert any("block function" in reason for _, reason in plan.left_alone)
    assert plan.choices
