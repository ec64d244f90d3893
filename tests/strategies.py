"""What hypothesis draws: expressions, chunks, small graphs and any partition of a node."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dask_eindecomp.expression import AGGREGATES, JOINS, Expression
from dask_eindecomp.graph import EinGraph, Node, Output
from dask_eindecomp.partition import Chunks, Cut, Partition, cut

EXTENTS = (1, 2, 2, 3, 4, 4, 5, 6, 8)
"""Lengths of axes, twos and fours more often so that axes of different tensors meet."""

LETTERS = "ijklmnop"


def extents() -> st.SearchStrategy[int]:
    """Length of an axis."""
    return st.sampled_from(EXTENTS)


@st.composite
def cuts(draw: st.DrawFn, extent: int, zeros: bool = False) -> Cut:
    """One axis cut anyhow: balanced or not, with zero-length chunks if asked for."""
    if extent and draw(st.booleans()):
        return cut(extent, draw(st.integers(1, extent)))
    inside = draw(st.lists(st.integers(0, extent), max_size=4))
    if not zeros:
        inside = sorted({one for one in inside if 0 < one < extent})
    edges = [0, *sorted(inside), extent]
    return tuple(stop - start for start, stop in pairwise(edges))


@st.composite
def chunks(draw: st.DrawFn, shape: tuple[int, ...], zeros: bool = True) -> Chunks:
    """Chunks of an array of this shape, zero-length ones included."""
    return tuple(draw(cuts(extent, zeros=zeros)) for extent in shape)


@st.composite
def partitions(draw: st.DrawFn, node: Node) -> Partition:
    """Any viable partition of a node: any cut of every label."""
    return Partition(tuple((label, draw(cuts(extent))) for label, extent in node.extents))


@st.composite
def expressions(
    draw: st.DrawFn, named: bool = True, diagonals: bool = True
) -> tuple[Expression, dict[str, int]]:
    """An expression of one or two operands and one to four labels, with the length of every label."""
    letters = LETTERS[: draw(st.integers(1, 4))]
    operands = tuple(
        tuple(draw(st.lists(st.sampled_from(letters), min_size=1, max_size=4, unique=not diagonals)))
        for _ in range(draw(st.integers(1, 2)))
    )
    used = list(dict.fromkeys(label for labels in operands for label in labels))
    output = tuple(draw(st.lists(st.sampled_from(used), unique=True)))
    join = draw(st.sampled_from(sorted(JOINS))) if named and len(operands) == 2 else "multiply"
    aggregate = draw(st.sampled_from(sorted(AGGREGATES))) if named else "sum"
    return Expression(operands, output, join, aggregate), {label: draw(extents()) for label in used}


@st.composite
def dags(
    draw: st.DrawFn, most: int = 5, named: bool = False, chunked: bool = True, diagonals: bool = True
) -> dict[str, Any]:
    """Arguments of ``EinGraph.from_spec``: up to ``most`` nodes, tensors read more than once, several outputs."""
    shapes: dict[str, tuple[int, ...]] = {
        name: tuple(draw(st.lists(extents(), min_size=1, max_size=3)))
        for name in "ABC"[: draw(st.integers(1, 3))]
    }
    inputs = dict(shapes)
    nodes: dict[str, tuple[Any, ...]] = {}
    read: set[str] = set()
    for name in "RSTUVWX"[: draw(st.integers(1, most))]:
        # the last tensors twice, so that graphs are deep as well as wide
        pool = [*shapes, *list(nodes)[-2:]]
        sources = [draw(st.sampled_from(pool)) for _ in range(draw(st.integers(1, 2)))]
        lengths: dict[str, int] = {}
        operands = []
        for source in sources:
            labels = ""
            for extent in shapes[source]:
                fits = [
                    one
                    for one, known in lengths.items()
                    if known == extent and (diagonals or one not in labels)
                ]
                fresh = LETTERS[len(lengths)]
                label = draw(st.sampled_from([*fits, fresh]))
                lengths.setdefault(label, extent)
                labels += label
            if len(lengths) > 4 and operands:  # few labels, so that trying every assignment stays quick
                lengths = {one: known for one, known in lengths.items() if one in operands[0]}
                sources = sources[:1]
                break
            operands.append(labels)
        output = "".join(
            draw(
                st.lists(st.sampled_from(sorted(lengths)), unique=True, max_size=3)
                if lengths
                else st.just([])
            )
        )
        options = {}
        if named:
            options["aggregate"] = draw(st.sampled_from(sorted(AGGREGATES)))
            if len(sources) == 2:
                options["join"] = draw(st.sampled_from(sorted(JOINS)))
        nodes[name] = (f"{','.join(operands)}->{output}", *sources, *([options] if options else []))
        shapes[name] = tuple(lengths[label] for label in output)
        read.update(sources)
    outputs = [name for name in nodes if name not in read or draw(st.booleans())]
    spec: dict[str, Any] = {"inputs": inputs, "nodes": nodes, "outputs": outputs}
    if chunked:
        known = [name for name in inputs if draw(st.booleans())]
        spec["chunks"] = {name: draw(chunks(inputs[name], zeros=False)) for name in known}
    return spec


@st.composite
def graphs(draw: st.DrawFn, most: int = 5, pinned: bool = True, streams: bool = False) -> EinGraph:
    """A small graph, some of its inputs cut, some outputs promised in chunks, with ``streams`` some maps inlinable."""
    graph = EinGraph.from_spec(**draw(dags(most=most, chunked=pinned)))
    if pinned:
        outputs = tuple(
            Output(one.name, one.source, draw(st.none() | chunks(graph.shape(one.source), zeros=False)))
            for one in graph.outputs
        )
        graph = replace(graph, outputs=outputs)
    if streams:
        nodes = {
            name: replace(node, kernel=draw(st.sampled_from(["blas", "loop", "stream"])))
            for name, node in graph.nodes.items()
        }
        graph = replace(graph, nodes=nodes)
    return graph


@st.composite
def arrays(draw: st.DrawFn, graph: EinGraph) -> dict[str, np.ndarray]:
    """Small whole numbers for every given tensor, so that sums come out the same in any order."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return {
        name: random.integers(-3, 4, tensor.shape).astype(tensor.dtype)
        for name, tensor in graph.inputs.items()
    }
