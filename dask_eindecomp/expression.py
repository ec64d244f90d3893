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

__all__ = ["AGGREGATES", "JOINS", "REPEATABLE", "Aggregate", "Expression", "ExpressionError", "Labels"]

Labels = tuple[str, ...]


class ExpressionError(ValueError):
    """An expression that cannot be read, or whose operands do not fit it."""


@dataclass(frozen=True, slots=True)
class Aggregate:
    """An associative and commutative way to combine values along an axis.

    >>> Aggregate(0, np.bitwise_xor).name
    'bitwise_xor'
    """

    identity: Any
    """The value that changes nothing when combined; None if there is none."""
    combine: Callable[..., Any]
    """Takes two arrays of partial results, gives one of the same shape."""
    finalize: Callable[..., Any] | None = None
    """Applied to the last combined result, gives an array of its shape; None for nothing."""
    name: str = ""
    """What the plan calls it; by default the name of what combines."""

    def __post_init__(self) -> None:
        if not callable(self.combine):
            raise ExpressionError(f"combine is {self.combine!r}; expected a function of two arrays")
        if self.finalize is not None and not callable(self.finalize):
            raise ExpressionError(f"finalize is {self.finalize!r}; expected a function of an array or None")
        named = self.name or str(getattr(self.combine, "__name__", type(self.combine).__name__))
        object.__setattr__(self, "name", named)


AGGREGATES: Mapping[str, Aggregate] = {
    aggregate.name: aggregate
    for aggregate in (
        Aggregate(0, np.add, name="sum"),
        Aggregate(1, np.multiply, name="prod"),
        Aggregate(None, np.maximum, name="max"),
        Aggregate(None, np.minimum, name="min"),
        Aggregate(False, np.logical_or, name="any"),
        Aggregate(True, np.logical_and, name="all"),
        Aggregate(-np.inf, np.logaddexp, name="logsumexp"),
        Aggregate(0, np.add, name="mean"),
        Aggregate(0, np.add, name="count"),
    )
}
"""Aggregates known by name.  A mean is a sum divided at the end; a count that of values which are not zero."""


def squared_difference(x: Any, y: Any) -> Any:
    """The square of a difference.

    >>> squared_difference(np.array([1, 5]), 3)
    array([4, 4])
    """
    return np.square(np.subtract(x, y))


def absolute_difference(x: Any, y: Any) -> Any:
    """The absolute value of a difference; of unsigned integers, too, whose difference would wrap around.

    >>> absolute_difference(np.uint8(3), np.uint8(5)).item()
    2
    """
    if np.result_type(x, y).kind == "u":
        return np.subtract(np.maximum(x, y), np.minimum(x, y))
    return np.absolute(np.subtract(x, y))


def exp_difference(x: Any, y: Any) -> Any:
    """The exponential of a difference, as in a softmax.

    >>> exp_difference(1.0, 1.0).item()
    1.0
    """
    return np.exp(np.subtract(x, y))


JOINS: Mapping[str, Callable[..., Any]] = {
    "multiply": np.multiply,
    "add": np.add,
    "subtract": np.subtract,
    "divide": np.divide,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "squared_difference": squared_difference,
    "absolute_difference": absolute_difference,
    "equal": np.equal,
    "less": np.less,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "power": np.power,
    "hypot": np.hypot,
    "exp_difference": exp_difference,
}
"""Joins known by name, of two operands; `REPEATABLE` ones take any number, one after the other."""

REPEATABLE = frozenset({"multiply", "add", "minimum", "maximum", "logical_and", "logical_or"})
"""Joins of more than two operands: it does not matter which of them meet first."""


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
