"""Contractions that users reported, against the best that is known to write by hand: no more tasks or bytes than that.

What counts are the tasks that run besides the inputs, which lie in memory, and what they read of each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dask
import pytest

from benchmarks.bench_reported import Counts, counted
from dask_eindecomp import EinDecomp, Topology
from tests.reported import GALLERY, lacking, wrong

pytestmark = pytest.mark.filterwarnings("ignore:Increasing number of chunks")

MACHINES = {"2 threads": Topology.of_threads(2), "4 workers": Topology(workers=4)}
CASES = (
    "outer_product_of_tensors", "trace_of_a_product_of_tensors", "many_chunks_inside", "square_product",
    "stores_with_other_chunks", "four_operands", "chain_in_one_einsum", "weighted_gram", "plus_its_transpose",
    "chain_with_a_vector", "four_index_transform", "factor_of_rank_one", "vector_by_broadcasting", "stacked_products",
)  # fmt: skip
"""Those with a better way."""
ELEMENTWISE = ("plus_its_transpose", "factor_of_rank_one")
"""Those without a contraction, which the hook leaves to Dask unless forced."""


@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("name", sorted({*CASES} - {*ELEMENTWISE}))
def test_a_plan_has_no_more_tasks_than_the_best_spelling(name: str, machines: str) -> None:
    planned, better = planned_and_better(name, {"topology": MACHINES[machines]})
    assert planned.tasks <= better.tasks


@pytest.mark.parametrize("force", [False, True], ids=["worth it", "forced"])
@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("name", CASES)
def test_with_the_settings_of_the_case_it_has_no_more_bytes_either(
    name: str, machines: str, force: bool
) -> None:
    hook = {"topology": MACHINES[machines], "force": force, **GALLERY[name]().settings}
    planned, better = planned_and_better(name, hook)
    assert planned.tasks <= better.tasks and planned.nbytes <= better.nbytes


def planned_and_better(name: str, hook: dict[str, Any]) -> tuple[Counts, Counts]:
    """What a case takes with the hook, and what it takes if written better; both are right."""
    case = GALLERY[name]()
    values, better = counted(case.better)
    assert not wrong(replace(case, collections=case.better), values)
    with dask.config.set(array_optimize=EinDecomp(**hook)):
        values, planned = counted(case.collections)
    assert not wrong(case, values)
    return planned, better


def test_every_better_way_is_tried() -> None:
    assert {name for name in GALLERY if not lacking(name) and GALLERY[name]().better} == {*CASES}
