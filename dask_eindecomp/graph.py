"""A graph of extended Einstein summations.

``EinGraph`` holds what the planner decides on and nothing of where it came from: expressions in topological order,
the tensors they are given, which results leave the graph and in which chunks.  ``step`` and ``finish`` travel along
untouched for whoever lowers the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from dask_eindecomp.expression import Aggregate, Expression, ExpressionError
from dask_eindecomp.partition import Chunks, Partition

__all__ = ["EinGraph", "Given", "Node", "Output"]


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor the graph reads but does not compute."""

    name: str
    """Name, unique in the graph."""
    shape: tuple[int, ...]
    """Length of each axis."""
    dtype: str
    """NumPy's name of the element type."""
    chunks: Chunks | None = None
    """How it is cut; None if it may be had in any grid for nothing."""
    owners: tuple[int, ...] | None = None
    """Worker of each block in row-major order, where known."""
    stays: bool = True
    """Whether its blocks are held whatever is done with them; else each is made when it is read and then dropped."""
    kind: str = "numpy"
    """Array type of its blocks, for messages."""

    @property
    def pattern(self) -> tuple[int, ...] | None:
        """Which blocks lie together, whichever workers these are: owners numbered anew in the order of their blocks.

        >>> Given("A", (3, 2), "int64", ((1, 1, 1), (2,)), owners=(7, 2, 7)).pattern
        (0, 1, 0)
        """
        if self.owners is None:
            return None
        numbers: dict[int, int] = {}
        return tuple(numbers.setdefault(owner, len(numbers)) for owner in self.owners)


@dataclass(frozen=True, slots=True)
class Node:
    """One expression of the graph."""

    name: str
    """Name, unique in the graph; also the name of its result."""
    expression: Expression
    """What is computed."""
    inputs: tuple[str, ...]
    """Name of the tensor behind each operand."""
    extents: tuple[tuple[str, int], ...]
    """Length of every label, in the order of ``expression.labels``."""
    dtype: str
    """NumPy's name of the result's element type."""
    step: Any = None
    """How a worker computes one tile; not looked at by the planner."""
    finish: Any = None
    """What turns combined partial results into the result; not looked at by the planner."""
    kernel: str = "blas"
    """What bounds the speed of one tile: ``"blas"``, ``"loop"`` (einsum without BLAS, integers) or ``"stream"``."""
    came: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Cut of every label in the graph as it came; empty if unknown."""
    tasks: int = 0
    """Dask tasks of this expression in the graph as it came, after Dask's own fusion."""
    came_kernel: str = "blas"
    """What bounds the speed of one block in the graph as it came."""
    title: str = ""
    """What a reader is shown; the name if empty."""
    pinned: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Cuts of labels that are fixed by hand."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        extents = dict(self.extents)
        return tuple(extents[label] for label in self.expression.output)


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that leaves the graph."""

    name: str
    """The name its blocks must have; none if they may have any."""
    source: str
    """The node or given tensor it is."""
    chunks: Chunks | None = None
    """The chunks it was promised in; None if any will do."""


@dataclass(frozen=True)
class EinGraph:
    """Expressions in topological order, with what they read and what leaves.

    >>> g = EinGraph.from_spec(inputs={"A": (4, 6), "B": (6, 8)}, nodes={"Z": ("ij,jk->ik", "A", "B")}, outputs=["Z"])
    >>> g.shape("Z"), g.readers["A"]
    ((4, 8), (('Z', 0),))
    """

    inputs: Mapping[str, Given]
    """Tensors given, by name."""
    nodes: Mapping[str, Node]
    """Expressions by name, every one after those it reads."""
    outputs: tuple[Output, ...]
    """What leaves the graph."""
    left_alone: tuple[tuple[str, str], ...] = ()
    """Layers that were not understood, each with the reason."""
    readers: Mapping[str, tuple[tuple[str, int], ...]] = field(init=False, compare=False)
    """For every tensor the nodes that read it and as which operand."""

    def __post_init__(self) -> None:
        for node in self.nodes.values():
            assert set(dict(node.extents)) == set(node.expression.labels), node.name
        readers: dict[str, list[tuple[str, int]]] = {name: [] for name in (*self.inputs, *self.nodes)}
        for node in self.nodes.values():
            for position, source in enumerate(node.inputs):
                readers[source].append((node.name, position))
        object.__setattr__(self, "readers", {name: tuple(found) for name, found in readers.items()})

    @classmethod
    def from_spec(
        cls,
        inputs: Mapping[str, tuple[int, ...]],
        nodes: Mapping[str, tuple[Any, ...]],
        outputs: Iterable[str],
        dtype: str = "float64",
        chunks: Mapping[str, Chunks] | None = None,
    ) -> EinGraph:
        """Build a graph from plain values.

        Parameters
        ----------
        inputs
            Shape of each given tensor.
        nodes
            ``name: (subscripts, operand, ..., options)``; options are an optional last dict with ``"join"`` and
            ``"aggregate"``.  Labels are local to a node.
        outputs
            Names of the nodes that leave the graph.
        dtype
            Element type of every tensor.
        chunks
            How given tensors are cut; those not named may be had in any grid.

        Raises
        ------
        ExpressionError
            If a spec cannot be read, an operand is unknown or used before it is computed, a name is used twice,
            extents disagree, or an output is not a node.
        """
        dtype = np.dtype(dtype).name
        layouts = dict(chunks or {})
        given = {
            name: Given(
                name, tuple(map(int, shape)), dtype, layouts.pop(name, None), stays=name in (chunks or ())
            )
            for name, shape in inputs.items()
        }
        if layouts:
            raise ExpressionError(
                f"chunks given for {next(iter(layouts))!r}; expected one of {', '.join(given)}"
            )
        for tensor in given.values():
            if tensor.chunks is not None and tuple(map(sum, tensor.chunks)) != tensor.shape:
                raise ExpressionError(
                    f"chunks of {tensor.name!r} add up to {tuple(map(sum, tensor.chunks))}; expected {tensor.shape}"
                )
        built: dict[str, Node] = {}
        shapes = {name: tensor.shape for name, tensor in given.items()}
        for name, spec in nodes.items():
            if name in shapes:
                raise ExpressionError(f"{name!r} names two tensors; expected one name each")
            built[name] = node = _node(name, spec, shapes, dtype)
            shapes[name] = node.shape
        leaving = []
        for name in outputs:
            if name not in built:
                raise ExpressionError(
                    f"output {name!r} is no node; expected one of {', '.join(built) or 'none'}"
                )
            leaving.append(Output(name, name))
        return cls(given, built, tuple(leaving))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self.inputs[name].shape if name in self.inputs else self.nodes[name].shape

    def dtype(self, name: str) -> str:
        """Element type of a tensor."""
        return self.inputs[name].dtype if name in self.inputs else self.nodes[name].dtype

    def itemsize(self, name: str) -> int:
        """Bytes of one element."""
        return np.dtype(self.dtype(name)).itemsize

    @cached_property
    def forms(self) -> Mapping[str, int]:
        """For every expression the number of its form: those of one form differ in names and in how tensors are held."""
        numbers: dict[object, int] = {}
        forms = {}
        for node in self.nodes.values():
            read = tuple((self.dtype(one), self.lies(one)) for one in node.inputs)
            key = (node.expression, node.extents, node.dtype, node.kernel, node.came, node.pinned, read)
            forms[node.name] = numbers.setdefault(key, len(numbers))
        return forms

    @cached_property
    def kinds(self) -> Mapping[str, int]:
        """For every expression the number of its kind: those of one kind differ in names alone."""
        numbers: dict[object, int] = {}
        kinds = {}
        for node in self.nodes.values():
            key = (self.forms[node.name], *map(self._held_as, (node.name, *node.inputs)))
            kinds[node.name] = numbers.setdefault(key, len(numbers))
        return kinds

    def lies(self, name: str) -> tuple[object, ...]:
        """How a given tensor is cut and where it lies; nothing for one that is computed, or may be had in any grid."""
        given = self.inputs.get(name)
        if given is None or given.chunks is None:
            return ()
        return given.chunks, given.pattern, given.stays

    def _held_as(self, name: str) -> bool:
        """Whether a tensor is held whole or may come and go tile by tile."""
        return self.inputs[name].stays if name in self.inputs else not self.may_pass_on(name)

    def may_inline(self, source: str, reader: str) -> bool:
        """Whether a tile of ``source`` may be computed inside the task of its only reader.

        That is an elementwise one, or one that reads nothing else.  Nothing is computed twice and nothing runs later than
        it has to: the reader needs that tile alone.
        """
        if source in self.inputs or not self.may_pass_on(source):
            return False
        node = self.nodes[reader]
        contracted = node.expression.contracted
        combines = any(extent > 1 for label, extent in node.extents if label in contracted)
        return len(node.inputs) == 1 or (node.kernel == "stream" and not combines)

    def inlines(self, source: str, reader: str, partitions: Mapping[str, Partition]) -> bool:
        """Whether the tiles of ``source`` are computed inside those of its reader: one each, the same."""
        return self.may_inline(source, reader) and self.passes_on(source, reader, partitions)

    def passes_on(self, source: str, reader: str, partitions: Mapping[str, Partition]) -> bool:
        """Whether each tile of ``source`` is wanted by one tile of its only reader and by nothing else."""
        if source in self.inputs or not self.may_pass_on(source):
            return False
        theirs, mine = partitions[source], partitions[reader]
        wanted = mine.grid(self.nodes[reader].expression.operands[self.readers[source][0][1]])
        grid = theirs.grid(self.nodes[source].expression.output)
        return grid == wanted and prod(map(len, grid)) == theirs.tiles == mine.tiles

    def may_pass_on(self, source: str) -> bool:
        """Whether an expression has one reader and does not leave the graph."""
        return source in self._passed_on

    @cached_property
    def _passed_on(self) -> frozenset[str]:
        leaving = {output.source for output in self.outputs}
        return frozenset(name for name, found in self.readers.items() if len(found) == 1) - leaving

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor, one copy."""
        return prod(self.shape(name)) * self.itemsize(name)


def _node(name: str, spec: tuple[Any, ...], shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Node:
    """Read one entry of a spec."""
    subscripts, *operands = spec
    options: dict[str, Any] = dict(operands.pop()) if operands and isinstance(operands[-1], Mapping) else {}
    join, aggregate = options.pop("join", "multiply"), options.pop("aggregate", "sum")
    if options:
        raise ExpressionError(f"unknown option {next(iter(options))!r} of {name!r}; expected join, aggregate")
    if not isinstance(aggregate, (str, Aggregate)):
        raise ExpressionError(f"aggregate of {name!r} is {aggregate!r}; expected a name or an Aggregate")
    expression = Expression.parse(subscripts, join, aggregate)
    for operand in operands:
        if operand not in shapes:
            raise ExpressionError(
                f"operand {operand!r} of {name!r} is not known yet; expected one of {', '.join(shapes)}"
            )
    extents = expression.extents(tuple(shapes[operand] for operand in operands))
    ordered = tuple((label, extents[label]) for label in expression.labels)
    return Node(name, expression, tuple(operands), ordered, dtype)
