"""What users say of single layers: ``with dask.annotate(eindecomp=...)``.

``False`` leaves the layers made inside alone.  ``{"partition": {"i": 4}}`` fixes how labels are cut, as a number of
parts or as chunks; ``{"chunks": ...}`` how the result is, in any of Dask's spellings; the rest of the graph is planned
around what is fixed.  Labels are those of the einsum that made the layer, or those that the plan prints where there
is none.

What is said travels in the annotations of layers, so that a scheduler of another process hears of it, and is taken off
before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from dask.array.core import normalize_chunks
from dask.highlevelgraph import HighLevelGraph, Layer

from dask_eindecomp.partition import Cut, PartitionError, cut

__all__ = ["NAME", "AnnotationError", "Wish", "Wishes", "has_wishes", "without_wishes"]

NAME = "eindecomp"
"""Of the annotation."""


class AnnotationError(ValueError):
    """An annotation that says nothing which could be done; a mistake of the user, always raised."""


@dataclass
class Wish:
    """Cuts fixed by hand, of all layers that one annotation stands on, and what of them was met."""

    partition: Mapping[str, int | Cut]
    """Number of parts, or chunks, of labels."""
    chunks: Any = None
    """Chunks of the result as Dask takes them; None for any."""
    met: set[str] = field(default_factory=set)
    """Labels that an expression had, and ``"chunks"`` where these fit a result."""
    tried: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What it stands on: labels of each expression, by its title."""

    def cuts(
        self,
        title: str,
        spoken: Mapping[str, str],
        extents: Mapping[str, int],
        output: tuple[str, ...],
        dtype: str,
    ) -> dict[str, Cut]:
        """The cuts of one expression that are fixed, by label.

        Parameters
        ----------
        title
            What messages call the expression.
        spoken
            The label that the user's label stands for.
        extents
            Length of each label.
        output
            Labels of the result.
        dtype
            Its element type, for chunks of so many bytes.

        Raises
        ------
        AnnotationError
            If a label cannot be cut so, or partition and chunks disagree.

        >>> Wish({"a": 2}).cuts("product", {"a": "i", "b": "j"}, {"i": 4, "j": 3}, ("i", "j"), "float64")
        {'i': (2, 2)}
        """
        self.tried[title] = tuple(spoken)
        found: dict[str, Cut] = {}
        for label, wanted in self.partition.items():
            if label in spoken:
                self.met.add(label)
                found[spoken[label]] = _cut(title, label, extents[spoken[label]], wanted)
        shape = tuple(extents[label] for label in output)
        for label, wanted in zip(output, self._chunks(shape, dtype)):
            if found.setdefault(label, wanted) != wanted:
                raise AnnotationError(
                    f"{title} is to have chunks {wanted} along the axis that partition cuts into {found[label]}; "
                    "expected one of them, or both alike"
                )
        return found

    def _chunks(self, shape: tuple[int, ...], dtype: str) -> tuple[Cut, ...]:
        """Chunks of a result of this shape; none where nothing is said, or what is said is of another shape."""
        if self.chunks is None:
            return ()
        try:
            found: tuple[Cut, ...] = normalize_chunks(self.chunks, shape=shape, dtype=dtype)
        except (ValueError, TypeError):
            return ()
        self.met.add("chunks")
        return found

    def check(self) -> None:
        """Refuse what no expression could meet."""
        if not self.tried:
            return  # the plan says why these layers were left alone
        titles = ", ".join(self.tried)
        labels = ", ".join(dict.fromkeys(label for mine in self.tried.values() for label in mine))
        for label in self.partition:
            if label not in self.met:
                raise AnnotationError(
                    f"no label {label!r} in {titles}, which is annotated with a partition of it; expected one of {labels}"
                )
        if self.chunks is not None and "chunks" not in self.met:
            raise AnnotationError(
                f"chunks {self.chunks!r} fit no result of {titles}, which is annotated with them; expected chunks of "
                "its shape"
            )


class Wishes:
    """What is said of the layers of a graph."""

    def __init__(self, dsk: HighLevelGraph) -> None:
        self._layers = dsk.layers
        self._read: dict[str, Wish] = {}

    def why_alone(self, name: str) -> str:
        """Why a layer is to be left alone; empty if it is not.

        Raises
        ------
        AnnotationError
            If what is said of it cannot be read.
        """
        said = self._layers[name].annotations or {}
        if others := sorted(one for one in said if one != NAME):
            return f"annotated with {', '.join(others)}"
        if said.get(NAME) is False:
            return f"annotated with {NAME}=False"
        self.of(name)
        return ""

    def of(self, name: str) -> Wish | None:
        """The cuts of a layer that are fixed; one for all layers of which the same is said."""
        layer = self._layers.get(name)
        said = None if layer is None else (layer.annotations or {}).get(NAME)
        if said is None or said is True or said is False:
            return None
        if repr(said) not in self._read:
            self._read[repr(said)] = _wish(said)
        return self._read[repr(said)]

    def check(self) -> None:
        """Refuse what no expression could meet.

        Raises
        ------
        AnnotationError
            If a label is in none of the expressions that one annotation stands on, or chunks fit none of their results.
        """
        for wish in self._read.values():
            wish.check()


def _wish(value: Any) -> Wish:
    """What an annotation wants."""
    wanted = "False, True, or a dictionary with partition (parts or chunks of labels), chunks, or both"
    if not isinstance(value, Mapping) or not {*value} <= {"partition", "chunks"}:
        raise AnnotationError(f"annotated with {NAME}={value!r}; expected {wanted}")
    partition = value.get("partition", {})
    if not isinstance(partition, Mapping) or not all(isinstance(label, str) for label in partition):
        raise AnnotationError(f"annotated with partition={partition!r}; expected parts or chunks by label")
    return Wish(dict(partition), value.get("chunks"))


def has_wishes(dsk: HighLevelGraph) -> bool:
    """Whether anything is fixed by hand."""
    return any(isinstance((layer.annotations or {}).get(NAME), Mapping) for layer in dsk.layers.values())


def without_wishes(dsk: HighLevelGraph) -> HighLevelGraph:
    """The same graph without what is said to the planner, which is none of the workers' business."""
    said = {name for name, layer in dsk.layers.items() if NAME in (layer.annotations or {})}
    if not said:
        return dsk
    layers = {name: _bare(layer) if name in said else layer for name, layer in dsk.layers.items()}
    return HighLevelGraph(layers, dsk.dependencies)


def _bare(layer: Layer) -> Layer:
    bare = copy(layer)
    bare.annotations = {key: value for key, value in layer.annotations.items() if key != NAME} or None
    return bare


def _cut(title: str, label: str, extent: int, wanted: Any) -> Cut:
    """The cut of one label that is asked for."""
    try:
        if isinstance(wanted, Integral):
            return cut(extent, int(wanted))
        found = tuple(map(int, wanted))
    except (PartitionError, TypeError, ValueError) as error:
        raise AnnotationError(f"label {label!r} of {title} is to be cut into {wanted!r}: {error}") from error
    if sum(found) != extent or min(found, default=0) < 0:
        raise AnnotationError(
            f"label {label!r} of {title} is {extent} long, but is to be cut into {found}; expected chunks that add up to "
            f"{extent}"
        )
    return found
