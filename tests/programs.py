"""Random programs over Dask arrays, with what NumPy makes of them.

A program is a list of lines of Python, one text for Dask and one for NumPy, so that printing it gives a script that
shows a failure.  While it is drawn Dask's side is built and NumPy's evaluated; a line that either refuses to write
down is not taken, one that NumPy refuses to compute has no reference and nothing is built on it.

How exact a result must be is found out, not guessed: NumPy's side is run again with every number that was rounded
moved by a few units in its last place, and with another order of contraction.  What that changes a little may
differ a little; what it turns over (a comparison of two nearly equal sums) may be anything; all else is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product as every
from math import isnan, prod
from typing import Any

import dask.array as da
import numpy as np
from hypothesis import strategies as st

from tests import strategies

try:
    import sparse
except ImportError:
    sparse = None

MOST = 200
"""Elements of an array."""
MOVED = 4.0
"""Units in the last place by which what was rounded is moved."""
LARGEST = {"e": 5e2, "f": 1e5, "d": 1e12, "F": 1e5, "D": 1e12}
"""Absolute value up to which a float or complex number is built on, by type."""
WHOLE = {"e": 2e3, "f": 2.0**23, "d": 2.0**52, "F": 2.0**22, "D": 2.0**51}
"""Sum of absolute values up to which sums of whole numbers are exact in any order, by type."""


# what the lines call


def numbers(shape: tuple[int, ...], dtype: str, seed: int, kind: str = "small", layout: str = "C") -> Any:
    """An array of random values: small whole numbers, large ones, wild floats, or these with NaN and inf."""
    rng = np.random.default_rng(seed)
    char = np.dtype(dtype).kind
    whole = rng.integers(0 if char in "ub" else -3, 2 if char == "b" else 4, shape)
    values: Any
    if char == "V":
        values = np.zeros(shape, dtype)
        for name in values.dtype.names:
            values[name] = whole
    elif kind == "large" and char in "iu":
        limits = np.iinfo(dtype)
        values = rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
    elif kind in ("wild", "special") and char in "fc":
        powers = 10.0 ** rng.integers(-2, 2, shape)
        values = rng.normal(size=shape) * powers
        if char == "c":
            values = values + 1j * rng.normal(size=shape)
        if kind == "special":
            odd = [np.nan] if char == "c" else [np.nan, np.inf, -np.inf]
            values = np.where(rng.random(shape) < 0.1, rng.choice(odd, shape), values)
        values = np.asarray(values).astype(dtype)
    elif char == "c":
        values = (whole + 1j * rng.integers(-3, 4, shape)).astype(dtype)
    else:
        values = np.asarray(whole).astype(dtype)
    if layout == "F":
        return np.asfortranarray(values)
    if layout == "reversed":
        return values[tuple(slice(None, None, -1) for _ in shape)]
    if layout == "strided" and shape:
        return np.repeat(values, 2, axis=-1)[..., ::2]
    if layout == "readonly":
        values.flags.writeable = False
    return values


def product(function: Callable[..., Any], dtype: str, *operands: Any, **keywords: Any) -> Any:
    """A product by NumPy: of whole numbers in the type that Dask declares, of halves in single precision."""
    wanted = np.dtype(dtype)
    if wanted.kind in "iub":
        operands = tuple(one.astype(wanted) if hasattr(one, "dtype") else one for one in operands)
    if wanted.char == "e":
        operands = tuple(one.astype("f4") if hasattr(one, "dtype") else one for one in operands)
        return np.asarray(function(*operands, **keywords)).astype("f2")
    return function(*operands, **keywords)


def topk(x: Any, count: int, axis: int) -> Any:
    """The largest values along an axis, as Dask orders them."""
    ordered = np.flip(np.sort(x, axis=axis), axis=axis)
    return np.take(ordered, range(min(count, x.shape[axis])), axis=axis)


def doubled(block: Any) -> Any:
    """A function that Dask knows nothing of."""
    return block + block


NAMES = {
    "np": np,
    "sparse": sparse,
    "numbers": numbers,
    "product": product,
    "topk": topk,
    "doubled": doubled,
    "nan": np.nan,
}


# programs


@dataclass(frozen=True)
class Line:
    """One array of a program."""

    name: str
    text: str
    """What makes it with Dask; ``xp`` is ``dask.array``."""
    reference: str
    """What makes it with NumPy; ``xp`` is ``numpy``.  Empty where NumPy has no value."""
    rounds: int
    """0: copies or counts; 1: sums and products, exact for whole numbers; 2: rounds."""
    reads: tuple[str, ...] = ()
    """Names of the lines read."""

    def with_numpy(self, values: dict[str, Any], optimize: bool) -> Any:
        """NumPy's value."""
        names = NAMES | {name: values[name] for name in self.reads}
        with np.errstate(all="ignore"):
            return np.asarray(eval(self.reference, names | {"xp": np, "optimize": optimize}))


@dataclass
class Program:
    """Lines, the arrays Dask made of them, NumPy's values of those that have one, and which are wanted."""

    lines: list[Line] = field(default_factory=list)
    arrays: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    inexact: set[str] = field(default_factory=set)
    outputs: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        said = "".join(
            f"\n{line.name} = {line.text}  # NumPy: {line.reference or '-'}" for line in self.lines
        )
        return f"{said}\nwanted: {', '.join(self.outputs)}"

    def take(self, text: str, reference: str | None, rounds: int) -> bool:
        """Add a line if Dask can build it and its numbers stay small."""
        name = f"x{len(self.lines)}"
        reads = tuple(one for one in self.arrays if re.search(rf"\b{one}\b", text))
        names = NAMES | self.arrays
        try:
            with np.errstate(all="ignore"):
                array = eval(text, names | {"xp": da, "da": da})
        except Exception:  # what cannot be written down is no program
            return False
        if not isinstance(array, da.Array) or array.ndim > 5 or prod(array.numblocks) > 60:
            return False
        if not any(map(isnan, array.shape)) and array.size > MOST:
            return False
        if all(one in self.values for one in reads):
            reference = text if reference is None else reference
            reference = reference.replace("DTYPE", repr(array.dtype.str))
        else:
            reference = ""
        line = Line(name, text, reference, rounds, reads)
        if reference:
            try:
                value = line.with_numpy(self.values, optimize=False)
            except Exception:
                line = Line(name, text, "", rounds, reads)
            else:
                if value.size > MOST or not is_small(value):
                    return False
                self.values[name] = value
                if self.rounded(line):
                    self.inexact.add(name)
        self.lines.append(line)
        self.arrays[name] = array
        return True

    def rounded(self, line: Line) -> bool:
        """Whether what a line gives was rounded, or may be in another order of the sums."""
        value = self.values[line.name]
        if any(one in self.inexact for one in line.reads) or line.rounds == 2:
            return True
        if value.dtype.kind not in "fc":
            return False
        whole = value[np.isfinite(value)]
        if not line.reads:
            return bool((whole != np.rint(whole)).any())
        most = WHOLE[value.dtype.char]
        terms = prod(max(1.0, float(np.nansum(np.abs(self.values[one].astype("D"))))) for one in line.reads)
        if line.rounds == 0:
            return False
        return bool((whole != np.rint(whole)).any()) or not terms < most

    def moved(self, seed: int) -> dict[str, Any]:
        """NumPy's values with everything that was rounded moved by a few units in its last place."""
        rng = np.random.default_rng(seed)
        values: dict[str, Any] = {}
        for line in self.lines:
            if line.reference:
                value = line.with_numpy(values, optimize=bool(seed % 2))
                if line.name in self.inexact and value.dtype.kind in "fc" and (line.rounds or not line.reads):
                    off = MOVED * np.finfo(value.dtype).eps * rng.uniform(-1, 1, value.shape)
                    value = (value * (1 + off)).astype(value.dtype)
                values[line.name] = value
        return values


def is_small(value: Any) -> bool:
    """Whether numbers are far from overflow."""
    if value.dtype.kind not in "fc":
        return True
    finite = np.abs(value[np.isfinite(value)])
    return not finite.size or bool(finite.max() <= LARGEST[value.dtype.char])


# what a line may be

KINDS = ("b1", "i1", "u1", "i4", "i8", "u8", "f2", "f4", "f8", "f8", "f8", "c8", "c16")
UNARY = {
    **dict.fromkeys(
        [
            "xp.negative({x})",
            "abs({x})",
            "xp.sign({x})",
            "xp.floor({x})",
            "xp.isnan({x})",
            "xp.isfinite({x})",
        ],
        0,
    ),
    **dict.fromkeys(
        [
            "xp.logical_not({x})",
            "xp.conj({x})",
            "xp.real({x})",
            "xp.imag({x})",
            "~{x}",
            "{x} > 0",
            "{x} == 1",
        ],
        0,
    ),
    **dict.fromkeys(
        ["xp.clip({x}, -2, 2)", "xp.maximum({x}, 1)", "xp.nan_to_num({x})", "+{x}", "xp.rint({x})"], 0
    ),
    **dict.fromkeys(
        ["xp.where({x} > 0, {x}, -1)", "{x} % 3", "{x} // 2", "xp.isreal({x})", "xp.fix({x})"], 0
    ),
    **dict.fromkeys(
        ["xp.square({x})", "{x} * 2", "3 - {x}", "{x} + True", "{x} ** 2", "np.int8(2) * {x}"], 1
    ),
    **dict.fromkeys(["xp.sqrt(abs({x}))", "xp.sin({x})", "xp.tanh({x})", "xp.exp({x})", "xp.cbrt({x})"], 2),
    **dict.fromkeys(
        ["{x} * 2.5", "{x} / 3", "np.float32(0.5) - {x}", "xp.angle({x})", "xp.round({x}, 1)"], 2
    ),
    "xp.log1p(abs({x}))": 2,
}
BINARY = {
    **dict.fromkeys(["xp.maximum({x}, {y})", "xp.minimum({x}, {y})", "xp.fmax({x}, {y})", "{x} < {y}"], 0),
    **dict.fromkeys(["{x} == {y}", "{x} >= {y}", "xp.logical_and({x}, {y})", "xp.logical_xor({x}, {y})"], 0),
    **dict.fromkeys(["{x} & {y}", "{x} ^ {y}", "xp.where({x}, {y}, {x})", "xp.where({y} > 0, {x}, {y})"], 0),
    **dict.fromkeys(["{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} * {y} - {x}", "{x} + {y} * 2"], 1),
    **dict.fromkeys(["xp.hypot({x}, {y})", "{x} / (abs({y}) + 1)", "xp.arctan2({x}, {y})"], 2),
    **dict.fromkeys(["xp.logaddexp({x}, {y})", "xp.clip({x}, {y}, 3)"], 2),
}
REDUCTIONS = {
    **dict.fromkeys(["min", "max", "any", "all", "argmin", "argmax", "nanmin", "nanmax", "nanargmin"], 0),
    **dict.fromkeys(["sum", "sum", "sum", "prod", "nansum", "nanprod"], 1),
    **dict.fromkeys(["mean", "var", "std", "nanmean", "nanvar"], 2),
}
SHAPES = {
    "{x}.T": None,
    "{x}.ravel()": None,
    "{x}.reshape(-1, 1)": None,
    "{x}.reshape(1, -1)": None,
    "{x}.squeeze()": None,
    "{x}[..., None]": None,
    "{x}[None]": None,
    "xp.flip({x}, 0)": None,
    "xp.roll({x}, 1)": None,
    "xp.roll({x}, -2, axis=-1)": None,
    "xp.moveaxis({x}, 0, -1)": None,
    "xp.rot90({x})": None,
    "xp.tril({x})": None,
    "xp.diagonal({x})": None,
    "xp.diag({x})": None,
    "xp.broadcast_to({x}, (2, *{x}.shape))": None,
    "xp.concatenate([{x}, {x}])": None,
    "xp.concatenate([{x}, {x}], axis=-1)": None,
    "xp.stack([{x}, {x}], axis=-1)": None,
    "xp.block([[{x}], [{x}]])": None,
    "xp.atleast_2d({x})": None,
    "xp.pad({x}, 1)": None,
    "xp.tile({x}, 2)": None,
    "xp.repeat({x}, 2, axis=0)": None,
    "xp.take({x}, [0, 0], axis=-1)": None,
    "{x}.map_blocks(doubled)": "doubled({x})",
    "{x}.map_blocks(doubled, dtype={x}.dtype)": "doubled({x})",
    "{x}.persist(scheduler='sync')": "{x}",
    "{x}.rechunk(1)": "{x}",
    "{x}.rechunk(2)": "{x}",
    "{x}.rechunk(-1)": "{x}",
    "{x}.rechunk({{0: 3}})": "{x}",
    "{x}.map_overlap(doubled, depth=0)": "doubled({x})",
    "xp.topk({x}, 2, axis=0)": "topk({x}, 2, axis=0)",
    "xp.cumsum({x}, axis=0)": None,
    "xp.cumsum({x}, axis=-1)": None,
    "xp.cumprod({x}, axis=0)": None,
    "xp.trace({x})": None,
    "xp.linalg.norm({x}, axis=0)": None,
    "xp.isin({x}, [1, 2])": None,
    "{x}[{x} > 0]": None,
    "{x}['a']": None,
}
"""What only moves numbers, or nearly so: Dask's text, and NumPy's where it is another."""
ROUNDING = ("doubled", "cumsum", "cumprod", "trace")


class Drawing:
    """A program while it is drawn."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.program = Program()
        self.lengths = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 7, 0, 3, 2]), min_size=1, max_size=3))
        self.wild = self.one_of("small", "small", "small", "large", "wild", "special")

    def one_of(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def rarely(self) -> bool:
        return bool(self.draw(st.integers(0, 7)) == 7)

    def array(self, usable: Callable[[Any], bool] = lambda array: True) -> str | None:
        """The name of an array that can be used, later ones more often."""
        found = [name for name, one in self.program.arrays.items() if usable(one)]
        return self.one_of(*found, *found[-2:]) if found else None

    # data

    def given(self) -> tuple[str, str | None, int]:
        """An array made of given numbers, or by Dask's own functions from a shape."""
        shape = tuple(self.draw(st.lists(st.sampled_from(self.lengths), max_size=3)))
        chunks = self.draw(strategies.chunks(shape, zeros=self.rarely()))
        if self.rarely():
            made = self.one_of("ones", "zeros", "full")
            fill = ", 3" if made == "full" else ""
            rest = f", dtype={self.one_of(*KINDS)!r}"
            return f"xp.{made}({shape}{fill}, chunks={chunks}{rest})", f"xp.{made}({shape}{fill}{rest})", 0
        dtype = self.one_of(*KINDS)
        other = self.rarely()
        if other:
            dtype = self.one_of("M8[D]", "m8[s]", "O", [("a", "i4"), ("b", "f8")], "U3", dtype, dtype, dtype)
        layout = self.one_of("C", "C", "F", "reversed", "strided", "readonly")
        seed = self.draw(st.integers(0, 9999))
        values = f"numbers({shape}, {dtype!r}, {seed}, {self.wild!r}, {layout!r})"
        text, reference = f"da.from_array({values}, chunks={chunks})", values
        if other and dtype in KINDS:
            if sparse is not None and shape and self.draw(st.booleans()):
                return f"{text}.map_blocks(sparse.COO.from_numpy)", "", 0
            return f"da.ma.masked_equal({text}, 1)", "", 0
        if self.rarely():
            text += ".persist(scheduler='sync')"
        return text, reference, 0

    # steps: Dask's text, NumPy's (None: the same, empty: none), and how it rounds

    def einsum(self) -> tuple[str, str | None, int] | None:
        names = [self.array(is_known) for _ in range(self.one_of(1, 2, 2, 2, 3, 3, 4))]
        if None in names:
            return None
        lengths: dict[str, int] = {}
        operands = []
        diagonals = self.rarely()
        for name in names:
            labels = ""
            for extent in self.program.arrays[str(name)].shape:
                fits = [one for one, n in lengths.items() if n == extent and (diagonals or one not in labels)]
                fresh = "ijklmnopqrstuvwxyz"[len(lengths)]
                label = self.one_of(*fits, *fits, fresh)
                lengths.setdefault(label, extent)
                labels += label
            operands.append(labels)
        if prod(lengths.values()) > 5000:
            return None
        kept = self.draw(st.lists(st.sampled_from(sorted(lengths)), unique=True)) if lengths else []
        subscripts = ",".join(operands) + ("" if self.rarely() else f"->{''.join(kept)}")
        options = self.one_of("", "", "", ", optimize=True", ", optimize='greedy'", ", split_every=2")
        if self.rarely():  # a narrower type NumPy refuses, or not, as it likes
            options += ", dtype='c16'"
        read = ", ".join(map(str, names))
        reference = f"product(np.einsum, DTYPE, {subscripts!r}, {read}, optimize=optimize)"
        if "dtype" in options:
            reference = f"np.einsum({subscripts!r}, {read}, dtype=DTYPE)"
        return f"xp.einsum({subscripts!r}, {read}{options})", reference, 1

    def matmul(self) -> tuple[str, str | None, int] | None:
        x, y = self.array(is_known), self.array(is_known)
        if x is None or y is None:
            return None
        left, right = self.program.arrays[x], self.program.arrays[y]
        matching = [
            (i, j) for i, j in every(range(left.ndim), range(right.ndim)) if left.shape[i] == right.shape[j]
        ]
        kind = self.one_of("matmul", "matmul", "dot", "tensordot", "tensordot", "vdot", "outer")
        if kind == "tensordot":
            pairs = (
                self.draw(st.lists(st.sampled_from(matching), unique=True, max_size=2)) if matching else []
            )
            axes = ([i for i, _ in pairs], [j for _, j in pairs])
            if any(len(set(one)) < len(one) for one in axes):
                return None
            return f"xp.tensordot({x}, {y}, {axes})", f"product(np.tensordot, DTYPE, {x}, {y}, {axes})", 1
        if kind in ("matmul", "dot"):
            x, y = self.one_of((x, y), (x, f"{y}.T"), (f"{x}.T", y), (f"{x}.T", x), (x, f"{x}.T"))
        return f"xp.{kind}({x}, {y})", f"product(np.{kind}, DTYPE, {x}, {y})", 1

    def unary(self) -> tuple[str, str | None, int] | None:
        text, rounds = self.one_of(*UNARY.items())
        if self.rarely():
            text, rounds = f"{{x}}.astype({self.one_of(*KINDS)!r})", 1
        return text.format(x=self.array()), None, rounds

    def binary(self) -> tuple[str, str | None, int] | None:
        text, rounds = self.one_of(*BINARY.items())
        x = self.array()
        shape = self.program.arrays[str(x)].shape
        y = self.array(lambda one: len(one.shape) <= 1 or one.shape[-1:] == shape[-1:])
        if y is None:
            return None
        if self.rarely():
            y = f"{y}[..., None]"
        return text.format(x=x, y=y), None, rounds

    def reduce(self) -> tuple[str, str | None, int] | None:
        name, rounds = self.one_of(*REDUCTIONS.items())
        x = self.array()
        one = self.program.arrays[str(x)]
        if "prod" in name and one.dtype.char == "e":  # overflows on the way
            return None
        axes = self.draw(st.lists(st.integers(0, max(one.ndim - 1, 0)), unique=True, max_size=one.ndim))
        axis = (axes[0] - self.one_of(0, one.ndim) if len(axes) == 1 else tuple(axes)) if axes else None
        if "arg" in name and axes:
            axis = axes[0]
        options = f", axis={axis}" + (", keepdims=True" if self.rarely() else "")
        if name in ("sum", "mean", "prod") and self.rarely():
            options += f", dtype={self.one_of('f8', 'f4', 'i8', 'c16')!r}"
        every = self.one_of("", "", ", split_every=2", ", split_every=3")
        return f"xp.{name}({x}{options}{every})", f"xp.{name}({x}{options})", rounds

    def index(self) -> tuple[str, str | None, int] | None:
        x = self.array()
        parts = []
        for extent in self.program.arrays[str(x)].shape:
            some = [":", ":", "::2", "::-1", "1:", ":-1", "0", "-1", "None", "-2::-2"]
            if not isnan(extent) and extent and not any("[" in part for part in parts):
                some.append(str(self.draw(st.lists(st.integers(-int(extent), int(extent) - 1), max_size=4))))
                some.append(str(self.draw(st.lists(st.booleans(), min_size=extent, max_size=extent))))
            part = self.one_of(*some)
            parts += [part] if part != "None" else ["None", ":"]
        text = f"{x}[{', '.join(parts) or '...'}]".replace("[]", "np.array([], int)")
        return text, None, 0

    def shape(self) -> tuple[str, str | None, int] | None:
        text, reference = self.one_of(*SHAPES.items())
        x = self.array()
        one = self.program.arrays[str(x)]
        if "cumprod" in text and one.dtype.char == "e":
            return None
        rounds = 2 if "norm" in text else int(any(word in text for word in ROUNDING))
        return text.format(x=x), reference and reference.format(x=x), rounds

    def join(self) -> tuple[str, str | None, int] | None:
        x = self.array()
        shape = self.program.arrays[str(x)].shape
        y = self.array(lambda one: one.shape == shape)
        how = self.one_of("concatenate([{x}, {y}])", "stack([{x}, {y}])", "concatenate([{y}, {x}], axis=-1)")
        return f"xp.{how}".format(x=x, y=y), None, 0

    def step(self) -> tuple[str, str | None, int] | None:
        steps = [self.einsum] * 3 + [self.matmul] * 3 + [self.binary] * 3 + [self.reduce] * 2
        return self.one_of(*steps, self.unary, self.unary, self.shape, self.shape, self.index, self.join)()


def is_known(array: Any) -> bool:
    """Whether the extents of an array are known."""
    return not any(map(isnan, array.shape))


@st.composite
def programs(draw: st.DrawFn, most: int = 8) -> Program:
    """A program of up to ``most`` steps and one to three results."""
    drawing = Drawing(draw)
    program = drawing.program
    wanted = draw(st.integers(1, 3))
    while len(program.lines) < wanted:
        program.take(*drawing.given())
    given = len(program.lines)
    for _ in range(draw(st.integers(1, most))):
        found = drawing.step()
        if found is not None:
            program.take(*found)
    steps: Sequence[str] = [line.name for line in program.lines[given:]] or [program.lines[-1].name]
    program.outputs = list(dict.fromkeys([steps[-1], *draw(st.lists(st.sampled_from(steps), max_size=2))]))
    return program
