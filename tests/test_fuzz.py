"""Any program over Dask arrays gives under the hook what NumPy and plain Dask give.

``HYPOTHESIS_PROFILE=nightly python -m pytest -s tests/test_fuzz.py --hypothesis-seed 1`` draws 20,000 programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from dask_eindecomp import EinDecomp, Topology
from dask_eindecomp.estimate import price
from dask_eindecomp.lift import ShapeError
from tests import strategies
from tests.programs import Program, programs

VARIANTS = 4
"""How often NumPy's numbers are moved to see what rounding does."""
SLACK = 16.0
"""How much further than these a result may be off."""
EXAMPLES = max(300, settings().max_examples)
COUNTS: Counter[str] = Counter()


@dataclass(frozen=True)
class Counted(EinDecomp):
    """The hook, which counts what it planned; with ``draw`` it takes any plan instead of the best."""

    draw: Callable[[st.SearchStrategy[Any]], Any] | None = None

    def plan(self, *arguments: Any, **keywords: Any) -> Any:
        lifted, graph, plan = super().plan(*arguments, **keywords)
        if self.draw is not None and plan.verdict.startswith("applied"):
            partitions = {name: self.draw(strategies.partitions(node)) for name, node in graph.nodes.items()}
            plan = price(graph, partitions, plan.topology)
            object.__setattr__(plan, "verdict", "applied: drawn")
        return lifted, graph, plan

    def _rewrite(self, dsk: Any, keys: Any) -> Any:
        found = super()._rewrite(dsk, keys)
        COUNTS["planned"] += found is not None
        return found


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Few or many workers or threads, mostly so slow that small problems are shared."""
    workers = draw(st.sampled_from([1, 2, 4, 7]))
    if draw(st.integers(0, 3)) == 0:
        return Topology.of_threads(workers)
    named = tuple(f"tcp://worker:{number}" for number in range(workers)) if draw(st.booleans()) else ()
    fast = {"bandwidth": 1e12, "latency": 0, "flops": 1e5, "task_overhead": 0, "turn": 0}
    return Topology(workers=workers, addresses=named, **(fast if draw(st.integers(0, 3)) else {}))


def computed(arrays: list[Any], hook: Any, persist: bool) -> list[Any] | Exception:
    """Arrays computed together under a hook, persisted first if asked to; or the exception that this raises."""
    with dask.config.set(array_optimize=hook, scheduler="synchronous"), np.errstate(all="ignore"):
        try:
            if not persist:
                return list(dask.compute(*arrays))
            kept = dask.persist(*arrays)
        except Exception as error:
            return error
    return list(kept)


def blocks(array: Any) -> list[Any]:
    """Blocks of a persisted array, in order."""
    return [dask.get(dict(array.dask), key) for key in dask.core.flatten(array.__dask_keys__())]


def plain_values(value: Any) -> Any:
    """The numbers of a result of any type."""
    if hasattr(value, "todense"):
        value = value.todense()
    return np.ma.filled(value, 0) if isinstance(value, np.ma.MaskedArray) else np.asarray(value)


def near(one: Any, other: Any, off: Any) -> Any:
    """Where two arrays are equal, or no further apart than ``off``."""
    if one.dtype.kind in "fc" or other.dtype.kind in "fc":
        wide = "D" if "c" in one.dtype.kind + other.dtype.kind else "d"
        one, other = one.astype(wide), other.astype(wide)
        with np.errstate(all="ignore"):
            return (one == other) | (abs(one - other) <= off) | (np.isnan(one) & np.isnan(other))
    equal = np.asarray(one == other)
    return equal | (np.isnat(one) & np.isnat(other)) if one.dtype.kind in "mM" else equal


def same_kind(found: Any, plain: Any, array: Any) -> None:
    """Type, shape and element type are plain Dask's, or the last what Dask declares.

    Where Dask declares plain blocks and hides masked ones, only a mask that masks anything must be kept.  Reshaped, or
    an axis of length 1 indexed, what has no axes may be a scalar or an array (see ``test_semantics`` for the rest).
    """
    bare = isinstance(found, np.generic | np.ndarray) and found.ndim == 0
    generic = bare and isinstance(plain, np.generic | np.ndarray)
    hidden = isinstance(plain, np.ma.MaskedArray) and not isinstance(array._meta, np.ma.MaskedArray)
    empty = hidden and not np.ma.getmaskarray(plain).any() and isinstance(found, np.ndarray)
    declared = array.dtype
    assert generic or empty or type(found) is type(plain), f"{type(found)} instead of {type(plain)}"
    assert getattr(found, "shape", None) == getattr(plain, "shape", None)
    kinds = {getattr(plain, "dtype", None), declared}
    assert getattr(found, "dtype", None) in kinds, f"{getattr(found, 'dtype', None)}, expected one of {kinds}"


def allowed(name: str, program: Program, variants: list[dict[str, Any]], dtype: Any) -> tuple[Any, Any]:
    """How far each element may be off, and where it may be anything, for NumPy's numbers moved say otherwise."""
    value = program.values[name]
    others = [one[name] for one in variants]
    if any(other.shape != value.shape for other in others):  # a selection by a comparison that turned over
        return None, None
    if name not in program.inexact or value.dtype.kind == "O":
        return np.zeros(value.shape), np.zeros(value.shape, bool)
    if value.dtype.kind not in "fc":
        return np.zeros(value.shape), np.any([other != value for other in others], axis=0)
    with np.errstate(all="ignore"):
        odd = np.any([np.isfinite(other) != np.isfinite(value) for other in others], axis=0)
        spread = np.max([abs(other - value) for other in others], axis=0)
        single = max(np.finfo(one).eps for one in (value.dtype, dtype) if one.kind in "fc")
        off = SLACK * spread + 4 * single * abs(value)
        return np.where(np.isfinite(off), off, 0.0).astype("d"), odd


def check(name: str, program: Program, variants: list[dict[str, Any]], found: Any, plain: Any) -> None:
    """One result is NumPy's and plain Dask's; where these differ, one of them."""
    array = program.arrays[name]
    note(f"{name}: hook {found!r}, plain {plain!r}, NumPy {program.values.get(name)!r}")
    same_kind(found, plain, array)
    if not hasattr(plain, "dtype"):
        assert found == plain
        return
    if isinstance(plain, np.ma.MaskedArray):
        np.testing.assert_array_equal(np.ma.getmaskarray(found), np.ma.getmaskarray(plain))
    found, plain = plain_values(found), plain_values(plain)
    value = program.values.get(name)
    if value is None or value.shape != found.shape:
        if found.dtype.kind in "fc":
            scale = np.finfo(found.dtype).eps * 100
            np.testing.assert_allclose(found, plain, rtol=scale, atol=scale)
        else:
            np.testing.assert_array_equal(found, plain)
        return
    off, anything = allowed(name, program, variants, array.dtype)
    if off is None:
        return
    right = near(found, value, off) | anything
    as_plain = near(found, plain, off) & ~near(plain, value, off)
    assert np.all(right | as_plain), f"{name} is {found}, in plain Dask {plain}, in NumPy {value}"


@pytest.fixture(scope="module", autouse=True)
def counted() -> Iterator[None]:
    """A run says something only if much of it was planned."""
    COUNTS.clear()
    yield
    print(
        f"\n{COUNTS['programs']:,} programs, {COUNTS['planned']:,} planned, {COUNTS['raised']:,} raised by Dask"
    )
    assert COUNTS["planned"] >= 0.4 * COUNTS["programs"]


def agrees(program: Program, hook: EinDecomp, persist: bool) -> None:
    """All results of a program under the hook are what they should be."""
    arrays = [program.arrays[name] for name in program.outputs]
    COUNTS["programs"] += 1
    plain, found = computed(arrays, None, persist), computed(arrays, hook, persist)
    if isinstance(plain, Exception):
        COUNTS["raised"] += 1
        if isinstance(found, Exception):
            alone = [computed([array], None, persist) for array in arrays]  # one of several may be first
            kinds = tuple(type(one) for one in (plain, *alone) if isinstance(one, Exception))
            # extents that disagree are found before anything runs
            assert isinstance(found, (*kinds, ShapeError)), f"{found!r} instead of {plain!r}"
            return
        plain = found  # what plain Dask cannot run has NumPy's value
        for name, one in zip(program.outputs, found):
            # or NumPy refuses it, and Dask in some chunks only: the least of nothing, for each of no columns
            assert name in program.values or np.size(one) == 0
    if isinstance(found, ShapeError) and len(program.values) < len(program.arrays):
        return  # NumPy refuses it, too
    if isinstance(found, Exception):
        raise found
    variants = [program.moved(seed) for seed in range(VARIANTS if program.inexact else 0)]
    for name, one, other in zip(program.outputs, found, plain):
        if persist:
            assert isinstance(one, da.Array)
            assert (one.name, str(one.chunks), one.dtype) == (other.name, str(other.chunks), other.dtype)
            for block, expected in zip(blocks(one), blocks(other)):
                same_kind(block, expected, program.arrays[name])
            one, other = (kept.compute(scheduler="synchronous") for kept in (one, other))
        check(name, program, variants, one, other)


@pytest.mark.timeout(max(300, EXAMPLES))
@given(program=programs(), topology=topologies(), persist=st.booleans(), data=st.data())
@settings(max_examples=EXAMPLES)
def test_any_program_gives_what_numpy_and_plain_dask_give(
    program: Program, topology: Topology, persist: bool, data: st.DataObject
) -> None:
    note(repr(program))
    draw = data.draw if data.draw(st.booleans()) else None
    objective = data.draw(st.sampled_from(["seconds", "bytes"]))
    hook = Counted(force=True, strict=True, topology=topology, objective=objective, draw=draw)
    agrees(program, hook, persist)
