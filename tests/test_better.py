"""Contractions that users reported, against the best that is known to write by hand: no more tasks than that.

What counts are the tasks that run besides the inputs, which lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import opt_einsum
import pytest
from dask.callbacks import Callback

from dask_eindecomp import EinDecomp, Topology

pytestmark = pytest.mark.filterwarnings("ignore:Increasing number of chunks")

Made = tuple[Any, Any]
"""As users write it, and better."""
MACHINES = {"2 threads": Topology.of_threads(2), "4 workers": Topology(workers=4)}


def held(*shape: int, chunks: Any, seed: int = 0) -> da.Array:
    """An array whose blocks are in memory."""
    values = np.random.default_rng(seed).random(shape)
    return da.from_array(values, chunks=chunks).persist(scheduler="synchronous")


def outer_product_of_tensors() -> Made:
    a = held(16, 4, 4, 4, 4, chunks=(4, 2, 2, 2, 2))
    whole = a.rechunk({0: -1})
    return da.einsum("zabcd,zefgh->abcdefgh", a, a), da.tensordot(whole, whole, ([0], [0]))


def trace_of_a_product_of_tensors() -> Made:
    t, whole = (held(*(2,) * 8, chunks=n) for n in (1, 2))
    product = da.einsum("pqrsabcd,tuvwbadc->ptqurvsw", t, t)
    return da.einsum("xxyyzzww", product), da.einsum("pqrsabcd,pqrsbadc->", whole, whole)


def many_chunks_inside() -> Made:
    x, y = held(60, 60, 60, chunks=10), held(60, 20, chunks=10, seed=1)
    better = da.tensordot(x.rechunk((20, 60, 20)), y.rechunk(-1), ([1], [0]))
    return da.tensordot(x, y, ([1], [0])), better


def square_product() -> Made:
    a = held(320, 320, chunks=40)
    return a @ (a * 2), a.rechunk((80, -1)) @ (a * 2).rechunk((-1, 80))


def stores_with_other_chunks() -> Made:
    w, v = held(220, 120, chunks=(20, 7)), held(120, 3000, chunks=(50, 600), seed=1)
    return da.dot(w, v), da.dot(w.rechunk((220, 50)), v)


def four_operands() -> Made:
    a, b, c, d = (held(30, 8, chunks=(10, 4), seed=seed) for seed in range(4))
    better = da.einsum("ad,bc->abcd", da.einsum("xa,xd->ad", a, d), da.einsum("yb,yc->bc", b, c))
    return da.einsum("xa,yb,yc,xd->abcd", a, b, c, d), better


def chain_in_one_einsum() -> Made:
    a = held(96, 96, chunks=16)
    return da.einsum("ij,jk,kl->il", a, a, a, optimize=True), a @ a @ a


def weighted_gram() -> Made:
    x, w = held(4000, 20, chunks=(200, 10)), held(4000, chunks=500, seed=1)
    rows = x.rechunk({1: -1}) * w.rechunk(200)[:, None]
    return da.einsum("ni,n,nj,n->ij", x, w, x, w), rows.T @ rows


def chain_with_a_vector() -> Made:
    a, v = held(240, 240, chunks=40), held(240, 1, chunks=(40, 1), seed=1)
    return (a @ a) @ v, a @ (a @ v)


def four_index_transform() -> Made:
    t, c = held(8, 8, 8, 8, chunks=4), held(8, 8, chunks=4, seed=1)
    subscripts = "pi,qj,ijkl,rk,sl->pqrs"
    return da.einsum(subscripts, c, c, t, c, c), opt_einsum.contract(subscripts, c, c, t, c, c)


def stacked_products() -> Made:
    a, b = held(8, 40, 60, chunks=(2, 10, 15)), held(8, 60, 40, chunks=(2, 15, 10), seed=1)
    return a @ b, a.rechunk((1, -1, -1)) @ b.rechunk((1, -1, -1))


CASES: tuple[Callable[[], Made], ...] = (
    outer_product_of_tensors, trace_of_a_product_of_tensors, many_chunks_inside, square_product,
    stores_with_other_chunks, four_operands, chain_in_one_einsum, weighted_gram, chain_with_a_vector,
    four_index_transform, stacked_products,
)  # fmt: skip


def computed(array: da.Array) -> tuple[np.ndarray, int]:
    """An array, and the tasks that ran."""
    ran: list[Any] = []
    with Callback(pretask=lambda key, *_: ran.append(key)):
        values = array.compute(scheduler="synchronous")
    return values, len(ran)


@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_plan_has_no_more_tasks_than_the_best_spelling(case: Callable[[], Made], machines: str) -> None:
    written, better = case()
    expected, tasks = computed(better)
    with dask.config.set(array_optimize=EinDecomp(topology=MACHINES[machines])):
        values, planned = computed(written)
    np.testing.assert_allclose(values, expected)
    assert planned <= tasks
