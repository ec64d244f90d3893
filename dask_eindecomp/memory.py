"""What a worker holds while a plan runs.

A tensor's blocks lie on the workers in even shares.  A worker that computes tiles gathers what they read, and keeps
the copies until nobody reads the tensor any more; so what is held grows and shrinks along the order of execution:

    persisted   ████████████████████████   stay: somebody outside holds them
    copies          ██████████             until the last reader is done
    results           ████████████         from their expression to the last reader, or to the end
    made            ██                     blocks that are read or created on demand: for the tiles being computed
    passed on         ██                   tiles that one tile of another expression wants: until that is known to be
                                           computed, so those being computed and those before them

The tiles of one worker are a block of the tile grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from dask_eindecomp import cost
from dask_eindecomp.cost import at_most
from dask_eindecomp.expression import Labels
from dask_eindecomp.graph import EinGraph, Given, Node
from dask_eindecomp.partition import Chunks, Partition
from dask_eindecomp.topology import Topology

__all__ = ["Held", "held", "timeline"]


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on the busiest worker because of one expression; arrays where parts are arrays, one entry a candidate."""

    operands: tuple[Any, ...]
    """What its tiles read of each operand."""
    partials: Any
    """Partial results, its own and those it gathers; none where no contracted label is cut."""
    result: Any
    """Its share of the result."""
    running: Any
    """The tiles of the result that are there at a time if each is passed on."""
    inside: Any
    """The same if each is computed inside the task that wants it."""
    least: Any
    """What it needs at any rate: of tensors that may be passed on tile by tile only the tiles there at a time."""


def held(graph: EinGraph, node: Node, parts: Mapping[str, Any], topology: Topology) -> Held:
    """What the busiest worker holds while it computes its tiles of one expression.

    >>> spec, rows = {"Z": ("ij,jk->ik", "A", "B")}, ((2, 2, 2, 2), (8,))
    >>> g = EinGraph.from_spec({"A": (8, 8), "B": (8, 8)}, spec, ["Z"], chunks={"A": rows, "B": rows})
    >>> held(g, g.nodes["Z"], {"i": 4, "j": 1, "k": 1}, Topology(workers=4))
    Held(operands=(128, 512), partials=0, result=128, running=128, inside=128, least=768)
    """
    extents, expression = dict(node.extents), node.expression
    mine = -(-prod(parts.values()) // topology.workers)
    itemsizes = tuple(graph.itemsize(source) for source in node.inputs)
    itemsize = np.dtype(node.dtype).itemsize
    along = cost.bundles(expression, extents, parts, itemsizes, itemsize, topology.workers)
    at_once = at_most(mine, topology.threads)
    passing = at_most(
        mine, 2 * topology.threads
    )  # a tile goes when the scheduler says so: by then the next is made
    operands, least = [], []
    for labels, source in zip(expression.operands, node.inputs):
        given = graph.inputs.get(source)
        if given is not None and not given.stays:
            read = _blocks_read(given, labels, extents, parts) * graph.itemsize(source)
            operands.append(read * at_once)
            least.append(read * at_once)
            continue
        tile = cost.tile_nbytes(labels, extents, parts, graph.itemsize(source))
        gathered = tile * prod(along[label] for label in dict.fromkeys(labels))
        operands.append(at_most(gathered, graph.nbytes(source)))
        passed = source in graph.nodes and graph.may_pass_on(source)
        least.append(_lesser(tile * passing, operands[-1]) if passed else operands[-1])
    tile = cost.tile_nbytes(expression.output, extents, parts, itemsize)
    blocks = prod(parts[label] for label in expression.output)
    combined = prod(parts[label] for label in expression.contracted)
    results = -(-blocks // topology.workers)
    partials = (combined > 1) * tile * (mine + results * (combined - 1))
    result = tile * results
    running = _lesser(tile * passing, result)
    needed = sum(least) + partials + (running if graph.may_pass_on(node.name) else result)
    inside = _lesser(tile * at_once, result)
    return Held(tuple(operands), partials, result, running, inside, needed)


def _blocks_read(given: Given, labels: Labels, extents: Mapping[str, int], parts: Mapping[str, Any]) -> Any:
    """Elements of the blocks that one tile reads: blocks are made whole, however little of them is wanted."""
    total: Any = 1
    for axis, label in enumerate(labels):
        length = -(-extents[label] // parts[label])
        if given.chunks is not None:
            # an end of the tile lies inside a block unless the cuts line up
            inside = len(given.chunks[axis]) % parts[label] != 0
            length = at_most(length + inside * max(given.chunks[axis], default=0), extents[label])
        total = total * length
    return total


def _lesser(one: Any, other: Any) -> Any:
    return np.minimum(one, other) if isinstance(one, np.ndarray) else min(one, other)


def share(chunks: Chunks, itemsize: int, workers: int) -> int:
    """Bytes of a tensor in these chunks on the worker that has most blocks of it.

    >>> share(((4, 4), (8,)), 8, 4)
    256
    """
    blocks = prod(map(len, chunks))
    largest = prod(max(axis, default=0) for axis in chunks)
    return min(-(-blocks // workers) * largest, prod(map(sum, chunks))) * itemsize


def timeline(
    graph: EinGraph,
    partitions: Mapping[str, Partition],
    topology: Topology,
    received: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, int, Mapping[str, int]]]:
    """For every expression, then every delivery, the bytes on the busiest worker meanwhile, and how many of each tensor.

    ``received`` are the bytes of each operand that reach one worker for its tiles.  The mapping is good until the next
    step.
    """
    single = {name: found[0][0] for name, found in graph.readers.items() if len(found) == 1}
    passing = {name for name, reader in single.items() if graph.passes_on(name, reader, partitions)}
    order = {name: number for number, name in enumerate(graph.nodes)}
    # what is computed inside the tasks of another goes on until these are done
    tasks: dict[str, str] = {}
    for name in reversed([*graph.nodes]):
        into = single.get(name, "")
        tasks[name] = tasks[into] if into and graph.inlines(name, into, partitions) else name
    ending: dict[str, list[str]] = {}
    made: dict[str, list[str]] = {}
    for name, found in graph.readers.items():
        if found:
            last = max((tasks[reader] for reader, _ in found), key=order.__getitem__)
            ending.setdefault(last, []).append(name)
            if name in graph.inputs and not graph.inputs[name].stays:
                for reader, _ in found:
                    made.setdefault(tasks[reader], []).append(name)
    stays = {output.source for output in graph.outputs} | set(graph.inputs)
    owned = {
        given.name: share(given.chunks, graph.itemsize(given.name), topology.workers)
        if given.stays and given.chunks is not None
        else 0
        for given in graph.inputs.values()
    }
    here = dict(owned)
    total = sum(here.values())
    known: dict[object, Held] = {}
    for node in graph.nodes.values():
        mine = partitions[node.name]
        key = (graph.kinds[node.name], id(mine))
        if key not in known:
            known[key] = held(graph, node, mine.parts, topology)
        step = known[key]
        for source, needed, copies in zip(node.inputs, step.operands, received[node.name]):
            if source in passing:
                continue
            fresh = source in graph.inputs and not graph.inputs[source].stays
            now = needed if fresh else min(owned[source] + copies, graph.nbytes(source))
            if now > here[source]:
                total += now - here[source]
                here[source] = now
        # a tile that only one other wants goes when that is computed, which comes right after it
        inside = tasks[node.name] != node.name
        owned[node.name] = step.inside if inside else step.running if node.name in passing else step.result
        here[node.name] = owned[node.name] + step.partials
        total += here[node.name]
        yield node.name, total, here
        total -= step.partials
        here[node.name] = owned[node.name]
        for source in made.get(node.name, ()):
            total -= here[source]
            here[source] = 0
        for name in ending.get(node.name, ()):
            left = owned[name] if name in stays else 0  # copies go, and what nobody reads any more
            total -= here[name] - left
            here[name] = left
    for output in graph.outputs:
        if output.source in graph.nodes and output.chunks is not None:
            node = graph.nodes[output.source]
            if partitions[node.name].grid(node.expression.output) != output.chunks:
                total += owned[node.name]
                yield output.name, total, here
