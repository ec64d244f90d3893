"""Products of many operands become products of two.

One kernel over all labels of an n-ary einsum does asymptotically more work than a chain of binary ones, so the order
opt_einsum finds is written into the graph, where every intermediate gets a partition of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from math import prod

import opt_einsum

from dask_eindecomp import kernels
from dask_eindecomp.expression import Expression
from dask_eindecomp.graph import EinGraph, Node

__all__ = ["contract", "pairwise_flops"]


SIZE_WEIGHT = 64
"""Multiply-adds that an element of an intermediate product is worth, as in opt_einsum's ``combo`` objective."""


def contract(graph: EinGraph, reassociate: bool = False) -> EinGraph:
    """The same graph with every sum of products of more than two operands split into binary ones.

    If there is none, the same graph comes back.  With ``reassociate`` products whose only reader is another product are
    ordered anew where that takes fewer multiply-adds and smaller intermediates; rounding may then differ.

    >>> inputs = {"A": (9, 9), "B": (9, 9), "C": (9, 2)}
    >>> g = EinGraph.from_spec(inputs, {"Z": ("ab,bc,cd->ad", "A", "B", "C")}, ["Z"])
    >>> [str(node.expression) for node in contract(g).nodes.values()]
    ['bc,cd->bd', 'ab,bd->ad']
    """
    graph = _reassociated(graph) if reassociate else graph
    if not any(map(_is_long_product, graph.nodes.values())):
        return graph
    taken = {*graph.inputs, *graph.nodes}
    nodes: dict[str, Node] = {}
    for node in graph.nodes.values():
        for part in _binary(node, taken) if _is_long_product(node) else [node]:
            nodes[part.name] = part
    return replace(graph, nodes=nodes)


def _reassociated(graph: EinGraph) -> EinGraph:
    """The same graph with chains of products in the order that costs least."""
    wide: dict[str, Node] = {}
    parts: dict[str, list[Node]] = {}
    for node in graph.nodes.values():
        whole, mine = node, [node]
        for source in dict.fromkeys(node.inputs):
            if source in wide and graph.may_pass_on(source) and _may_merge(wide[source], whole):
                whole = _merge(wide.pop(source), whole)
                mine = [*parts.pop(source), *mine]
        wide[node.name], parts[node.name] = whole, mine
    taken = {*graph.inputs, *graph.nodes}
    nodes: dict[str, Node] = {}
    for name, whole in wide.items():
        anew = _binary(whole, set(taken)) if len(parts[name]) > 1 else []
        better = anew and _effort(anew) < _effort([*_split(parts[name], set(taken))])
        for part in anew if better else parts[name]:
            nodes[part.name] = part
    return graph if [*nodes] == [*graph.nodes] else replace(graph, nodes=nodes)


def _split(nodes: list[Node], taken: set[str]) -> Iterator[Node]:
    """Nodes with products of many operands split into binary ones."""
    for node in nodes:
        yield from _binary(node, taken) if _is_long_product(node) else [node]


def _effort(nodes: list[Node]) -> int:
    """Multiply-adds of some products, and elements of what they make, weighed."""
    return sum(prod(extent for _, extent in node.extents) + SIZE_WEIGHT * prod(node.shape) for node in nodes)


def _may_merge(inner: Node, outer: Node) -> bool:
    """Whether a product and the only one that reads it are one product of more operands."""
    known = {label for labels in inner.expression.operands for label in labels}
    same = inner.dtype == outer.dtype and inner.finish is None and inner.kernel == outer.kernel
    steps = {
        None if node.step is None else replace(node.step, dtype=node.dtype)
        for node in (inner, outer)
        if _is_product(node)
    }
    wanted = _is_product(inner) and _is_product(outer) and known >= {*inner.expression.output}
    free = not inner.pinned and not outer.pinned
    return wanted and same and free and len(steps) == 1


def _merge(inner: Node, outer: Node) -> Node:
    """One product of the operands of two, in the place of the outer one."""
    at = outer.inputs.index(inner.name)
    labels = dict(zip(inner.expression.output, outer.expression.operands[at]))
    unused = (
        label for number in count() if (label := opt_einsum.get_symbol(number)) not in outer.expression.labels
    )
    labels |= {label: next(unused) for label in inner.expression.labels if label not in labels}
    operands = tuple(tuple(labels[one] for one in mine) for mine in inner.expression.operands)
    mine = outer.expression.operands
    expression = replace(outer.expression, operands=(*mine[:at], *operands, *mine[at + 1 :]))
    extents = {labels[label]: extent for label, extent in inner.extents} | dict(outer.extents)
    came = {labels[label]: cut for label, cut in inner.came} | dict(outer.came)
    whole = inner.came and outer.came
    return replace(
        outer,
        expression=expression,
        inputs=(*outer.inputs[:at], *inner.inputs, *outer.inputs[at + 1 :]),
        extents=tuple((label, extents[label]) for label in expression.labels),
        came=tuple((label, came[label]) for label in expression.labels) if whole else (),
        tasks=inner.tasks + outer.tasks,
    )


def pairwise_flops(node: Node, parts: Mapping[str, int]) -> int:
    """Joins evaluated where every tile of a product of many operands is computed two operands at a time.

    That is what ``np.einsum(..., optimize=True)`` does inside a block.  A pair is computed anew in every tile along
    a label it lacks; ``parts`` is how many parts each label of ``node`` is cut into.

    >>> inputs = {"A": (9, 9), "B": (9, 9), "C": (9, 2)}
    >>> g = EinGraph.from_spec(inputs, {"Z": ("ab,bc,cd->ad", "A", "B", "C")}, ["Z"])
    >>> pairwise_flops(g.nodes["Z"], {"a": 3, "b": 1, "c": 1, "d": 1}) == 3 * 9 * 9 * 2 + 9 * 9 * 2
    True
    """
    if not _is_long_product(node):
        return prod(extent for _, extent in node.extents)
    return sum(
        prod(extent for _, extent in part.extents)
        * prod(count for label, count in parts.items() if label not in part.expression.labels)
        for part in _binary(node, set())
    )


def _is_long_product(node: Node) -> bool:
    return len(node.inputs) > 2 and _is_product(node)


def _is_product(node: Node) -> bool:
    """Whether an expression is a sum of products, whatever it is called."""
    expression, step = node.expression, node.step
    known = step is None or isinstance(step, kernels.Contraction)
    return known and expression.join == "multiply" and expression.aggregate == "sum"


def _of_labels(
    cuts: tuple[tuple[str, tuple[int, ...]], ...], expression: Expression
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Of some cuts those of labels that an expression has."""
    return tuple((label, found) for label, found in cuts if label in expression.labels)


def _subscripts(expression: Expression) -> str:
    """The einsum in opt_einsum's letters; labels may be longer than a character."""
    letters = {label: opt_einsum.get_symbol(number) for number, label in enumerate(expression.labels)}
    terms = (
        "".join(letters[label] for label in labels) for labels in (*expression.operands, expression.output)
    )
    *operands, output = terms
    return f"{','.join(operands)}->{output}"


def _binary(node: Node, taken: set[str]) -> list[Node]:
    """The binary expressions that together are ``node``; the last one has its name, the others names not taken."""
    extents, came = dict(node.extents), dict(node.came)
    operands = list(zip(node.inputs, node.expression.operands))
    shapes = [tuple(extents[label] for label in labels) for _, labels in operands]
    path, _ = opt_einsum.contract_path(_subscripts(node.expression), *shapes, shapes=True, optimize="auto")
    parts: list[Node] = []
    for picked in path:
        chosen = [operands.pop(position) for position in sorted(picked, reverse=True)][::-1]
        if len(chosen) > 2:  # opt_einsum leaves a last product of many whose order does not matter
            operands += chosen[2:]
            chosen = chosen[:2]
        parts.append(_part(node, taken, chosen, operands, extents, came))
        operands.append((parts[-1].name, parts[-1].expression.output))
    while len(operands) > 1:
        chosen = [operands.pop(), operands.pop()]
        parts.append(_part(node, taken, chosen, operands, extents, came))
        operands.append((parts[-1].name, parts[-1].expression.output))
    last = parts[-1]
    expression = replace(last.expression, output=node.expression.output)
    parts[-1] = replace(
        last,
        name=node.name,
        expression=expression,
        extents=tuple((label, extents[label]) for label in expression.labels),
        came=tuple((label, came[label]) for label in expression.labels) if came else (),
        dtype=node.dtype,
        step=None if node.step is None else replace(node.step, dtype=node.dtype),
        finish=node.finish,
        tasks=node.tasks,
        title=node.title,
        pinned=_of_labels(node.pinned, expression),
    )
    return parts


def _part(
    node: Node,
    taken: set[str],
    chosen: list[tuple[str, tuple[str, ...]]],
    rest: list[tuple[str, tuple[str, ...]]],
    extents: dict[str, int],
    came: dict[str, tuple[int, ...]],
) -> Node:
    """One binary product; it keeps the labels that the rest or the result still need."""
    mine = {label for _, operand in chosen for label in operand}
    later = dict.fromkeys(label for _, labels in rest for label in labels)
    # what is contracted next stands together, in the order of what it meets: BLAS takes it as it is
    kept = [label for label in later if label in mine and label not in node.expression.output]
    kept += [label for label in node.expression.output if label in mine]
    expression = Expression(tuple(operand for _, operand in chosen), tuple(kept))
    number = next(n for n in count() if f"{node.name}.{n}" not in taken)
    name = f"{node.name}.{number}"
    taken.add(name)
    # half precision would lose digits between two products
    dtype = "float32" if node.dtype == "float16" else node.dtype
    step = None if node.step is None else replace(node.step, dtype=dtype)
    return Node(
        name,
        expression,
        tuple(source for source, _ in chosen),
        tuple((label, extents[label]) for label in expression.labels),
        dtype,
        step=step,
        kernel=node.kernel,
        came=tuple((label, came[label]) for label in expression.labels) if came else (),
        came_kernel=node.came_kernel,
        pinned=_of_labels(node.pinned, expression),
        title=f"{node.title or node.name}.{number}",
    )
