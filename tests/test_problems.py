"""The gallery: every problem gives NumPy's numbers, Dask's own way and under any kind of plan."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
import pytest
from dask.array.optimization import optimize as dask_optimize

from benchmarks.problems import GALLERY, SIZES, Problem, cut
from dask_eindecomp import EinDecomp, Topology, explain, minilm

NAMES = (
    "chain_square",
    "chain_skewed",
    "gram",
    "attention",
    "mttkrp",
    "ttm_chain",
    "ffnn_step",
    "abcd",
    "distances",
    "nearest",
    "manhattan",
    "shortest_paths",
    "mixture_step",
    "cp_als",
    "coupled_cluster",
    "principal_axis",
    "quantum_circuit",
    pytest.param(
        "minilm",
        marks=pytest.mark.skipif(
            minilm.model_directory() is None, reason=f"needs the model: {minilm.INSTALL}"
        ),
    ),
)

SELECTION = {
    "topk": "block function topk",
    "topk_aggregate-aggregate": "chunk sizes that may have become unknown",
}
LEFT_ALONE = {
    "nearest": SELECTION,
    "manhattan": SELECTION,
    "cp_als": {"inv": "block function inv"},
    "quantum_circuit": {"getitem": "tasks of its own"},
}
"""What is no extended summation and stays Dask's: picking the nearest, inverting a small matrix, picking one angle."""


def eager(workers: int, threads: int = 1) -> Topology:
    """Machines so slow, on a network so fast, that even a small problem is worth sharing."""
    return Topology(workers, threads, bandwidth=1e12, latency=0, flops=1e5, task_overhead=0)


OPTIMIZERS = {
    "plain Dask": dask_optimize,
    "one worker": EinDecomp(force=True, topology=eager(workers=1)),
    "three workers": EinDecomp(force=True, topology=eager(workers=3)),
    "four workers": EinDecomp(force=True, topology=eager(workers=4)),
    "two workers of three threads": EinDecomp(force=True, topology=eager(workers=2, threads=3)),
    "too small to share": EinDecomp(force=True, topology=Topology(workers=4)),
    "fewest bytes": EinDecomp(force=True, topology=Topology(workers=4), objective="bytes"),
    "published cost": EinDecomp(force=True, topology=Topology(workers=4), objective="paper"),
}


@pytest.fixture(params=NAMES)
def problem(request: pytest.FixtureRequest) -> Problem:
    """Each problem of the gallery in turn."""
    return GALLERY[request.param]


def lazy(problem: Problem, chunks_a_side: int = 3) -> tuple[Any, ...]:
    return problem.expression(**problem.dask_inputs(problem.numpy_inputs("small"), chunks_a_side))


def tolerance(dtype: np.dtype[Any]) -> float:
    return float(np.sqrt(np.finfo(dtype).eps)) / 100


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_problem_gives_what_numpy_gives(problem: Problem, optimizer: Any) -> None:
    with dask.config.set(array_optimize=optimizer, scheduler="synchronous"):
        results = dask.compute(*lazy(problem))
    references = problem.reference(**problem.numpy_inputs("small"))
    assert len(results) == len(references)
    for result, reference in zip(results, references):
        assert (result.shape, result.dtype) == (reference.shape, reference.dtype)
        limit = tolerance(reference.dtype)
        np.testing.assert_allclose(result, reference, rtol=limit, atol=limit * abs(reference).max())


@pytest.mark.parametrize("chunks_a_side", [1, 2, 5])
def test_a_planned_result_does_not_depend_on_the_users_chunks(problem: Problem, chunks_a_side: int) -> None:
    with dask.config.set(array_optimize=OPTIMIZERS["four workers"], scheduler="synchronous"):
        results = dask.compute(*lazy(problem, chunks_a_side))
    for result, reference in zip(results, problem.reference(**problem.numpy_inputs("small"))):
        limit = tolerance(reference.dtype)
        np.testing.assert_allclose(result, reference, rtol=limit, atol=limit * abs(reference).max())


def test_a_problem_is_planned_as_a_whole_but_for_what_is_no_summation(problem: Problem) -> None:
    plan = explain(*lazy(problem), topology=eager(workers=4))
    alone = {name.rpartition("-")[0]: reason for name, reason in plan.left_alone}
    assert alone == LEFT_ALONE.get(problem.name, {})
    assert max(choice.tiles for choice in plan.choices) >= 4


def test_a_forced_plan_runs_joins_and_keeps_the_promised_chunks(problem: Problem) -> None:
    arrays = lazy(problem)
    with dask.config.set(array_optimize=OPTIMIZERS["four workers"]):
        planned = dask.optimize(*arrays)
    joins = {key for array in planned for key in array.__dask_graph__() if key[0].startswith("join-")}
    assert len(joins) >= 4
    assert [array.chunks for array in planned] == [array.chunks for array in arrays]


def test_the_same_seed_gives_the_same_inputs() -> None:
    gram = GALLERY["gram"]
    first, again, other = (gram.numpy_inputs("small", seed)["X"] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_weights_keep_the_size_of_what_they_multiply() -> None:
    arrays = GALLERY["ffnn_step"].numpy_inputs("medium")
    assert (arrays["X"] @ arrays["W1"]).std() == pytest.approx(1, rel=0.05)


def test_every_size_has_the_same_inputs_and_grows(problem: Problem) -> None:
    sizes = [problem.input_shapes(size) for size in SIZES]
    assert sizes[0].keys() <= sizes[1].keys() == sizes[2].keys()  # a small encoder has fewer layers
    elements = [sum(np.prod(shape, dtype=int) for shape in shapes.values()) for shapes in sizes]
    assert elements[0] < elements[1] / 5 < elements[2] / 10


def test_the_inputs_have_the_chunks_the_problem_names(problem: Problem) -> None:
    arrays = problem.dask_inputs(problem.numpy_inputs("small"), chunks_a_side=3)
    assert {name: array.chunks for name, array in arrays.items()} == problem.chunks("small", chunks_a_side=3)


def test_a_cut_has_as_many_chunks_as_asked_or_as_there_are_elements() -> None:
    assert cut((8, 9, 2), 4) == ((2, 2, 2, 2), (3, 3, 3), (1, 1))


def test_an_unknown_size_is_refused_with_those_there_are(problem: Problem) -> None:
    with pytest.raises(
        ValueError, match=f"'huge' of problem '{problem.name}'; expected one of small, medium"
    ):
        problem.numpy_inputs("huge")
