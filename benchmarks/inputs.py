"""Inputs of problems persisted on a cluster with known owners, and the bytes its workers sent."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, wait

from benchmarks.problems import Problem
from dask_eindecomp.machines import find_topology

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""What keeps BLAS to one thread in every worker."""


def persisted(
    client: Client,
    problem: Problem,
    shapes: Mapping[str, tuple[int, ...]],
    seed: int = 0,
    chunks_a_side: int = 4,
) -> dict[str, Any]:
    """The inputs in a user's chunks, blocks in row-major runs spread evenly over the workers."""
    addresses = find_topology().addresses
    arrays, blocks = {}, {}
    for number, (name, shape) in enumerate(sorted(shapes.items())):
        chunks = problem._cut({name: shape}, chunks_a_side)[name]
        scale = shape[0] ** -0.5 if name in problem.weights else 1.0
        places = list(product(*(range(len(axis)) for axis in chunks)))
        layer = f"{name}-{problem.name}"
        for n, place in enumerate(places):
            owner = addresses[n * len(addresses) // len(places)]
            lengths = tuple(axis[i] for axis, i in zip(chunks, place))
            key = (layer, *place)
            blocks[key] = client.submit(block, (seed, number, n), lengths, scale, key=key, workers=[owner])
        mine = {(layer, *place): blocks[(layer, *place)] for place in places}
        arrays[name] = da.Array(mine, layer, chunks, dtype="float64")
    wait(list(blocks.values()))
    return arrays


def block(seed: tuple[int, ...], shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Normally distributed values."""
    return np.random.default_rng(seed).normal(scale=scale, size=shape)


def sent(client: Client) -> int:
    """Bytes that all workers have sent each other so far."""
    return sum(client.run(_sent).values())


def _sent(dask_worker: Any) -> int:
    return int(dask_worker.transfer_outgoing_bytes_total)
