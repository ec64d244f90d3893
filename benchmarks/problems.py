"""The gallery: named problems shared by tests, notebooks and benchmarks.

A problem is Dask code *as a user writes it*, in the chunks a user would take (every axis cut the same number
of times), next to a NumPy reference that is written another way.  Each comes in three sizes: ``small`` for
tests, ``medium`` for two cores and a minute, ``large`` for a cluster.

>>> problem = GALLERY["gram"]
>>> arrays = problem.numpy_inputs("small")
>>> (lazy,) = problem.expression(**problem.dask_inputs(arrays))
>>> (expected,) = problem.reference(**arrays)
>>> bool(np.allclose(lazy.compute(), expected))
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, islice
from typing import Any

import dask.array as da
import numpy as np

from dask_eindecomp import minilm

Shape = tuple[int, ...]
Chunks = tuple[tuple[int, ...], ...]
Arrays = dict[str, np.ndarray]

SIZES = ("small", "medium", "large")


@dataclass(frozen=True, eq=False)
class Problem:
    """A computation with its inputs, a user's Dask code for it and what NumPy makes of it."""

    name: str
    """The key in the gallery."""
    shapes: Mapping[str, Mapping[str, Shape]]
    """Shape of each input, by size."""
    expression: Callable[..., tuple[Any, ...]]
    """Takes the inputs as Dask arrays by name, gives lazy arrays."""
    reference: Callable[..., tuple[np.ndarray, ...]]
    """Takes the inputs as NumPy arrays by name, gives what the lazy arrays should hold."""
    whole: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Axes of an input that a user leaves in one chunk."""
    weights: tuple[str, ...] = ()
    """Inputs of variance 1 / (length of the first axis): what they multiply keeps its size."""

    def numpy_inputs(self, size: str, seed: int = 0) -> Arrays:
        """Normally distributed inputs, of variance 1 unless they are weights; equal for equal seeds."""
        random = np.random.default_rng(seed)
        return {
            name: random.normal(scale=shape[0] ** -0.5 if name in self.weights else 1, size=shape)
            for name, shape in self.input_shapes(size).items()
        }

    def input_shapes(self, size: str) -> Mapping[str, Shape]:
        """Shape of each input.

        Raises
        ------
        ValueError
            If the size is none of small, medium and large.
        """
        if size not in SIZES:
            raise ValueError(
                f"unknown size {size!r} of problem {self.name!r}; expected one of {', '.join(SIZES)}"
            )
        return self.shapes[size]

    def chunks(self, size: str, chunks_a_side: int = 4) -> dict[str, Chunks]:
        """A user's chunks of each input.

        >>> GALLERY["gram"].chunks("small")
        {'X': ((6, 6, 6, 5), (3, 3, 3, 2))}
        """
        return self._cut(self.input_shapes(size), chunks_a_side)

    def dask_inputs(self, arrays: Arrays, chunks_a_side: int = 4) -> dict[str, Any]:
        """The inputs as Dask arrays in a user's chunks."""
        chunks = self._cut({name: array.shape for name, array in arrays.items()}, chunks_a_side)
        return {name: da.from_array(array, chunks=chunks[name]) for name, array in arrays.items()}

    def _cut(self, shapes: Mapping[str, Shape], chunks_a_side: int) -> dict[str, Chunks]:
        return {
            name: cut(shape, chunks_a_side, whole=self.whole.get(name, ())) for name, shape in shapes.items()
        }


def cut(shape: Shape, chunks_a_side: int, whole: tuple[int, ...] = ()) -> Chunks:
    """Chunks as ``chunks=(...)`` with equal lengths gives them: the last of an axis is the shortest.

    >>> cut((10, 3), 4, whole=(1,))
    ((3, 3, 3, 1), (3,))
    """
    lengths = tuple(
        extent if axis in whole else math.ceil(extent / chunks_a_side) for axis, extent in enumerate(shape)
    )
    return da.core.normalize_chunks(lengths, shape=shape)


def _square_shapes(extent: int) -> dict[str, Shape]:
    return {name: (extent, extent) for name in "ABCDE"}


def _skewed_shapes(s: int) -> dict[str, Shape]:
    t = s // 10
    return {"A": (s, t), "B": (t, s), "C": (s, t), "D": (t, 10 * s), "E": (10 * s, s)}


def _attention_shapes(sequence: int, width: int, heads: int) -> dict[str, Shape]:
    into_heads = (width, heads, width // heads)
    return {
        "x": (sequence, width),
        "query": into_heads,
        "key": into_heads,
        "value": into_heads,
        "output": (heads, width // heads, width),
    }


def _mttkrp_shapes(extent: int, rank: int) -> dict[str, Shape]:
    return {"X": (extent, extent, extent), "B": (extent, rank), "C": (extent, rank)}


def _ttm_shapes(extent: int, rank: int) -> dict[str, Shape]:
    return {"X": (extent, extent, extent), "A": (extent, rank), "B": (extent, rank), "C": (extent, rank)}


def _ffnn_shapes(batch: int, features: int, hidden: int, labels: int) -> dict[str, Shape]:
    return {"X": (batch, features), "Y": (batch, labels), "W1": (features, hidden), "W2": (hidden, labels)}


def chain_square(A, B, C, D, E):
    """``(A B) + (C (D E))``, all matrices square."""
    return ((A @ B) + (C @ (D @ E)),)


def chain_skewed(A, B, C, D, E):
    """``(A B) + (C (D E))`` where D and E are a hundred times the others' size and D E is small."""
    AB = da.einsum("ij,jk->ik", A, B)
    DE = da.einsum("ij,jk->ik", D, E)
    return (AB + da.einsum("ij,jk->ik", C, DE),)


def chain_reference(A, B, C, D, E):
    return (np.linalg.multi_dot([C, D, E]) + np.dot(A, B),)


def square_product(A, B):
    """The product of two square matrices."""
    return (A @ B,)


def tall_product(A, B):
    """A tall matrix times a small one: every row by itself."""
    return (A @ B,)


def product_reference(A, B):
    return (np.einsum("ij,jk->ik", A, B, optimize=True),)


def batched_product(A, B):
    """Many products of small matrices at once."""
    return (da.einsum("bij,bjk->bik", A, B),)


def batched_reference(A, B):
    return (np.stack([one @ other for one, other in zip(A, B)]),)


def gram(X):
    """Inner products of the columns of a tall matrix."""
    return (X.T @ X,)


def gram_reference(X):
    return (np.einsum("ni,nj->ij", X, X, optimize=True),)


def attention(x, query, key, value, output):
    """Softmax attention with several heads, projections included."""
    q = da.einsum("sa,ahd->shd", x, query)
    k = da.einsum("sa,ahd->shd", x, key)
    v = da.einsum("sa,ahd->shd", x, value)
    scores = da.einsum("shd,thd->hst", q, k) / math.sqrt(query.shape[2])
    powers = da.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = powers / powers.sum(axis=-1, keepdims=True)
    context = da.einsum("hst,thd->shd", weights, v)
    return (da.einsum("shd,hda->sa", context, output),)


def attention_reference(x, query, key, value, output):
    total = np.zeros_like(x)
    for head in range(query.shape[1]):
        scores = (x @ query[:, head]) @ (x @ key[:, head]).T / np.sqrt(query.shape[2])
        powers = np.exp(scores)
        weights = powers / powers.sum(axis=1)[:, None]
        total += weights @ (x @ value[:, head]) @ output[head]
    return (total,)


def mttkrp(X, B, C):
    """The matricised tensor times a Khatri-Rao product, the step of every CP decomposition."""
    return (da.einsum("ijk,ja,ka->ia", X, B, C),)


def mttkrp_reference(X, B, C):
    khatri_rao = (B[:, None, :] * C[None, :, :]).reshape(-1, B.shape[1])
    return (X.reshape(len(X), -1) @ khatri_rao,)


def ttm_chain(X, A, B, C):
    """A tensor times a matrix along each axis, the step of every Tucker decomposition."""
    return (da.einsum("ijk,ia,jb,kc->abc", X, A, B, C, optimize=True),)


def ttm_reference(X, A, B, C):
    for factor in (A, B, C):  # each product moves the next axis to the front
        X = np.tensordot(X, factor, axes=(0, 0))
    return (X,)


def ffnn_step(X, Y, W1, W2):
    """One step of training a network with one hidden layer: the new weights of both layers."""
    hidden = X @ W1
    active = da.maximum(hidden, 0)
    error = active @ W2 - Y
    upstream = (error @ W2.T) * (hidden > 0)
    return W1 - 0.01 * (X.T @ upstream), W2 - 0.01 * (active.T @ error)


def ffnn_reference(X, Y, W1, W2):
    hidden = np.einsum("bf,fh->bh", X, W1, optimize=True)
    active = np.where(hidden > 0, hidden, 0)
    error = np.einsum("bh,hl->bl", active, W2, optimize=True) - Y
    upstream = np.where(hidden > 0, np.einsum("bl,hl->bh", error, W2, optimize=True), 0)
    gradient1 = np.einsum("bf,bh->fh", X, upstream, optimize=True)
    gradient2 = np.einsum("bh,bl->hl", active, error, optimize=True)
    return W1 - 0.01 * gradient1, W2 - 0.01 * gradient2


def abcd(A, B, C):
    """A chain of three matrices in one einsum."""
    return (da.einsum("ab,bc,cd->ad", A, B, C, optimize=True),)


def abcd_reference(A, B, C):
    return (A @ (B @ C),)


def distances(X, Y):
    """Squared distances between the rows of two matrices, by broadcasting."""
    return (((X[:, None, :] - Y[None, :, :]) ** 2).sum(axis=-1),)


def distances_reference(X, Y):
    return (np.stack([((Y - row) ** 2).sum(axis=1) for row in X]),)


def minilm_forward(**inputs):
    """Embeddings of sentences: the forward pass of a transformer of six layers."""
    return (minilm.encode(inputs),)


def minilm_reference(**inputs):
    return (minilm.encode_numpy(inputs),)


@dataclass(frozen=True, eq=False)
class Encoder(Problem):
    """MiniLM's forward pass; its inputs are real weights and built-in sentences, whatever the seed."""

    def numpy_inputs(self, size: str, seed: int = 0) -> Arrays:
        ((sentences, layers),) = super().input_shapes(size).values()
        texts = islice(cycle(minilm.builtin_sentences()), sentences)
        return minilm.numpy_inputs(_model(), list(texts), layers=layers)

    def input_shapes(self, size: str) -> Mapping[str, Shape]:
        return {name: array.shape for name, array in self.numpy_inputs(size).items()}

    def _cut(self, shapes: Mapping[str, Shape], chunks_a_side: int) -> dict[str, Chunks]:
        return minilm.user_chunks(shapes, sentence_chunks=chunks_a_side)


@cache
def _model() -> minilm.Model:
    return minilm.load_model()


def _gallery() -> Iterator[Problem]:
    yield Problem(
        "chain_square",
        {"small": _square_shapes(19), "medium": _square_shapes(1600), "large": _square_shapes(16_000)},
        chain_square,
        chain_reference,
    )
    yield Problem(
        "chain_skewed",
        {"small": _skewed_shapes(20), "medium": _skewed_shapes(1600), "large": _skewed_shapes(8000)},
        chain_skewed,
        chain_reference,
    )
    yield Problem(
        "square_product",
        {size: {"A": (n, n), "B": (n, n)} for size, n in zip(SIZES, (18, 1600, 16_000), strict=True)},
        square_product,
        product_reference,
    )
    yield Problem(
        "tall_product",
        {
            size: {"A": (rows, n), "B": (n, n)}
            for size, rows, n in zip(SIZES, (41, 40_000, 4_000_000), (7, 400, 1000), strict=True)
        },
        tall_product,
        product_reference,
    )
    yield Problem(
        "batched_product",
        {
            size: {"A": (batch, n, n), "B": (batch, n, n)}
            for size, batch, n in zip(SIZES, (6, 64, 1024), (5, 256, 1024), strict=True)
        },
        batched_product,
        batched_reference,
    )
    yield Problem(
        "gram",
        {"small": {"X": (23, 11)}, "medium": {"X": (40_000, 400)}, "large": {"X": (4_000_000, 1000)}},
        gram,
        gram_reference,
    )
    yield Problem(
        "attention",
        {
            "small": _attention_shapes(sequence=10, width=12, heads=4),
            "medium": _attention_shapes(sequence=1024, width=1024, heads=16),
            "large": _attention_shapes(sequence=8192, width=4096, heads=32),
        },
        attention,
        attention_reference,
        whole={"query": (2,), "key": (2,), "value": (2,), "output": (1,)},
        weights=("query", "key", "value", "output"),
    )
    yield Problem(
        "mttkrp",
        {"small": _mttkrp_shapes(9, 5), "medium": _mttkrp_shapes(256, 32), "large": _mttkrp_shapes(2048, 64)},
        mttkrp,
        mttkrp_reference,
    )
    yield Problem(
        "ttm_chain",
        {"small": _ttm_shapes(9, 5), "medium": _ttm_shapes(256, 32), "large": _ttm_shapes(2048, 64)},
        ttm_chain,
        ttm_reference,
    )
    yield Problem(
        "ffnn_step",
        {
            "small": _ffnn_shapes(batch=21, features=11, hidden=13, labels=6),
            "medium": _ffnn_shapes(batch=2048, features=1536, hidden=1536, labels=384),
            "large": _ffnn_shapes(batch=65_536, features=16_384, hidden=16_384, labels=4096),
        },
        ffnn_step,
        ffnn_reference,
        weights=("W1", "W2"),
    )
    yield Problem(
        "abcd",
        {
            "small": {"A": (7, 18), "B": (18, 13), "C": (13, 10)},
            "medium": {"A": (1600, 1600), "B": (1600, 1600), "C": (1600, 1600)},
            "large": {"A": (16_000, 16_000), "B": (16_000, 16_000), "C": (16_000, 16_000)},
        },
        abcd,
        abcd_reference,
    )
    yield Problem(
        "distances",
        {
            "small": {"X": (13, 9), "Y": (10, 9)},
            "medium": {"X": (480, 1024), "Y": (480, 1024)},
            "large": {"X": (10_000, 1024), "Y": (10_000, 1024)},
        },
        distances,
        distances_reference,
    )
    if minilm.model_directory() is not None:
        yield Encoder(
            "minilm",
            # how many sentences and layers; the shapes follow from the sentences' words
            {size: {"texts": texts} for size, texts in zip(SIZES, ((5, 1), (64, 6), (4096, 6)), strict=True)},
            minilm_forward,
            minilm_reference,
        )


GALLERY: dict[str, Problem] = {problem.name: problem for problem in _gallery()}
"""Every problem by name; ``minilm`` only where the model's package is installed."""
