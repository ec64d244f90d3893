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
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, islice
from typing import Any

import dask.array as da
import numpy as np

from dask_eindecomp import einsum, minilm

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


def _neighbour_shapes(queries: int, points: int, features: int) -> dict[str, Shape]:
    return {"X": (queries, features), "Y": (points, features)}


def _mixture_shapes(samples: int, features: int, components: int) -> dict[str, Shape]:
    of_each = (components, features)
    return {
        "X": (samples, features),
        "logits": (components,),
        "means": of_each,
        "log_variances": of_each,
    }


def _cp_als_shapes(shape: Shape, rank: int) -> dict[str, Shape]:
    return {"X": shape, "B": (shape[1], rank), "C": (shape[2], rank)}


def _coupled_cluster_shapes(o: int, v: int) -> dict[str, Shape]:
    return {
        "t": (o, o, v, v),
        "oooo": (o, o, o, o),
        "oovv": (o, o, v, v),
        "ovvo": (o, v, v, o),
        "vvvv": (v, v, v, v),
    }


def _circuit_shapes(qubits: int) -> dict[str, Shape]:
    return {"state": (2,) * qubits, "angles": (2, qubits)}


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


def nearest(X, Y):
    """Squared distances of every query to the three points nearest to it."""
    distances = einsum("ik,jk->ij", X, Y, join="squared_difference")
    return (da.topk(distances, -3, axis=1),)


def nearest_reference(X, Y):
    return (np.stack([np.sort(((Y - row) ** 2).sum(axis=1))[:3] for row in X]),)


def manhattan(X, Y):
    """Distances along the axes of every query to the three points nearest to it."""
    distances = einsum("ik,jk->ij", X, Y, join="absolute_difference")
    return (da.topk(distances, -3, axis=1),)


def manhattan_reference(X, Y):
    return (np.stack([np.sort(np.linalg.norm(Y - row, ord=1, axis=1))[:3] for row in X]),)


def shortest_paths(W):
    """Lengths of the shortest paths between all nodes of a graph, by squaring in the (min, +) semiring."""
    nodes = da.arange(len(W), chunks=W.chunks[0])
    lengths = da.where(nodes[:, None] == nodes, 0, abs(W))
    for _ in range(
        math.ceil(math.log2(len(W)))
    ):  # after so many squarings paths may have any number of edges
        lengths = einsum("ik,kj->ij", lengths, lengths, join="add", aggregate="min")
    return (lengths,)


def shortest_paths_reference(W):
    lengths = np.abs(W)
    np.fill_diagonal(lengths, 0)
    for through in range(len(W)):  # Floyd and Warshall
        lengths = np.minimum(lengths, np.add.outer(lengths[:, through], lengths[through]))
    return (lengths,)


def mixture_step(X, logits, means, log_variances):
    """One step of fitting a mixture of normal distributions with diagonal covariances: weights, means, variances."""
    precisions = da.exp(-log_variances)
    distances = X**2 @ precisions.T - 2 * (X @ (means * precisions).T) + (means**2 * precisions).sum(axis=1)
    joint = logits - (distances + log_variances.sum(axis=1)) / 2
    shares = da.exp(joint - einsum("nk->n", joint, aggregate="logsumexp")[:, None])
    counts = shares.sum(axis=0)
    new_means = shares.T @ X / counts[:, None]
    return counts / len(X), new_means, shares.T @ X**2 / counts[:, None] - new_means**2


def mixture_reference(X, logits, means, log_variances):
    deviations = np.exp(log_variances / 2)
    densities = [
        logit - (((X - mean) / deviation) ** 2).sum(axis=1) / 2 - np.log(deviation).sum()
        for logit, mean, deviation in zip(logits, means, deviations)
    ]
    shares = np.exp(densities - np.logaddexp.reduce(densities, axis=0))
    new_means = [np.average(X, axis=0, weights=share) for share in shares]
    variances = [np.average((X - mean) ** 2, axis=0, weights=one) for mean, one in zip(new_means, shares)]
    return shares.mean(axis=1), np.stack(new_means), np.stack(variances)


def cp_als(X, B, C):
    """One sweep of alternating least squares for a CP decomposition: all three factors anew."""
    A = _over(da.einsum("ijk,ja,ka->ia", X, B, C), (B.T @ B) * (C.T @ C))
    B = _over(da.einsum("ijk,ia,ka->ja", X, A, C), (A.T @ A) * (C.T @ C))
    C = _over(da.einsum("ijk,ia,ja->ka", X, A, B), (A.T @ A) * (B.T @ B))
    return A, B, C


def _over(products, gram):
    """Products times the inverse of a small matrix."""
    return products @ gram.rechunk(gram.shape).map_blocks(np.linalg.inv, dtype=gram.dtype)


def cp_als_reference(X, B, C):
    factors = [None, B, C]
    for mode in range(3):
        one, other = factors[:mode] + factors[mode + 1 :]
        khatri_rao = (one[:, None, :] * other[None, :, :]).reshape(-1, one.shape[1])
        unfolded = np.moveaxis(X, mode, 0).reshape(X.shape[mode], -1)
        factors[mode] = np.linalg.lstsq(khatri_rao, unfolded.T, rcond=None)[0].T
    return tuple(factors)


def coupled_cluster(t, oooo, oovv, ovvo, vvvv):
    """Some terms of the equations of coupled cluster doubles: ladders, rings, and one quadratic in amplitudes."""
    particles = da.einsum("abef,ijef->ijab", vvvv, t) / 2
    holes = da.einsum("mnij,mnab->ijab", oooo, t) / 2
    ring = da.einsum("mbej,imae->ijab", ovvo, t)
    ring = ring - ring.transpose(1, 0, 2, 3)
    ring = ring - ring.transpose(0, 1, 3, 2)
    quadratic = da.einsum("mnef,ijef,mnab->ijab", oovv, t, t, optimize=True) / 4
    return (oovv + particles + holes + ring + quadratic,)


def coupled_cluster_reference(t, oooo, oovv, ovvo, vvvv):
    o, v = t.shape[1:3]
    amplitudes = t.reshape(o * o, v * v)
    pairs = oooo.reshape(o * o, o * o) + oovv.reshape(o * o, v * v) @ amplitudes.T / 2
    ladders = (amplitudes @ vvvv.reshape(v * v, v * v).T + pairs.T @ amplitudes) / 2
    ring = np.tensordot(t, ovvo, axes=((1, 3), (0, 2))).transpose(0, 3, 1, 2)  # iabj
    rings = ring - ring.swapaxes(0, 1) - ring.swapaxes(2, 3) + ring.swapaxes(0, 1).swapaxes(2, 3)
    return (oovv + ladders.reshape(t.shape) + rings,)


def principal_axis(X, start):
    """The axis along which the rows of a matrix vary most, and their variance along it, by five steps of iteration."""
    centred = X - X.mean(axis=0)
    axis = start
    for _ in range(5):
        axis = centred.T @ (centred @ axis)
        axis = axis / da.sqrt((axis**2).sum())
    return axis, ((centred @ axis) ** 2).sum() / (len(X) - 1)


def principal_axis_reference(X, start):
    covariance = np.cov(X, rowvar=False)
    axis = np.linalg.matrix_power(covariance, 5) @ start
    axis /= np.linalg.norm(axis)
    return axis, np.einsum("i,ij,j->", axis, covariance, axis)


def quantum_circuit(state, angles):
    """Probabilities of all outcomes of a circuit of two layers, each rotating every qubit and entangling neighbours."""
    state = state / da.sqrt((state**2).sum())
    controlled_z = np.diag([1.0, 1.0, 1.0, -1.0]).reshape(2, 2, 2, 2)
    for layer in angles:
        for qubit, angle in enumerate(layer):
            rotation = da.cos(angle / 2) * np.eye(2) + da.sin(angle / 2) * np.array([[0, -1], [1, 0]])
            state = _through_gate(state, rotation, qubit)
        for qubit in range(state.ndim - 1):
            state = _through_gate(state, controlled_z, qubit, qubit + 1)
    return (state**2,)


def _through_gate(state, gate, *qubits):
    """The state after a gate, whose axes are outcomes of these qubits, then what they were."""
    before = string.ascii_letters[: state.ndim]
    fresh = dict(zip((before[qubit] for qubit in qubits), reversed(string.ascii_letters)))
    after = "".join(fresh.get(letter, letter) for letter in before)
    return da.einsum(f"{''.join(fresh.values())}{''.join(fresh)},{before}->{after}", gate, state)


def quantum_circuit_reference(state, angles):
    flat = state.ravel() / np.linalg.norm(state)
    for layer in angles:
        for qubit, angle in enumerate(layer):
            off, on = np.moveaxis(flat.reshape(2**qubit, 2, -1), 1, 0)
            cos, sin = np.cos(angle / 2), np.sin(angle / 2)
            flat = np.stack([cos * off - sin * on, sin * off + cos * on], axis=1)
        for qubit in range(len(layer) - 1):
            flat.reshape(2**qubit, 2, 2, -1)[:, 1, 1] *= -1
    return (flat.reshape(state.shape) ** 2,)


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
    yield Problem(
        "nearest",
        {
            "small": _neighbour_shapes(queries=13, points=17, features=7),
            "medium": _neighbour_shapes(queries=4000, points=20_000, features=64),
            "large": _neighbour_shapes(queries=40_000, points=200_000, features=256),
        },
        nearest,
        nearest_reference,
    )
    yield Problem(
        "manhattan",
        {
            "small": _neighbour_shapes(queries=11, points=19, features=5),
            "medium": _neighbour_shapes(queries=2000, points=10_000, features=64),
            "large": _neighbour_shapes(queries=20_000, points=100_000, features=256),
        },
        manhattan,
        manhattan_reference,
    )
    yield Problem(
        "shortest_paths",
        {size: {"W": (n, n)} for size, n in zip(SIZES, (19, 640, 6400), strict=True)},
        shortest_paths,
        shortest_paths_reference,
    )
    yield Problem(
        "mixture_step",
        {
            "small": _mixture_shapes(samples=41, features=7, components=5),
            "medium": _mixture_shapes(samples=200_000, features=64, components=64),
            "large": _mixture_shapes(samples=10_000_000, features=128, components=256),
        },
        mixture_step,
        mixture_reference,
        weights=("means", "log_variances"),  # components overlap, so none is left without samples
    )
    yield Problem(
        "cp_als",
        {
            "small": _cp_als_shapes((13, 11, 9), rank=3),
            "medium": _cp_als_shapes((256, 256, 256), rank=32),
            "large": _cp_als_shapes((2048, 2048, 2048), rank=64),
        },
        cp_als,
        cp_als_reference,
    )
    yield Problem(
        "coupled_cluster",
        {
            "small": _coupled_cluster_shapes(o=5, v=7),
            "medium": _coupled_cluster_shapes(o=14, v=56),
            "large": _coupled_cluster_shapes(o=40, v=200),
        },
        coupled_cluster,
        coupled_cluster_reference,
        # there are few occupied orbitals
        whole={"t": (0, 1), "oooo": (0, 1, 2, 3), "oovv": (0, 1), "ovvo": (0, 3)},
    )
    yield Problem(
        "principal_axis",
        {
            "small": {"X": (41, 11), "start": (11,)},
            "medium": {"X": (100_000, 400), "start": (400,)},
            "large": {"X": (10_000_000, 1000), "start": (1000,)},
        },
        principal_axis,
        principal_axis_reference,
    )
    yield Problem(
        "quantum_circuit",
        {size: _circuit_shapes(qubits) for size, qubits in zip(SIZES, (6, 12, 20), strict=True)},
        quantum_circuit,
        quantum_circuit_reference,
        # a state is cut along its first qubits only
        whole={"state": tuple(range(3, 20)), "angles": (0, 1)},
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
