"""One extended Einstein summation in normal form.

``Z[output] <- aggregate over every other label of join(X[labels], Y[labels], ...)``: the join is any scalar
function, the aggregate any associative and commutative one.  Einstein summation is the case of *multiply* and
*sum*.  A label is a short string; in a spec it is one character, so 52 letters are no limit to a graph that was
built some other way.

Two conventions keep every later stage free of special cases.  An axis of length 1 that broadcasts is a label of
its own, of extent 1, that is absent from the output.  A label that only the output has is an axis to broadcast to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["AGGREGATES", "JOINS", "Aggregate", "Expression", "ExpressionError", "Labels"]

Labels = tuple[str, ...]


class ExpressionError(ValueError):
    """An expression that cannot be read, or whose operands do not fit it."""


@dataclass(frozen=True, slots=True)
class Aggregate:
    """An associative and commutative way to combine values along an axis.

    >>> Aggregate("range", identity=0, combine=np.maximum).name
    'range'
    """

    name: str
    """What the plan calls it."""
    identity: Any
    """The value that changes nothing when combined; None if there is none."""
    combine: Callable[..., Any]
    """Takes two arrays of partial results, gives one."""
    finalize: Callable[..., Any] | None = None
    """Applied to the last combined result; None for nothing."""


AGGREGATES: Mapping[str, Aggregate] = {
    aggregate.name: aggregate
    for aggregate in (
        Aggregate("sum", 0, np.add),
        Aggregate("prod", 1, np.multiply),
        Aggregate("max", None, np.maximum),
        Aggregate("min", None, np.minimum),
        Aggregate("any", False, np.logical_or),
        Aggregate("all", True, np.logical_and),
        Aggregate("logsumexp", -np.inf, np.logaddexp),
    )
}
"""Aggregates known by name."""

JOINS: Mapping[str, Callable[..., Any]] = {
    "multiply": np.multiply,
    "add": np.add,
    "subtract": np.subtract,
    "divide": np.divide,
    "minimum": np.minimum,
    "maximum": np.maximum,
}
"""Joins known by name that take two operands."""


@dataclass(frozen=True, slots=True)
class Expression:
    """An extended Einstein summation: what is read, what is written, how values meet and combine.

    >>> matmul = Expression.parse("ij,jk->ik")
    >>> matmul.labels, matmul.contracted
    (('i', 'j', 'k'), ('j',))
    >>> str(Expression.parse("ij->i", aggregate="max"))
    'max ij->i'
    """

    operands: tuple[Labels, ...]
    """Labels of the axes of each operand; a label twice in one operand is a diagonal."""
    output: Labels
    """Labels of the result, each once."""
    join: str = "multiply"
    """Name of the scalar function applied to one value of each operand."""
    aggregate: str | Aggregate = "sum"
    """How values meet along the labels the output lacks."""
    labels: Labels = field(init=False, compare=False, repr=False)
    """Every distinct label, in order of first appearance, operands first."""
    contracted: Labels = field(init=False, compare=False, repr=False)
    """Labels the output lacks."""

    def __post_init__(self) -> None:
        labels = tuple(dict.fromkeys(label for labels in (*self.operands, self.output) for label in labels))
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "contracted", tuple(label for label in labels if label not in self.output))
        if len(set(self.output)) != len(self.output):
            twice = next(label for label in self.output if self.output.count(label) > 1)
            raise ExpressionError(
                f"output label {twice!r} appears {self.output.count(twice)} times in {self.einsum!r}; expected once"
            )
        if isinstance(self.aggregate, str) and self.aggregate not in AGGREGATES:
            raise ExpressionError(
                f"unknown aggregate {self.aggregate!r} in {self.einsum!r}; "
                f"expected one of {', '.join(AGGREGATES)} or an Aggregate"
            )

    @classmethod
    def parse(cls, subscripts: str, join: str = "multiply", aggregate: str | Aggregate = "sum") -> Expression:
        """Read ``"ij,jk->ik"``; without an arrow the output is every label that appears once, sorted.

        Raises
        ------
        ExpressionError
            If the subscripts hold anything but labels, commas and one arrow, the output repeats a label or has
            one that no operand has, or the aggregate is unknown.
        """
        left, arrow, right = subscripts.replace(" ", "").partition("->")
        operands = tuple(tuple(part) for part in left.split(","))
        strange = sorted({label for labels in (*operands, right) for label in labels if not label.isalpha()})
        if strange:
            raise ExpressionError(f"character {strange[0]!r} in {subscripts!r} is no label; expected letters")
        every = [label for labels in operands for label in labels]
        output = (
            tuple(right) if arrow else tuple(sorted(label for label in set(every) if every.count(label) == 1))
        )
        unknown = [label for label in output if label not in every]
        if unknown:
            raise ExpressionError(
                f"output label {unknown[0]!r} of {subscripts!r} is in no operand; expected one of "
                f"{', '.join(sorted(set(every))) or 'none'}"
            )
        return cls(operands, output, join, aggregate)

    @property
    def einsum(self) -> str:
        """The subscripts, for a reader."""
        return ",".join("".join(labels) for labels in self.operands) + "->" + "".join(self.output)

    @property
    def aggregate_name(self) -> str:
        """Name of the aggregate."""
        return self.aggregate if isinstance(self.aggregate, str) else self.aggregate.name

    def extents(self, shapes: tuple[tuple[int, ...], ...]) -> dict[str, int]:
        """Length of every label, from the operands' shapes.

        Raises
        ------
        ExpressionError
            If an operand has another number of axes than labels, or a label two lengths.
        """
        if len(shapes) != len(self.operands):
            raise ExpressionError(
                f"{self.einsum!r} takes {len(self.operands)} operands but was given {len(shapes)}"
            )
        found: dict[str, tuple[int, int]] = {}
        for number, (labels, shape) in enumerate(zip(self.operands, shapes)):
            if len(labels) != len(shape):
                raise ExpressionError(
                    f"operand {number} of {self.einsum!r} has {len(shape)} axes but {len(labels)} labels"
                )
            for label, extent in zip(labels, shape):
                first, known = found.setdefault(label, (number, extent))
                if known != extent:
                    raise ExpressionError(
                        f"label {label!r} is {known} long in operand {first} but {extent} in operand {number} "
                        f"of {self.einsum!r}"
                    )
        return {label: extent for label, (_, extent) in found.items()}

    def __str__(self) -> str:
        words = [self.einsum]
        if self.contracted and self.aggregate_name != "sum":
            words.insert(0, self.aggregate_name)
        if self.join != "multiply":
            words.insert(0, self.join)
        return " ".join(words)
