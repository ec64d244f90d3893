"""How values meet: joins and aggregates as functions of arrays, and what becomes of them at the end.

Functions of a user stay pickled until a worker calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import cloudpickle
import numpy as np

from dask_eindecomp.axes import Array

__all__ = ["Combine", "Counting", "Finish", "Kept", "LogSumExp", "Merge", "Repeated"]


class Kept:
    """A function that stays pickled until it is called: where tasks only pass by, its module need not be there.

    >>> Kept(max)(1, 2)
    2
    >>> Kept(max) == Kept(max)
    True

    Raises
    ------
    TypeError
        If the function cannot be pickled.
    """

    __slots__ = ("_function", "name", "pickled")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = str(getattr(function, "__name__", type(function).__name__))
        try:
            self.pickled = cloudpickle.dumps(function)
        except Exception as error:
            raise TypeError(
                f"{self.name} cannot be pickled: {error}; expected a function that can"
            ) from error
        self._function: Callable[..., Any] | None = function

    def __call__(self, *arguments: Any) -> Any:
        """Call it."""
        if self._function is None:
            self._function = cloudpickle.loads(self.pickled)
        assert self._function is not None
        return self._function(*arguments)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and self.pickled == other.pickled

    def __hash__(self) -> int:
        return hash(self.pickled)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _kept, (self.name, self.pickled)

    def __dask_tokenize__(self) -> Any:
        return ("Kept", self.pickled)


def _kept(name: str, pickled: bytes) -> Kept:
    """A function that has not been called here yet."""
    kept = object.__new__(Kept)
    kept.name, kept.pickled, kept._function = name, pickled, None
    return kept


@dataclass(frozen=True, slots=True)
class Combine:
    """An associative and commutative function of two arrays, and what it makes of nothing.

    >>> Combine(np.maximum, None).along(np.array([[1, 5], [4, 2]]), "int64")
    array([4, 5])
    """

    function: Callable[..., Any]
    """Takes two arrays, gives one."""
    identity: Any
    """The value that changes nothing; None if there is none."""

    def along(self, values: Array, dtype: str) -> Array:
        """All values along the first axis combined, of which there is at least one."""
        function = self.function
        if isinstance(function, np.ufunc) and isinstance(values, np.ndarray):
            logical = function in (np.logical_or, np.logical_and)  # casting first would be a pass more
            return function.reduce(values, axis=0, dtype=None if logical else dtype)
        values = values.astype(dtype, copy=False)
        while len(values) > 1:
            half = len(values) // 2
            rest = values[2 * half :]
            values = self._of_same_shape(values[:half], values[half : 2 * half])
            values = np.concatenate([values, rest]) if len(rest) else values
        return values[0]

    def into(self, total: Array, value: Array) -> None:
        """Combine a value into an array, in place."""
        if isinstance(self.function, np.ufunc):
            self.function(total, value, out=total)
        else:
            total[...] = self._of_same_shape(total, value)

    def together(self, one: Array, other: Array) -> Array:
        """A new array of two combined."""
        return self._of_same_shape(one, other)

    def nothing(self, like: Array, shape: tuple[int, ...], dtype: str) -> Array:
        """What is combined of no values at all.

        Raises
        ------
        ValueError
            If there is no such value.
        """
        if self.identity is None:
            raise ValueError(
                f"{self.function!r} has no identity and combines no values; expected an axis of 1 or more"
            )
        return np.full_like(like, self.identity, shape=shape, dtype=dtype)

    def _of_same_shape(self, one: Array, other: Array) -> Array:
        found = self.function(one, other)
        if getattr(found, "shape", None) != one.shape:
            raise ValueError(
                f"combine function {self.function!r} made {getattr(found, 'shape', type(found).__name__)} of two "
                f"arrays of shape {one.shape}; expected that shape"
            )
        return found


@dataclass(frozen=True, slots=True)
class LogSumExp(Combine):
    """The logarithm of a sum of exponentials, however large these are.

    >>> print(LogSumExp(np.logaddexp, -np.inf).along(np.array([1000.0, 1000.0]), "float64").round(3))
    1000.693
    """

    def along(self, values: Array, dtype: str) -> Array:
        """All values along the first axis, the greatest of them taken out."""
        values = values.astype(dtype, copy=False)
        greatest = values.max(axis=0)
        shift = np.where(np.isfinite(greatest), greatest, np.zeros_like(greatest))
        with np.errstate(divide="ignore", over="ignore"):
            return np.log(np.exp(values - shift).sum(axis=0)) + shift


@dataclass(frozen=True, slots=True)
class Counting:
    """A join of which is told only whether it gives anything but zero.

    >>> Counting(np.subtract)(np.array([1, 2]), np.array([1, 1])).tolist()
    [False, True]
    """

    join: Callable[..., Any] | None
    """The join; None for the values of one operand."""

    def __call__(self, *values: Array) -> Array:
        """Whether joined values are not zero."""
        joined = values[0] if self.join is None else self.join(*values)
        return joined != 0


@dataclass(frozen=True, slots=True)
class Repeated:
    """A join of any number of operands, one after the other.

    >>> Repeated(np.maximum)(1, 3, 2).item()
    3
    """

    join: Callable[..., Any]
    """The join of two."""

    def __call__(self, *values: Array) -> Array:
        """Joined values."""
        return reduce(self.join, values)


@dataclass(frozen=True, slots=True)
class Finish:
    """What becomes of values when all of them are combined.

    >>> Finish("float64", count=4)(np.array([2, 6]))
    array([0.5, 1.5])
    """

    dtype: str
    """Element type of the result."""
    function: Callable[..., Any] | None = None
    """Applied first; None for nothing."""
    count: int | None = None
    """How many values were added up, for their mean; None for no mean."""

    def __call__(self, total: Array) -> Array:
        """The result; without axes a scalar of its library, as Dask's own reductions give."""
        if self.function is not None:
            shape = total.shape
            total = self.function(total)
            if getattr(total, "shape", None) != shape:
                raise ValueError(
                    f"finalize function {self.function!r} made {getattr(total, 'shape', type(total).__name__)} of "
                    f"an array of shape {shape}; expected that shape"
                )
        if self.count is not None:
            total = np.true_divide(total, self.count)
        return total.astype(self.dtype, copy=False)[() if total.ndim == 0 else ...]


@dataclass(frozen=True, slots=True)
class Merge:
    """Combines partial results of one tile; none of them is changed.

    >>> Merge(Combine(np.maximum, None))([np.array([1, 5]), np.array([4, 2])])
    array([4, 5])
    """

    combine: Combine
    """How they meet."""
    finish: Callable[..., Any] | None = None
    """Applied to the result."""

    def __call__(self, partials: list[Array]) -> Array:
        """Combine them."""
        total, *rest = partials
        for number, one in enumerate(rest):
            if number:
                self.combine.into(total[...], one)
            else:  # a new array: the first partial result is someone else's
                total = self.combine.together(total, one)[...]
        return total if self.finish is None else self.finish(total)
