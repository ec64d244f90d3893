"""Axes of arrays by label: taken from a diagonal, dropped, brought into an order, repeated.

Kernels do with these what an expression says, through NumPy's protocols: blocks of any array library come out as they
went in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

__all__ = [
    "Array",
    "Extents",
    "Labels",
    "Operands",
    "aligned",
    "diagonal",
    "ordered",
    "shape_of",
    "spread",
    "squeezed",
]

Array = Any
Labels = tuple[str, ...]
Operands = tuple[Labels, ...]
Extents = Mapping[str, int]


def shape_of(extents: Extents, labels: Iterable[str]) -> tuple[int, ...]:
    """Lengths of some labels."""
    return tuple(extents[label] for label in labels)


def diagonal(array: Array, labels: Labels) -> tuple[Array, Labels]:
    """One axis for each label: the diagonal where a label stands twice."""
    while len({*labels}) < len(labels):
        label = next(one for one in labels if labels.count(one) > 1)
        first, second = [axis for axis, one in enumerate(labels) if one == label][:2]
        array = array.diagonal(axis1=first, axis2=second)
        labels = (*(one for axis, one in enumerate(labels) if axis not in (first, second)), label)
    return array, labels


def squeezed(array: Array, labels: Labels, axes: tuple[int, ...]) -> tuple[Array, Labels]:
    """Without these axes, whose length is 1."""
    if not axes:
        return array, labels
    return array.squeeze(axis=axes), tuple(label for axis, label in enumerate(labels) if axis not in axes)


def ordered(array: Array, labels: Labels, order: Labels) -> Array:
    """Axes in another order of the same labels."""
    return array if labels == order else array.transpose(tuple(map(labels.index, order)))


def aligned(array: Array, labels: Labels, output: Labels) -> Array:
    """An array that broadcasts against the output: its labels in order, length 1 for those it lacks.

    Leading axes are left to NumPy.  What has no axes gets none and what has some keeps one: NumPy 1 gives
    them different say in the element type of a result.
    """
    had_axes = bool(labels)
    array, labels = diagonal(array, labels)
    gone = tuple(axis for axis, label in enumerate(labels) if label not in output)
    array, labels = squeezed(array, labels, gone)
    present = tuple(label for label in output if label in labels)
    array = ordered(array, labels, present)
    if not present:
        return array.reshape((1,)) if had_axes and output else array
    tail = output[output.index(present[0]) :]
    lengths = dict(zip(present, array.shape))
    return array if tail == present else array.reshape(tuple(lengths.get(label, 1) for label in tail))


def spread(array: Array, labels: Labels, output: Labels, extents: Extents) -> Array:
    """An array with the output's labels, repeated along those it lacks."""
    array = aligned(array, labels, output)
    shape = shape_of(extents, output)
    return array if array.shape == shape else np.broadcast_to(array, shape)
