"""An array type that is not NumPy's: a stand-in for CuPy where there is no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

__all__ = ["StandIn"]


class StandIn(NDArrayOperatorsMixin):
    """An array that lives elsewhere: NumPy's protocols reach it, NumPy's conversions do not.

    Like CuPy's, it refuses to become an ndarray unasked, to be mixed with ndarrays that have axes, and the
    ``subok`` argument; and it gives arrays without axes where NumPy gives scalars.

    >>> np.matmul(StandIn(np.eye(2)), StandIn(np.ones(2)))
    StandIn([1., 1.])
    """

    __array_priority__ = 100

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)
    ndim = property(lambda self: self.values.ndim)
    size = property(lambda self: self.values.size)
    nbytes = property(lambda self: self.values.nbytes)
    T = property(lambda self: StandIn(self.values.T))

    def __repr__(self) -> str:
        return repr(self.values).replace("array", "StandIn")

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("implicit conversion of a StandIn to an ndarray")

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **kwargs: Any
    ) -> Any:
        if out:
            if not all(isinstance(one, StandIn) for one in out):
                raise TypeError("a StandIn cannot be written into an ndarray")
            kwargs["out"] = out
        result = getattr(ufunc, method)(*_unwrapped(inputs), **_unwrapped(kwargs))
        return out[0] if out else _wrapped(result)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if "subok" in kwargs:
            raise TypeError("subok is not supported")
        return _wrapped(function(*_unwrapped(args), **_unwrapped(kwargs)))

    def __getitem__(self, index: Any) -> StandIn:
        return StandIn(self.values[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[index] = _unwrapped(value)

    def astype(self, dtype: Any, copy: bool = True) -> StandIn:
        values = self.values.astype(dtype, copy=copy)
        return self if values is self.values else StandIn(values)

    def copy(self) -> StandIn:
        return StandIn(self.values.copy())

    def reshape(self, *shape: Any) -> StandIn:
        return StandIn(self.values.reshape(*shape))

    def transpose(self, *axes: Any) -> StandIn:
        return StandIn(self.values.transpose(*axes))

    def squeeze(self, axis: Any = None) -> StandIn:
        return StandIn(self.values.squeeze(axis))

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> StandIn:
        return StandIn(self.values.diagonal(offset, axis1, axis2))

    def sum(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> StandIn:
        return StandIn(self.values.sum(axis, dtype, keepdims=keepdims))

    def max(self, axis: Any = None, keepdims: bool = False) -> StandIn:
        return StandIn(self.values.max(axis, keepdims=keepdims))

    def any(self, axis: Any = None, keepdims: bool = False) -> StandIn:
        return StandIn(self.values.any(axis, keepdims=keepdims))


def _unwrapped(value: Any) -> Any:
    if isinstance(value, StandIn):
        return value.values
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("a StandIn cannot be mixed with an ndarray")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_unwrapped, value))
    if isinstance(value, dict):
        return {key: _unwrapped(one) for key, one in value.items()}
    return value


def _wrapped(value: Any) -> Any:
    return StandIn(value) if isinstance(value, (np.ndarray, np.generic)) else value
