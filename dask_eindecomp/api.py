"""What a user calls beside the hook: ``einsum``, ``explain``, ``optimize``, ``measure``, ``register``, ``calibrate``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import dask.array as da
from dask.base import is_dask_collection
from dask.highlevelgraph import HighLevelGraph

from dask_eindecomp.expression import Aggregate
from dask_eindecomp.extended import build
from dask_eindecomp.hook import EinDecomp, apply, freed, placed, refuse_query_planning
from dask_eindecomp.machines import has_loose_tiles
from dask_eindecomp.plan import Plan
from dask_eindecomp.topology import Topology

__all__ = ["calibrate", "einsum", "explain", "measure", "optimize", "register"]


def einsum(
    subscripts: Any,
    *operands: Any,
    join: str | Callable[..., Any] = "multiply",
    aggregate: str | Aggregate = "sum",
    dtype: Any = None,
    out_chunks: Any = None,
) -> da.Array:
    """Extended Einstein summation: any join of values, any associative and commutative aggregate.

    ``Z[output] = aggregate over all other labels of join(X[labels], Y[labels], ...)``.  It runs with and without the
    hook, which plans it together with whatever is around it.  The joined values are never all there at once: each task
    goes through them in blocks, or leaves them to BLAS where algebra allows it.

    Parameters
    ----------
    subscripts
        As of ``numpy.einsum``, ``"ik,jk->ij"``, with ``...`` and a label twice for a diagonal; or, in NumPy's other
        spelling, arrays and lists of labels in turn, ``einsum(x, [0, 1], y, [1, 2], [0, 2])``, where labels may be any
        numbers and as many as needed.
    *operands
        Dask arrays; NumPy's and CuPy's become Dask arrays.
    join
        How one value of each operand become one: multiply, add, subtract, divide, minimum, maximum,
        squared_difference, absolute_difference, equal, less, logical_and, logical_or, power, hypot, exp_difference; a
        NumPy ufunc; or a function that takes arrays which broadcast against each other and gives an array of the
        common shape.  Multiply, add, minimum, maximum, logical_and and logical_or take any number of operands.
    aggregate
        How joined values meet: sum, prod, max, min, any, all, logsumexp, mean, count (of values that are not zero), or
        an `Aggregate`, which is tried on samples.  Where nothing is contracted, joined values are the result.
    dtype
        Element type in which values are combined.  By default products are summed in that of ``numpy.einsum``;
        anything else has the one of NumPy's function for the aggregate, applied to joined values.
    out_chunks
        Chunks of the result; by default those of the operands.

    Returns
    -------
    dask.array.Array

    Raises
    ------
    ExpressionError
        If subscripts cannot be read, lengths of a label differ, a name is unknown, the join takes another number of
        operands, or an aggregate of one's own fails on samples.  It is a ``ValueError``.
    TypeError
        If the join or aggregate takes no such elements; the message names what it takes.
    ValueError
        If an aggregate without identity meets an axis of length 0.

    Notes
    -----
    Sums of squared differences go through a Gram matrix, in double precision and about the middle of the points, where
    that keeps a relative error of 1e-7 (float32) or 1e-13 (float64); pairs for which it would not are computed from
    their differences.

    Examples
    --------
    >>> import numpy as np
    >>> X, Y = np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[0.0, 0.0]])
    >>> einsum("ik,jk->ij", X, Y, join="squared_difference").compute()
    array([[ 0.],
           [25.]])
    >>> einsum("ik,kj->ij", X, Y.T, join="add", aggregate="min").compute()
    array([[0.],
           [3.]])
    """
    return build(subscripts, operands, join, aggregate, dtype, out_chunks)


def explain(*arrays: Any, topology: Topology | None = None, hook: EinDecomp | None = None) -> Plan:
    """The plan for computing some Dask arrays together, without running anything.

    It is that of ``persist``, which keeps the chunks of results; ``compute`` does without cutting them back.

    Parameters
    ----------
    *arrays
        Dask arrays, or collections over them such as xarray objects.
    topology
        The machines to plan for.  Default: the current client's workers, else this process' threads.
    hook
        Settings to plan with.  Default: ``EinDecomp()``.

    Returns
    -------
    Plan
        ``print`` it for a table; its ``verdict`` says whether the hook would apply it and why.

    Raises
    ------
    TypeError
        If an argument is no Dask collection.
    QueryPlanningError
        If the Dask setting ``array.query-planning`` is on.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((64, 64), chunks=16)
    >>> explain(x @ x, topology=Topology(workers=4)).choices[-1].einsum
    'ij,jk->ik'
    """
    hook = _settled(hook, topology)
    dsk, keys = _merged(arrays)
    _, graph, plan = hook.plan(dsk, keys)
    return replace(placed(graph, plan), loose=has_loose_tiles(plan.topology))


def optimize(*arrays: da.Array, topology: Topology | None = None, hook: EinDecomp | None = None) -> Any:
    """The same arrays with the chunks a plan chooses: nothing is cut back into the chunks they had.

    Returns one array, or a tuple if several were given.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((64, 64), chunks=4)
    >>> optimize(x @ x, topology=Topology(workers=1)).chunks
    ((64,), (64,))

    Raises
    ------
    TypeError
        If an argument is no Dask array.
    """
    for array in arrays:
        if not isinstance(array, da.Array):
            raise TypeError(f"optimize takes Dask arrays, but was given {type(array).__name__}")
    hook = replace(_settled(hook, topology), force=True)
    dsk, keys = _merged(arrays)
    lifted, graph, plan = hook.plan(dsk, keys, free=frozenset(array.name for array in arrays))
    graph, found = freed(graph, plan)
    if not found:
        return arrays[0] if len(arrays) == 1 else arrays
    rest = [array.__dask_keys__() for array in arrays if array.name not in found]
    merged = apply(dsk, rest, lifted, graph, plan)
    results = [
        da.Array(merged, *found[array.name], meta=array._meta) if array.name in found else array
        for array in arrays
    ]
    return results[0] if len(results) == 1 else tuple(results)


def measure(client: Any, plan: Plan) -> AbstractContextManager[Any]:
    """See what moves and how long it takes, expression by expression, beside what a plan predicted.

    The table marks where the two differ by more than a quarter.  Bytes and messages are what workers fetched of each
    other; seconds those in which the busiest worker fetched or computed; the peak what its process had above what it
    had without data.  Whatever runs on the cluster meanwhile counts.

    Parameters
    ----------
    client
        A ``distributed.Client``.
    plan
        What `explain` gives for the same arrays.

    Raises
    ------
    TypeError
        If the client is asynchronous.

    Examples
    --------
    >>> import dask, dask.array as da
    >>> from distributed import Client, wait
    >>> from dask_eindecomp import eindecomp
    >>> with Client(processes=False, dashboard_address=None) as client, dask.config.set(array_optimize=eindecomp):
    ...     x = da.ones((64, 64), chunks=16).persist()
    ...     plan = explain(x @ x)
    ...     with measure(client, plan) as measured:
    ...         result = (x @ x).compute()
    >>> measured.total.nbytes
    0
    """
    from dask_eindecomp.measurement import measuring

    return measuring(client, plan)


def register(client: Any) -> Any:
    """Let the scheduler of a cluster keep tiles on the workers they are planned for.

    Without its plugin tiles are placed loosely, so that nothing can hang when a worker is lost: Dask may move them, and
    the bytes of a plan are an estimate.  With it they stay, unless their worker is lost, retired or paused.  The same
    comes from ``dask scheduler --preload dask_eindecomp.scheduler`` and from the Dask setting
    ``distributed.scheduler.preload``.

    Parameters
    ----------
    client
        A ``distributed.Client``.  What comes back is to be awaited if the client is asynchronous.

    Examples
    --------
    >>> from distributed import Client
    >>> with Client(processes=False, dashboard_address=None) as client:
    ...     register(client)
    ...     register(client)  # once is enough
    """
    from dask_eindecomp.scheduler import Placing

    return client.register_plugin(Placing())


def calibrate(client: Any, repeats: int = 3) -> Topology:
    """The machines of a cluster, measured.

    Takes a few seconds, in which every worker computes and sends.  Keep what comes back: ``Topology.to_json`` writes
    it down, and the Dask setting ``eindecomp.topology`` names the file to plan with.

    Parameters
    ----------
    client
        A ``distributed.Client``.
    repeats
        How often each figure is measured; the best counts.

    Raises
    ------
    TopologyError
        If the cluster has no workers, or ``repeats`` is not positive.
    """
    from dask_eindecomp.calibration import calibration

    return calibration(client, repeats).topology


def _settled(hook: EinDecomp | None, topology: Topology | None) -> EinDecomp:
    refuse_query_planning()
    hook = hook or EinDecomp()
    return hook if topology is None else replace(hook, topology=topology)


def _merged(arrays: tuple[Any, ...]) -> tuple[HighLevelGraph, list[Any]]:
    """One graph of all collections, and the keys wanted of it."""
    for array in arrays:
        if not is_dask_collection(array):
            raise TypeError(f"{type(array).__name__} is no Dask collection; expected a Dask array")
    graphs = [array.__dask_graph__() for array in arrays]
    layered = [
        graph if isinstance(graph, HighLevelGraph) else HighLevelGraph.from_collections(str(id(graph)), graph)
        for graph in graphs
    ]
    return HighLevelGraph.merge(*layered), [array.__dask_keys__() for array in arrays]
