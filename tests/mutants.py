"""How many small faults in the planner's arithmetic its tests notice.

``python -m tests.mutants`` plants one fault after the other into ``cost``, ``partition`` and ``decompose``: another
operator or comparison, a number one off, a condition turned round, ``min`` for ``max``, a statement left out, nothing
returned.  Annotations, decorators and the texts of errors stay as they are.  Prints the faults that no test noticed and
the share that was noticed of each file; ends with 1 if one is below 85 %.

Tests are collected once, run once to learn which statements each reaches, and then, for every fault, in a process forked
from there: those that reach the faulty statement, quickest first, until one fails.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, Phase, settings

FILES = ("cost", "partition", "decompose")
TESTS = ("partition", "cost", "candidates", "memory", "plan", "place", "decompose", "api")
"""Test files that are run, beside the doctests of each file."""
WANTED = 0.85
EXAMPLES = 15
"""Most examples of one property; they are the same in every run."""
SLOWER = 10
"""A fault counts as noticed if a test takes so many times as long as without it, and five seconds."""
MEMORY = 16 << 30
"""Bytes of address space, for faults that ask for too much of it."""

OTHERS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}  # fmt: skip
PAIRS = [
    ("min", "max"), ("minimum", "maximum"), ("argmin", "argmax"), ("any", "all"), ("at_most", "at_least"),
    ("left", "right"),
]  # fmt: skip
NAMES = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}

Spot = tuple[int, int]
"""Line and column at which a statement starts."""


@dataclass(frozen=True)
class Fault:
    """One node of a tree and what may stand in its place."""

    owner: Any
    field: str
    position: int | None
    """Where in a list of the owner's."""
    before: ast.AST
    after: ast.AST
    spot: Spot | None
    """The statement it is in; None outside of functions."""

    @property
    def line(self) -> int:
        """Where it is."""
        line: int = getattr(self.before, "lineno", None) or (self.spot or (1, 0))[0]
        return line

    def put(self, node: ast.AST) -> None:
        """Put a node in its place."""
        if self.position is None:
            setattr(self.owner, self.field, node)
        else:
            getattr(self.owner, self.field)[self.position] = node


def alternatives(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    match node:
        case ast.BinOp(left, operator, right) if type(operator) in OTHERS:
            yield ast.BinOp(left, OTHERS[type(operator)](), right)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(OTHERS[type(operator)](), values)
        case ast.UnaryOp(ast.USub() | ast.Not(), operand):
            yield operand
        case ast.Compare(left, operators, others):
            for at, operator in enumerate(operators):
                changed = [*operators[:at], OTHERS[type(operator)](), *operators[at + 1 :]]
                yield ast.Compare(left, changed, others)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(str(value)) if value in NAMES:
            yield ast.Constant(NAMES[value])
        case ast.Name(name) if name in NAMES:
            yield ast.Name(NAMES[name], ast.Load())
        case ast.Attribute(value, name) if name in NAMES:
            yield ast.Attribute(value, NAMES[name], ast.Load())
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.comprehension(target, iterable, [_, *_] as tests):
            yield ast.comprehension(target, iterable, [ast.UnaryOp(ast.Not(), tests[0]), *tests[1:]], 0)
        case ast.If(test, body, orelse) | ast.While(test, body, orelse):
            yield type(node)(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Return(ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.AugAssign(target, operator, value):
            yield ast.AugAssign(target, OTHERS[type(operator)](), value)
            yield ast.Pass()
        case ast.Continue() | ast.Break() | ast.Expr(ast.Call() | ast.Yield()):
            yield ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def faults(node: ast.AST, spot: Spot | None = None) -> Iterator[Fault]:
    """Every fault that can be planted below a node."""
    if isinstance(node, ast.Raise):
        return
    if isinstance(node, ast.FunctionDef) and spot is None:
        spot = node.body[0].lineno, node.body[0].col_offset
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        several = isinstance(value, list)
        for position, child in enumerate(value if several else [value]):
            if not isinstance(child, ast.AST):
                continue
            there = spot
            if spot is not None and isinstance(child, ast.stmt):
                there = child.lineno, child.col_offset
            for other in alternatives(child):
                if "lineno" in child._attributes:
                    ast.copy_location(other, child)
                yield Fault(node, name, position if several else None, child, other, there)
            yield from faults(child, there)


class Marked(ast.NodeTransformer):
    """A tree of which every statement inside a function says that it is reached."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if not isinstance(node, (ast.Module, ast.ClassDef)):
            for name in ("body", "orelse"):
                block = getattr(node, name, None)
                if isinstance(block, list):
                    setattr(
                        node, name, [one for statement in block for one in (reached(statement), statement)]
                    )
        return node


def reached(statement: ast.stmt) -> ast.stmt:
    """A statement that notes another."""
    (note,) = ast.parse(f"REACHED.add({(statement.lineno, statement.col_offset)})").body
    return note


def compiled(tree: ast.Module, module: ModuleType) -> CodeType:
    """Code of a tree."""
    return compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")


def plant(module: ModuleType, code: CodeType) -> None:
    """Give a module's functions, classes and numbers what code makes of them; whoever has imported them has them."""
    fresh: dict[str, Any] = dict(vars(module))
    exec(code, fresh)
    for name, new in fresh.items():
        old = vars(module).get(name)
        if isinstance(new, (int, float)):
            setattr(module, name, new)
        elif getattr(new, "__module__", None) == module.__name__ and new is not old:
            for one, other in (
                [(vars(old)[at], vars(new)[at]) for at in vars(new)] if inspect.isclass(new) else [(old, new)]
            ):
                replace_function(one, other)


def replace_function(old: Any, new: Any) -> None:
    """Give a function the code and the defaults of another."""
    for attribute in ("__wrapped__", "__func__", "fget"):
        old, new = getattr(old, attribute, old), getattr(new, attribute, new)
    if inspect.isfunction(old):
        old.__code__, old.__defaults__, old.__kwdefaults__ = (
            new.__code__,
            new.__defaults__,
            new.__kwdefaults__,
        )


def forget() -> None:
    """Empty what the package remembers of earlier calls."""
    for name, module in list(sys.modules.items()):
        if name.startswith("dask_eindecomp"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@dataclass(frozen=True)
class Test:
    """A collected test that passes."""

    item: pytest.Item
    seconds: float
    """How long it takes."""
    reached: dict[str, set[Spot]]
    """Statements of each file that it runs."""

    @property
    def limit(self) -> int:
        """Seconds after which it does not end."""
        return int(5 + SLOWER * self.seconds)


class Trial:
    """A plugin that runs the collected tests once for every fault."""

    def __init__(self, names: Sequence[str], sample: int | None, seed: int) -> None:
        self.modules = {name: importlib.import_module(f"dask_eindecomp.{name}") for name in names}
        self.sources = {name: inspect.getsource(module) for name, module in self.modules.items()}
        self.sample, self.seed = sample, seed
        self.enough = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Properties are tried on fewer examples."""
        for item in items:
            test = getattr(item, "obj", None)
            own = getattr(test, "_hypothesis_internal_use_settings", None)
            if own is not None:
                fewer = settings(own, max_examples=min(own.max_examples, EXAMPLES))
                test._hypothesis_internal_use_settings = fewer

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Plant the faults."""
        if session.testsfailed:
            raise session.Interrupted("expected every test file to be importable")
        tests = self.passing(session.items)
        print(f"{len(tests)} tests, {sum(test.seconds for test in tests):.0f} s", flush=True)
        shares = [self.share(name, tests) for name in self.modules]
        self.enough = min(shares) >= WANTED
        return True

    def passing(self, items: list[pytest.Item]) -> list[Test]:
        """What each test takes and reaches, quickest first."""
        with tempfile.NamedTemporaryFile("r") as notes:
            right = apart(lambda: self.note(items, Path(notes.name)))
            rows = json.load(notes)
        if not right:
            raise SystemExit(f"{rows} fails as it is; expected every test to pass")
        tests = []
        for item, (seconds, reached) in zip(items, rows):
            tests.append(Test(item, seconds, {name: {*map(tuple, spots)} for name, spots in reached.items()}))
        return sorted(tests, key=lambda test: test.seconds)

    def note(self, items: list[pytest.Item], notes: Path) -> bool:
        """Whether all tests pass; writes down what they take and reach, or else the first that fails."""
        for name, module in self.modules.items():
            plant(module, compiled(Marked().visit(ast.parse(self.sources[name])), module))
        rows = []
        for item in items:
            forget()
            reached: dict[str, set[Spot]] = {name: set() for name in self.modules}
            for name, module in self.modules.items():
                vars(module)["REACHED"] = reached[name]
            started = time.perf_counter()
            if not passes(item):
                notes.write_text(json.dumps(item.nodeid))
                return False
            seconds = time.perf_counter() - started
            rows.append((seconds, {name: sorted(spots) for name, spots in reached.items()}))
        notes.write_text(json.dumps(rows))
        return True

    def share(self, name: str, tests: list[Test]) -> float:
        """The share of the faults in one file that are noticed."""
        tree, lines, started = (
            ast.parse(self.sources[name]),
            self.sources[name].splitlines(),
            time.monotonic(),
        )
        every = list(faults(tree))
        count = min(len(every), self.sample or len(every))
        missed = 0
        for number in sorted(random.Random(self.seed).sample(range(len(every)), count)):
            fault = every[number]
            if self.survives(name, tree, fault, tests):
                missed += 1
                before, after = (ast.unparse(one).partition("\n")[0] for one in (fault.before, fault.after))
                line = lines[fault.line - 1].strip()
                print(f"{name}.py:{fault.line}: {before} -> {after}    in: {line}", flush=True)
        share, minutes = 1 - missed / count, (time.monotonic() - started) / 60
        print(
            f"{name}: {count - missed} of {count} noticed, {share:.1%} ({len(every)} in all, {minutes:.1f} min)",
            flush=True,
        )
        return share

    def survives(self, name: str, tree: ast.Module, fault: Fault, tests: list[Test]) -> bool:
        """Whether no test notices a fault."""
        module = self.modules[name]
        fault.put(fault.after)
        code = compiled(tree, module)
        fault.put(fault.before)
        concerned = [test for test in tests if fault.spot is None or fault.spot in test.reached[name]]

        def unnoticed() -> bool:
            plant(module, code)
            forget()
            return all(passes(test.item, test.limit) for test in concerned)

        return apart(unnoticed)


def passes(item: pytest.Item, seconds: int = 0) -> bool:
    """Whether a test passes; ends the process where it takes longer than so many seconds."""
    signal.alarm(seconds)
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def apart(work: Callable[[], bool]) -> bool:
    """Whether work is done and gives true, in a forked process."""
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def main() -> int:
    """Plant faults and say which no test noticed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", nargs="+", choices=FILES, default=FILES)
    parser.add_argument("--sample", type=int, help="so many faults of each file; default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # a property that fails need not be made small
    settings.register_profile(
        "mutants", deadline=None, derandomize=True, database=None, max_examples=EXAMPLES,
        phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    trial = Trial(options.files, options.sample, options.seed)
    here = Path(__file__).parent
    paths = [
        *(module.__file__ for module in trial.modules.values()),
        *(here / f"test_{name}.py" for name in TESTS),
    ]
    quiet = [
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "-o",
        "timeout=0",
        "--doctest-modules",
        "-s",
        "--disable-warnings",
        "-qq",
    ]
    status = pytest.main([*quiet, f"--rootdir={here.parent}", *map(str, paths)], plugins=[trial])
    return int(status != pytest.ExitCode.OK or not trial.enough)


if __name__ == "__main__":
    sys.exit(main())
