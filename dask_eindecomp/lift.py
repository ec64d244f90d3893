"""From a Dask graph to an ``EinGraph``.

Layers are taken in topological order.  Each idiom below recognises one kind by the identity of its function, or, for
layers Dask writes out task by task, by checking every task (``layers``).  What is recognised becomes a *view* of a
tensor: a rechunk, a transposition, an inserted axis are no computation, only another way to read the same tensor,
so the planner is free of them.  A contraction arrives as several layers (blocks, sum, tree); until the last of them
it is *pending*.  Whatever no idiom takes is *opaque*: it stays as it is, what it gives has the chunks it has, and
what it reads keeps the names and chunks it was promised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isnan, prod
from typing import Any

import dask.array.chunk
import dask.array.core
import dask.array.einsumfuncs
import dask.array.reductions
import dask.array.routines
import dask.array.slicing
import numpy as np
from dask._task_spec import Alias, GraphNode, TaskRef
from dask.blockwise import Blockwise, BlockwiseDep
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph

from dask_eindecomp import functions, kernels, layers
from dask_eindecomp.annotations import Wishes
from dask_eindecomp.expression import Aggregate, Expression, Labels
from dask_eindecomp.folds import FoldBlocks, FoldTree, passed
from dask_eindecomp.grams import BLAS
from dask_eindecomp.graph import EinGraph, Given, Node, Output
from dask_eindecomp.layers import Axes, Layout
from dask_eindecomp.partition import Cut

__all__ = ["ARRAY_TYPES", "Lifted", "ShapeError", "holds_contraction", "lift"]

ARRAY_TYPES = frozenset({"numpy.ndarray", "cupy.ndarray", "cupy._core.core.ndarray"})
"""Block types whose kernels are tested; blocks of any other type are left alone."""


class ShapeError(ValueError):
    """Extents that NumPy refuses to contract; a mistake of the user, always raised."""


class NotLifted(Exception):
    """Why a layer stays as it is."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor read in another order of axes, without some of length 1, or with new ones."""

    source: str
    """The node or given tensor."""
    axes: Axes
    """Source axis behind each axis; None is a new axis of length 1."""


@dataclass(frozen=True)
class Pending:
    """Layers of a contraction or reduction so far."""

    sources: tuple[str, ...]
    """Names of the layers read."""
    indices: tuple[Labels, ...]
    """Dask's indices of each of them."""
    output: Labels
    """Dask's indices of the blocks, contracted ones included."""
    contracted: Labels
    """Indices to be contracted or reduced."""
    numblocks: tuple[int, ...]
    """Blocks along each axis at this level."""
    chunk: Callable[..., Any] | None = None
    """Chunk function of a reduction; None for a contraction."""
    cast: str | None = None
    """Element type the operands of a contraction are cast to first."""
    combine: Callable[..., Any] | None = None
    """Function of an inner level of the tree."""
    kernel: str = "blas"
    """Speed class of Dask's own kernel."""
    fold: FoldBlocks | None = None
    """The kernel of an extended summation; None for any other contraction."""
    heeds_masks: bool = True
    """Whether masked elements are left out of a contraction."""
    spoken: Mapping[str, str] = field(default_factory=dict)
    """Dask's index for each label of the user's; empty where there are none."""
    scalar: bool = False
    """Whether Dask's result without axes is a scalar of the library, not an array."""
    tasks: int = 0
    """Tasks so far, after Dask's fusion."""


@dataclass(frozen=True)
class Lifted:
    """An ``EinGraph`` and the layers that stay beside it."""

    graph: EinGraph
    """What can be planned."""
    outside: frozenset[str]
    """Layers that stay as they are."""

    @property
    def contracts(self) -> bool:
        """Whether any expression joins operands and aggregates: only then is there something to gain."""
        return any(
            len(node.inputs) > 1 and any(extent > 1 for label, extent in node.extents if label in contracted)
            for node in self.graph.nodes.values()
            if (contracted := node.expression.contracted)
        )


def holds_contraction(dsk: HighLevelGraph) -> bool:
    """Whether any layer is a contraction: a quick look that spares all other graphs the work."""
    return any(
        type(layer) is Blockwise
        and (isinstance(layer.task.func, FoldBlocks) or layer.task.func in functions.CONTRACTIONS)
        for layer in dsk.layers.values()
    )


def lift(dsk: HighLevelGraph, keys: Any, array_types: frozenset[str] = ARRAY_TYPES) -> Lifted:
    """Lift what is understood of a Dask graph.

    Parameters
    ----------
    dsk
        The graph as a Dask collection holds it.
    keys
        What is wanted of it, nested as Dask likes.
    array_types
        Qualified names of the block types to lift.

    Raises
    ------
    ShapeError
        If a matmul or tensordot contracts extents that disagree, or contracts an axis twice.
    AnnotationError
        If what is annotated cannot be read or met.
    """
    lifter = _Lifter(dsk, array_types)
    flat = list(flatten(keys, container=(list, set)))
    wanted = list(dict.fromkeys(key[0] if isinstance(key, tuple) else key for key in flat))
    for name in dsk._toposort_layers():
        lifter.take(name)
    blocks: Mapping[str, int] | None = None
    # culling writes every task of some layers out
    if not lifter.is_whole(Counter(key[0] for key in {*flat} if isinstance(key, tuple))):
        # a diagonal whose axes are cut differently is a graph that Dask cannot write out
        with suppress(ValueError):
            blocks = _blocks_by_name(dsk.cull(set(flat)))
    return lifter.finish([name for name in wanted if name in dsk.layers], blocks)


class _Lifter:
    """What is known while layers are taken one after the other."""

    def __init__(self, dsk: HighLevelGraph, array_types: frozenset[str]) -> None:
        self.dsk = dsk
        self.dependents = dsk.dependents  # a property that Dask computes anew each time
        self.array_types = array_types
        self.layouts: dict[str, Layout] = {}
        self.views: dict[str, View] = {}
        self.pending: dict[str, Pending] = {}
        self.inputs: dict[str, Given] = {}
        self.nodes: dict[str, Node] = {}
        self.reasons: dict[str, str] = {}
        self.rechunks: dict[str, int] = {}
        self.stale: set[str] = set()
        self.foreign: set[str] = set()
        self.wishes = Wishes(dsk)

    def take(self, name: str) -> None:
        """Lift one layer if an idiom knows it."""
        layer = self.dsk.layers[name]
        try:
            if self.dsk.dependencies[name] & self.stale:
                raise NotLifted("chunk sizes that may have become unknown")
            self.layouts[name] = self.layout(name)
            if not self.dsk.dependencies[name] and not isinstance(layer, Blockwise):
                raise NotLifted("data")
            if why := self.wishes.why_alone(name):
                raise NotLifted(why)
            found = (
                self.blockwise(name, layer) if type(layer) is Blockwise else self.materialized(name, layer)
            )
        except NotLifted as reason:
            self.reasons[name] = str(reason)
            self.doubt(name, layer)
            return
        if isinstance(found, View):
            self.views[name] = found
        else:
            self.pending[name] = found

    def doubt(self, name: str, layer: Any) -> None:
        """Forget what Dask says of a layer that stays where it is known to be out of date or wrong."""
        sources = self.dsk.dependencies[name]
        function = layer.task.func if isinstance(layer, Blockwise) else None
        inner = function in functions.CONTRACTIONS or "keepdims" in getattr(
            getattr(layer, "task", None), "kwargs", {}
        )
        if any(functions.base(function) is stale for stale in functions.STALE) or sources & self.stale:
            # chunk sizes became unknown after the layer was written
            self.stale.add(name)
        if name not in self.layouts or (sources & self.foreign and (inner or function is None)):
            # a contraction of masked blocks claims to give plain ones
            said = self.dsk.layers[name].collection_annotations or {}
            if str(said.get("chunk_type", "")) not in self.array_types or sources & self.foreign:
                self.foreign.add(name)
        if inner or name in self.stale or name in self.foreign:
            self.layouts.pop(name, None)

    def layout(self, name: str) -> Layout:
        """What Dask says of the array of a layer."""
        said = self.dsk.layers[name].collection_annotations or {}
        if not {"shape", "dtype", "chunks", "chunk_type"} <= set(said):
            raise NotLifted("no array")
        shape, chunks, dtype = tuple(said["shape"]), said["chunks"], np.dtype(said["dtype"])
        if any(isnan(extent) for extent in shape):
            raise NotLifted("unknown chunk sizes")
        if dtype.kind not in "biufc":
            raise NotLifted(f"elements of type {dtype}")
        if str(said["chunk_type"]) not in self.array_types:
            raise NotLifted(f"blocks of type {said['chunk_type']}")
        whole = tuple(tuple(map(int, axis)) for axis in chunks)
        if tuple(map(sum, whole)) != shape:
            raise NotLifted("chunks that do not add up to the shape")
        return Layout(name, tuple(map(int, shape)), dtype, whole, str(said["chunk_type"]))

    # what operands are

    def view(self, name: str) -> View:
        """How the array of a layer is to be read; layers that stay become given tensors."""
        if name in self.views:
            return self.views[name]
        if name in self.pending:
            self.views[name] = view = self.resolve(name)
            return view
        if name not in self.layouts:
            raise NotLifted(f"reads {name}, {self.reasons.get(name, 'which is no array')}")
        layout = self.layouts[name]
        stays = layers.is_held(self.dsk.layers[name])
        self.inputs[name] = Given(
            name, layout.shape, layout.dtype.name, layout.chunks, stays=stays, kind=layout.kind
        )
        self.views[name] = view = View(name, tuple(range(len(layout.shape))))
        return view

    def resolve(self, name: str) -> View:
        """The value of a pending layer whose contracted axes are one block each."""
        pending = self.pending[name]
        at = [n for n, index in enumerate(pending.output) if index in pending.contracted]
        if pending.chunk or pending.fold or any(pending.numblocks[n] != 1 for n in at):
            raise NotLifted("one layer of a contraction is read by itself")
        view = self.contraction(name, pending, self.layouts[name].dtype)
        kept = iter(view.axes)
        return View(view.source, tuple(None if n in at else next(kept) for n in range(len(pending.output))))

    def shape(self, source: str) -> tuple[int, ...]:
        return self.inputs[source].shape if source in self.inputs else self.nodes[source].shape

    def operand(self, view: View, labels: Labels, names: _Names) -> Labels:
        """Labels of the tensor behind a view whose axes have the labels given."""
        behind = {axis: label for axis, label in zip(view.axes, labels) if axis is not None}
        return tuple(behind.get(axis) or names.fresh() for axis in range(len(self.shape(view.source))))

    # building nodes

    def add(
        self,
        name: str,
        operands: list[tuple[View, Labels]],
        output: Labels,
        extents: Mapping[str, int],
        **rest: Any,
    ) -> View:
        """Add one node, with views folded into its labels, and tell how its result is read."""
        names = _Names({*extents})
        folded = tuple(self.operand(view, labels, names) for view, labels in operands)
        whole_output = output
        if "finish" not in rest:
            # an inserted axis of length 1 is again a matter of reading
            present = {label for labels in folded for label in labels}
            output = tuple(label for label in output if label in present or extents[label] != 1)
        rest.setdefault("join", "multiply")
        aggregate = rest.pop("aggregate", "sum")
        expression = Expression(folded, output, rest.pop("join"), aggregate)
        lengths = dict(extents)
        for (view, _), labels in zip(operands, folded):
            for label, extent in zip(labels, self.shape(view.source)):
                known = lengths.setdefault(label, extent)
                assert known == extent, f"{name}: {label} is {known} and {extent} long"
        # canonical letters: repeated layers of a model become equal expressions
        letters = dict(zip(expression.labels, map(_letter, range(len(expression.labels)))))
        expression = replace(
            expression,
            operands=tuple(tuple(letters[label] for label in labels) for labels in folded),
            output=tuple(letters[label] for label in output),
        )
        renamed = {letters[label]: extent for label, extent in lengths.items() if label in letters}
        came = {letters[label]: cut for label, cut in rest.pop("came", {}).items() if label in letters}
        whole = tuple((label, came.get(label, (renamed[label],))) for label in expression.labels)
        spoken = rest.pop("spoken", None) or {letter: label for label, letter in letters.items()}
        wish = self.wishes.of(name)
        fixed = {} if wish is None else wish.cuts(_title(name), spoken, lengths, whole_output, rest["dtype"])
        tasks = rest.pop("tasks", 0) + sum(self.rechunks.pop(view.source, 0) for view, _ in operands)
        self.nodes[name] = Node(
            name,
            expression,
            tuple(view.source for view, _ in operands),
            tuple((label, renamed[label]) for label in expression.labels),
            came=whole,
            tasks=tasks,
            title=_title(name),
            pinned=tuple((letters[label], cut) for label, cut in fixed.items() if label in letters),
            **rest,
        )
        return View(name, tuple(output.index(label) if label in output else None for label in whole_output))

    def contraction(self, name: str, pending: Pending, dtype: np.dtype[Any]) -> View:
        """The node of a contraction: sums of products in the element type that Dask declares, or a fold."""
        operands, extents, came = self.align(pending.sources, pending.indices)
        output = tuple(index for index in pending.output if index not in pending.contracted)
        spoken = pending.spoken
        if pending.fold is not None:
            fold, finish = pending.fold, pending.fold.finish
            return self.add(
                name, operands, output, extents, dtype=dtype.name, join=fold.join, aggregate=fold.aggregate,
                step=fold.step, kernel=pending.kernel, came_kernel=pending.kernel, came=came, tasks=pending.tasks,
                spoken=spoken,
                **({} if finish is None else {"finish": finish}),
            )  # fmt: skip
        kernel = "blas" if dtype.kind in "fc" else "loop"
        return self.add(
            name,
            operands,
            output,
            extents,
            dtype=dtype.name,
            step=kernels.Contraction(dtype.name, pending.cast, heeds_masks=pending.heeds_masks),
            kernel=kernel,
            came_kernel=pending.kernel if kernel == "blas" else "loop",
            came=came,
            tasks=pending.tasks,
            spoken=spoken,
            **({"finish": kernels.scalar} if pending.scalar and not output else {}),
        )

    def align(
        self, sources: tuple[str, ...], indices: tuple[Labels, ...]
    ) -> tuple[list[tuple[View, Labels]], dict[str, int], dict[str, Cut]]:
        """Operands with their labels, extents, and the cuts they came in; an axis that broadcasts gets its own label."""
        extents: dict[str, int] = {}
        came: dict[str, Cut] = {}
        for source, index in zip(sources, indices):
            for label, extent, chunks in zip(index, self.layouts[source].shape, self.layouts[source].chunks):
                if extents.get(label, 1) == 1:
                    extents[label], came[label] = extent, chunks
                elif extent not in (1, extents[label]):
                    raise NotLifted(f"extents {extents[label]} and {extent} of one index")
        names = _Names({*extents})
        operands = []
        for source, index in zip(sources, indices):
            shape = self.layouts[source].shape
            labels = tuple(
                label if extent == extents[label] else names.fresh() for label, extent in zip(index, shape)
            )
            for label, extent in zip(labels, shape):
                extents.setdefault(label, extent)
            operands.append((self.view(source), labels))
        return operands, extents, came

    # idioms: symbolic layers

    def blockwise(self, name: str, layer: Blockwise) -> View | Pending:
        if layer.new_axes or (layer.concatenate and layer.task.func not in functions.MOVES):
            raise NotLifted(f"block function {functions.function_name(layer.task.func)}")
        if layer.output_blocks is not None and len(layer) != prod(self.layouts[name].numblocks):
            raise NotLifted("only some of its blocks are wanted")
        function, keywords = layer.task.func, dict(layer.task.kwargs)
        if any(functions.base(function) is stale for stale in functions.STALE):
            raise NotLifted(f"block function {functions.function_name(function)}")
        if any(isinstance(value, (GraphNode, TaskRef)) for value in keywords.values()):
            raise NotLifted("an argument is computed")
        arrays, arguments = _arguments(layer)
        if isinstance(function, FoldBlocks):
            return self.take_fold(name, layer, arrays, function)
        if function in functions.CONTRACTIONS:
            return self.take_contraction(name, layer, arrays, keywords)
        if function is np.outer and len(arrays) == 2 and not keywords:
            return self.take_outer(name, layer, arrays)
        if layer.io_deps:
            return self.take_creation(name, layer, keywords)
        if function in functions.MOVES and len(arrays) == 1:
            return self.take_move(layer, arrays[0])
        if functions.is_map(function, keywords):
            return self.take_map(name, layer, arrays, arguments, keywords)
        if set(keywords) == {"axis", "keepdims"} and keywords["keepdims"] is True and len(arrays) == 1:
            return self.take_reduction(name, layer, arrays[0], keywords)
        raise NotLifted(f"block function {functions.function_name(function)}")

    def take_contraction(
        self, name: str, layer: Blockwise, arrays: list[tuple[str, Labels]], keywords: dict[str, Any]
    ) -> View | Pending:
        function = layer.task.func
        sources = tuple(source for source, _ in arrays)
        indices = tuple(index for _, index in arrays)
        cast, spoken = None, {}
        kernel = "blas"
        if function is dask.array.einsumfuncs.chunk_einsum:
            count = keywords["ncontract_inds"]
            contracted = layer.output_indices[len(layer.output_indices) - count :]
            cast = None if keywords["kernel_dtype"] is None else np.dtype(keywords["kernel_dtype"]).name
            kernel = "loop" if keywords.get("optimize", False) is False else "blas"
            spoken = _spoken(keywords["subscripts"].partition("->")[0].split(","), indices)
        elif function is dask.array.routines._tensordot:
            if keywords["is_sparse"]:
                raise NotLifted("sparse blocks")
            contracted = _tensordot_labels(indices, keywords["axes"])
        else:
            contracted = (indices[0][-1],)
        layouts = [self.layouts[source] for source in sources if source in self.layouts]
        if len(layouts) != len(sources):
            raise NotLifted("an operand is no plain array")
        if function is not dask.array.einsumfuncs.chunk_einsum:
            for label in contracted:
                one, two = (layout.shape[index.index(label)] for layout, index in zip(layouts, indices))
                if one != two:
                    raise ShapeError(
                        f"{_title(name)}: contracted axis is {one} long in the left operand but {two} in the right; "
                        "expected equal extents"
                    )
        numblocks = self.numblocks(layer, arrays)
        if cast is not None and all(layout.dtype == cast for layout in layouts):
            cast = None
        if cast is not None and len(sources) > 2 and self.layouts[name].dtype.kind in "iub":
            raise NotLifted("integers narrowed before a product of many operands")
        pending = Pending(
            sources, indices, layer.output_indices, tuple(contracted), numblocks, cast=cast, kernel=kernel,
            spoken=spoken, scalar=function is not dask.array.routines._matmul, tasks=prod(numblocks),
            heeds_masks=function is not dask.array.einsumfuncs.chunk_einsum,
        )  # fmt: skip
        if contracted:
            return pending
        return self.contraction(name, pending, self.layouts[name].dtype)

    def numblocks(self, layer: Blockwise, arrays: list[tuple[str, Labels]]) -> tuple[int, ...]:
        """Blocks along each index of a contraction, contracted ones included."""
        cells: dict[str, int] = {}
        for source, index in arrays:
            for label, blocks in zip(index, self.layouts[source].numblocks):
                cells[label] = max(cells.get(label, 1), blocks)
        return tuple(cells[label] for label in layer.output_indices)

    def take_fold(
        self, name: str, layer: Blockwise, arrays: list[tuple[str, Labels]], function: FoldBlocks
    ) -> View | Pending:
        if any(source not in self.layouts for source, _ in arrays):
            raise NotLifted("an operand is no plain array")
        sources, indices = (tuple(each) for each in zip(*arrays))
        dtypes = {self.layouts[source].dtype.name for source in sources}
        contraction = isinstance(function.step, kernels.Contraction)
        if contraction:
            kernel = "blas" if np.dtype(function.step.dtype).kind in "fc" else "loop"
        else:
            fast = function.step.pairwise in BLAS
            kernel = "blas" if fast else "loop" if function.contracted else "stream"
        contracted = layer.output_indices[len(function.output) :]  # Dask has indices of its own for labels
        cast = function.step.cast if contraction and dtypes != {function.step.cast} else None
        pending = Pending(
            sources, indices, layer.output_indices, contracted, self.numblocks(layer, arrays), cast=cast,
            kernel=kernel, fold=None if contraction else function, scalar=contraction, tasks=len(layer),
            spoken=_spoken(function.operands, indices),
        )  # fmt: skip
        return pending if contracted else self.contraction(name, pending, self.layouts[name].dtype)

    def take_outer(self, name: str, layer: Blockwise, arrays: list[tuple[str, Labels]]) -> View:
        if any(source not in self.layouts for source, _ in arrays):
            raise NotLifted("an operand is no plain array")
        pending = Pending(
            tuple(source for source, _ in arrays), tuple(index for _, index in arrays), layer.output_indices, (),
            self.layouts[name].numblocks, tasks=len(layer),
        )  # fmt: skip
        return self.contraction(name, pending, self.layouts[name].dtype)

    def take_creation(self, name: str, layer: Blockwise, keywords: dict[str, Any]) -> View:
        inner = layer.task.func
        dependencies = list(layer.io_deps.values())
        if (
            len(layer.indices) != 1
            or keywords
            or type(dependencies[0]).__name__ != "ArrayChunkShapeDep"
            or functions.function_name(inner) != "_broadcast_trick_inner"
            or layer.indices[0][1] != layer.output_indices
        ):
            raise NotLifted("data made block by block")
        layout = self.layouts[name]
        labels = tuple(map(str, range(len(layout.shape))))
        return self.add(
            name, [], labels, dict(zip(labels, layout.shape)), dtype=layout.dtype.name, join="create",
            step=kernels.Creation(inner, ()), kernel="stream", came=dict(zip(labels, layout.chunks)), tasks=0,
        )  # fmt: skip

    def take_move(self, layer: Blockwise, array: tuple[str, Labels]) -> View:
        source, index = array
        view = self.view(source)
        dropped = [axis for axis, label in enumerate(index) if label not in layer.output_indices]
        if any(self.layouts[source].shape[axis] != 1 for axis in dropped):
            raise NotLifted("an axis is dropped that is not of length 1")
        return View(view.source, tuple(view.axes[index.index(label)] for label in layer.output_indices))

    def take_map(
        self,
        name: str,
        layer: Blockwise,
        arrays: list[tuple[str, Labels]],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> View:
        output = layer.output_indices
        sources = tuple(source for source, _ in arrays)
        if any(source not in self.layouts for source in sources):
            raise NotLifted("an operand is no plain array")
        if not arrays or any(label not in output for _, index in arrays for label in index):
            raise NotLifted(f"block function {functions.function_name(layer.task.func)}")
        operands, extents, came = self.align(sources, tuple(index for _, index in arrays))
        layout = self.layouts[name]
        if tuple(extents.get(label) for label in output) != layout.shape:
            raise NotLifted("its shape is not that of its operands")
        return self.add(
            name, operands, output, extents, dtype=layout.dtype.name, join=functions.function_name(layer.task.func),
            step=kernels.Elementwise(layer.task.func, arguments, tuple(sorted(keywords.items()))),
            kernel="stream", came=came, tasks=0 if self.is_fused(name) else len(layer), came_kernel="stream",
        )  # fmt: skip

    def is_fused(self, name: str) -> bool:
        """Whether Dask would fuse this layer into one that reads it."""
        return any(isinstance(self.dsk.layers[reader], Blockwise) for reader in self.dependents[name])

    def take_reduction(
        self, name: str, layer: Blockwise, array: tuple[str, Labels], keywords: dict[str, Any]
    ) -> Pending:
        source, index = array
        function = layer.task.func
        axes = keywords["axis"]
        ours = function is passed
        if not (ours or functions.is_trusted(function)) or not isinstance(axes, tuple):
            raise NotLifted(f"block function {functions.function_name(function)}")
        if index != layer.output_indices:
            raise NotLifted("a reduction that moves axes")
        reduced = tuple(index[axis] for axis in axes)
        before = self.pending.get(source)
        if before is not None and before.chunk is None:
            same = {n for n, label in enumerate(before.output) if label in before.contracted} == set(axes)
            if same and (ours or layers.tree_base(function) in functions.SUMS):
                return before
        if source not in self.layouts:
            raise NotLifted("its operand is no plain array")
        layout = self.layouts[source]
        self.view(source)
        return Pending(
            (source,), (index,), index, reduced, layout.numblocks, chunk=function, tasks=prod(layout.numblocks),
        )  # fmt: skip

    # idioms: layers written out

    def materialized(self, name: str, layer: Mapping[Any, Any]) -> View | Pending:
        output = self.layouts[name]
        sources = [source for source in self.dsk.dependencies[name] if source != name]
        if len(sources) != 1:
            raise NotLifted("tasks of its own")
        (source,) = sources
        before = self.layouts.get(source)
        if functions.is_p2p_rechunk(layer) and before is not None and before.shape == output.shape:
            return self.take_rechunk(name, source, prod(output.numblocks))
        if source in self.pending:
            found = self.take_tree(name, layer, source, self.pending[source])
            if found is not None:
                return found
        if before is None:
            raise NotLifted("tasks of its own")
        readers = (layers.getitem_axes, layers.reshape_axes)
        for reader in readers:
            axes = reader(layer, before, output)
            if axes is not None:
                view = self.view(source)
                return View(view.source, tuple(None if axis is None else view.axes[axis] for axis in axes))
        if layers.is_rechunk(layer, before, output):
            return self.take_rechunk(name, source, len(layer))
        axes = layers.broadcast_axes(layer, before, output)
        if axes is not None:
            return self.take_broadcast(name, source, axes, output)
        raise NotLifted("tasks of its own")

    def take_rechunk(self, name: str, source: str, tasks: int) -> View:
        view = self.view(source)
        self.rechunks[view.source] = self.rechunks.get(view.source, 0) + tasks
        return view

    def take_broadcast(self, name: str, source: str, axes: Axes, output: Layout) -> View:
        labels = tuple(map(str, range(len(axes))))
        names = _Names({*labels})
        rank = len(self.layouts[source].shape)
        kept = {axis: label for axis, label in zip(axes, labels) if axis is not None}
        mine = tuple(kept.get(axis) or names.fresh() for axis in range(rank))
        return self.add(
            name, [(self.view(source), mine)], labels, dict(zip(labels, output.shape)), dtype=output.dtype.name,
            join="broadcast", step=kernels.Rearrange(), kernel="stream", came=dict(zip(labels, output.chunks)),
            tasks=prod(output.numblocks), came_kernel="stream",
        )  # fmt: skip

    def take_tree(
        self, name: str, layer: Mapping[Any, Any], source: str, pending: Pending
    ) -> View | Pending | None:
        axes = tuple(n for n, index in enumerate(pending.output) if index in pending.contracted)
        read = layers.tree_function(layer, source, pending.numblocks, name, axes)
        if read is None:
            return None
        function, keeps, numblocks = read
        complete = all(numblocks[axis] == 1 for axis in axes)
        grown = replace(pending, numblocks=numblocks, tasks=pending.tasks + len(layer))
        base = layers.tree_base(function)
        sums = base in functions.SUMS or isinstance(base, FoldTree)
        if pending.chunk is None and not sums:
            return None
        if not complete or (keeps and self.goes_on(name)):
            return replace(grown, combine=function)
        if pending.chunk is not None:
            return self.reduction(name, grown, function, axes, keeps)
        view = self.contraction(name, grown, self.layouts[name].dtype)
        if not keeps:
            return view
        places = iter(view.axes)
        return View(
            view.source, tuple(None if n in axes else next(places) for n in range(len(pending.output)))
        )

    def goes_on(self, name: str) -> bool:
        """Whether another level of the same tree reads this one."""
        return "-partial-" in name

    def reduction(
        self, name: str, pending: Pending, function: Callable[..., Any], axes: tuple[int, ...], keeps: bool
    ) -> View:
        """The node of a reduction with Dask's own functions."""
        (source,) = pending.sources
        view = self.plain(source)
        layout, before = self.layouts[name], self.layouts[source]
        labels = tuple(map(str, range(len(before.shape))))
        output = tuple(label for n, label in enumerate(labels) if n not in axes)
        extents = dict(zip(labels, before.shape))
        if keeps:
            # a kept axis of length 1 is a label of its own
            names = _Names({*labels})
            output = tuple(names.fresh() if n in axes else label for n, label in enumerate(labels))
            extents |= {label: 1 for label in output if label not in extents}
        if tuple(extents[label] for label in output) != layout.shape:
            raise NotLifted("its shape is not that of a reduction")
        assert pending.chunk is not None
        reduced = tuple(labels[axis] for axis in axes)
        title = (
            functions.function_name(layers.tree_base(pending.chunk))
            .removesuffix("_chunk")
            .removeprefix("chunk_")
        )
        known = {"sum": "sum", "prod": "prod", "max": "max", "min": "min", "any": "any", "all": "all"}
        aggregate: Any = known.get(title) or Aggregate(None, np.add, name=title)
        letters = dict(zip(dict.fromkeys((*labels, *output)), map(_letter, range(len(labels) * 2))))
        step = kernels.Reduction(pending.chunk, tuple(letters[label] for label in reduced), pending.combine)
        return self.add(
            name, [(view, labels)], output, extents, dtype=layout.dtype.name, join="identity", aggregate=aggregate,
            step=step, finish=function, kernel="stream", came=dict(zip(labels, before.chunks)), tasks=pending.tasks,
            came_kernel="stream",
        )  # fmt: skip

    def plain(self, source: str) -> View:
        """A view with the axes of its tensor in their order; a node of its own where it is not."""
        view = self.view(source)
        if view.axes == tuple(range(len(self.shape(view.source)))):
            return view
        return self.rearranged(source, view)

    def rearranged(self, source: str, view: View) -> View:
        """A node that brings the axes of a view into their order."""
        layout = self.layouts[source]
        name = source if source not in self.nodes else f"{source}-view"
        labels = tuple(map(str, range(len(layout.shape))))
        if name not in self.nodes:
            self.add(
                name, [(view, labels)], labels, dict(zip(labels, layout.shape)), dtype=layout.dtype.name,
                join="rearrange", step=kernels.Rearrange(), kernel="stream", came=dict(zip(labels, layout.chunks)),
                came_kernel="stream", finish=None,
            )  # fmt: skip
        return View(name, tuple(range(len(labels))))

    # the end

    def finish(self, wanted: list[str], blocks: Mapping[str, int] | None) -> Lifted:
        """Keep what is wanted and what it needs; the rest of the graph stays outside.

        ``blocks`` says how many blocks of each array are wanted (None: all): a product of which a slice is wanted
        is not computed whole.
        """
        self.wishes.check()
        outside: set[str] = set()
        outputs: dict[str, Output] = {}
        queue = list(wanted)
        seen = set(queue)
        while queue:
            name = queue.pop()
            source = self.leaving(name, blocks)
            if source is not None:
                outputs[name] = Output(name, source, self.layouts[name].chunks)
                more = {one for one in self.ancestors(source) if one in self.inputs}
            else:
                outside.add(name)
                more = set(self.dsk.dependencies[name])
            queue += sorted(more - seen)
            seen |= more
        needed = set()
        for output in outputs.values():
            needed |= self.ancestors(output.source)
        alone = [
            (name, self.reasons.get(name, "nothing of it can be planned"))
            for name in self.dsk.layers
            if name in outside and self.dsk.dependencies[name] and not name.startswith("finalize-")
        ]
        graph = EinGraph(
            {name: given for name, given in self.inputs.items() if name in needed},
            {name: self.nodes[name] for name in self.ordered(needed)},
            tuple(outputs[name] for name in sorted(outputs)),
            tuple(alone),
        )
        return Lifted(graph, frozenset(outside))

    def is_whole(self, wanted: Mapping[str, int]) -> bool:
        """Whether all blocks of all arrays are wanted, if so many of some are: every layer that is lifted reads all."""
        lifted = self.views.keys() | self.pending.keys()
        return all(name in lifted or not sources for name, sources in self.dsk.dependencies.items()) and all(
            name in self.layouts and count == prod(self.layouts[name].numblocks)
            for name, count in wanted.items()
        )

    def ordered(self, needed: set[str]) -> list[str]:
        """Needed nodes, every one after those it reads."""
        order: dict[str, None] = {}

        for start in self.nodes:
            stack = [start] if start in needed else []
            while stack:
                name = stack[-1]
                rest = [one for one in self.nodes[name].inputs if one in self.nodes and one not in order]
                if name in order or not rest:
                    order[stack.pop()] = None
                else:
                    stack += rest
        return list(order)

    def leaving(self, name: str, blocks: Mapping[str, int] | None) -> str | None:
        """The node that is the array of a layer wanted from outside; None if the layer stays as it is."""
        if name not in self.layouts:
            return None
        if blocks is not None and blocks.get(name, 0) < prod(self.layouts[name].numblocks):
            self.reasons[name] = "only some of its blocks are wanted"
            return None
        try:
            view = self.view(name)
        except NotLifted as reason:
            self.reasons[name] = str(reason)
            return None
        if view.source not in self.nodes:
            return None
        if view.axes != tuple(range(len(self.shape(view.source)))):
            view = self.rearranged(name, view)
        return view.source

    def ancestors(self, source: str) -> set[str]:
        """A node and all it needs, given tensors included."""
        found = {source}
        stack = [source]
        while stack:
            node = self.nodes.get(stack.pop())
            fresh = set(node.inputs) - found if node else set()
            found |= fresh
            stack += fresh
        return found


def _blocks_by_name(dsk: HighLevelGraph) -> Counter[str]:
    """How many blocks of each array a graph holds; culling gives layers new names but keeps the keys."""
    keys = (key for layer in dsk.layers.values() for key in layer.get_output_keys())
    return Counter(key[0] for key in keys if isinstance(key, tuple))


class _Names:
    """Labels that are not in use."""

    def __init__(self, taken: set[str]) -> None:
        self.taken = taken
        self.count = 0

    def fresh(self) -> str:
        """One more label."""
        while (label := f"+{self.count}") in self.taken:
            self.count += 1
        self.count += 1
        return label


def _letter(number: int) -> str:
    """The label of a number: i, j, k ... z, a ... h, then capitals, then any other letter."""
    letters = "ijklmnopqrstuvwxyzabcdefghIJKLMNOPQRSTUVWXYZABCDEFGH"
    return letters[number] if number < len(letters) else chr(0x100 + number)


def _spoken(terms: Iterable[Iterable[str]], indices: Iterable[Labels]) -> dict[str, str]:
    """Dask's index for each label that a user wrote.

    >>> _spoken(["ab", "bc"], [(".0", ".1"), (".1", ".2")])
    {'a': '.0', 'b': '.1', 'c': '.2'}
    """
    return {label: one for term, index in zip(terms, indices) for label, one in zip(term, index)}


def _title(name: str) -> str:
    """A layer's name with its token cut to four characters."""
    head, _, token = name.rpartition("-")
    return f"{head}-{token[:4]}" if head else name


def _arguments(layer: Blockwise) -> tuple[list[tuple[str, Labels]], tuple[Any, ...]]:
    """Arrays a block function reads with their indices, and its positional arguments with slots for them."""
    arrays: list[tuple[str, Labels]] = []
    values: dict[str, Any] = {}
    for number, (value, index) in enumerate(layer.indices):
        token = f"__dask_blockwise__{number}"
        if index is None:
            if isinstance(value, (GraphNode, TaskRef, BlockwiseDep)):
                raise NotLifted("an argument is computed")
            values[token] = value
        else:
            values[token] = kernels.Slot(len(arrays))
            arrays.append((value, tuple(index)))
    arguments = []
    for argument in layer.task.args:
        # the place of an operand is a TaskRef, in Dask 2025.4 an Alias
        place = argument.target if isinstance(argument, Alias) else getattr(argument, "key", None)
        if isinstance(argument, (TaskRef, Alias)):
            if place not in values:
                raise NotLifted("an argument is computed")
            arguments.append(values[place])
        elif isinstance(argument, GraphNode):
            raise NotLifted("an argument is computed")
        else:
            arguments.append(argument)
    return arrays, tuple(arguments)


def _tensordot_labels(indices: tuple[Labels, ...], axes: tuple[Any, Any]) -> Labels:
    """Labels that a tensordot contracts."""
    left = [indices[0][axis] for axis in axes[0]]
    right = [indices[1][axis] for axis in axes[1]]
    for side, labels in (("left", left), ("right", right)):
        if len(set(labels)) != len(labels):
            raise ShapeError(
                f"tensordot contracts an axis of its {side} operand twice: axes={axes}; expected once each"
            )
    return tuple(left)
