"""How many small faults in the planner's arithmetic its tests notice.

``python -m tests.mutants`` plants one fault after the other into ``cost``, ``partition`` and ``decompose``: another
comparison or operator, a number one off, a condition turned round, a statement left out, another of ``min`` and ``max``.
Each is tried in a process forked from one that has imported everything, with the tests of that file, until one fails.
``--sample N`` takes so many of each file.  Prints what no test noticed, and the share that was noticed of each file; ends
with 1 if any is below 85 %.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import inspect
import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any

TESTS = {
    "cost": ["test_cost.py", "test_memory.py", "test_plan.py", "test_decompose.py"],
    "partition": ["test_partition.py", "test_candidates.py", "test_decompose.py"],
    "decompose": ["test_decompose.py", "test_plan.py", "test_api.py"],
}
"""Test files of each module, beside its doctests; the first that fails ends it."""
WANTED = 0.85
SECONDS = 120
"""After which a mutant counts as noticed: it does not end."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "at_most": "at_least", "at_least": "at_most", "any": "all", "all": "any"}
NAMES |= {"minimum": "maximum", "maximum": "minimum", "ceil": "floor", "floor": "ceil", "argmin": "argmax"}


def spots(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """What can be changed inside functions, and how: texts, annotations and types are left as they are."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[ast.AST, str]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for child in [*node.args.defaults, *node.args.kw_defaults, *node.body]:
                if child is not None:
                    yield from walk(child, True)
            return
        if isinstance(node, ast.Raise):
            return
        if inside:
            yield from found(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, inside)

    def found(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in SWAPS:
            yield node, "operator"
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield node, "comparison"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield node, "number"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, "truth"
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield node, "name"
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield node, "attribute"
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield node, "condition"
        elif isinstance(node, (ast.Continue, ast.Break, ast.AugAssign)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield node, "statement"
        elif isinstance(node, ast.Return) and node.value is not None:
            yield node, "result"

    return walk(tree, False)


def changed(node: Any, how: str) -> None:
    """Plant one fault."""
    if how == "operator":
        node.op = SWAPS[type(node.op)]()
    elif how == "comparison":
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif how == "number":
        node.value = node.value + 1
    elif how == "truth":
        node.value = not node.value
    elif how == "name":
        node.id = NAMES[node.id]
    elif how == "attribute":
        node.attr = NAMES[node.attr]
    elif how == "condition":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif how == "result":
        node.value = ast.Constant(None)


class Without(ast.NodeTransformer):
    """Leaves one statement out."""

    def __init__(self, gone: ast.AST) -> None:
        self.gone = gone

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if node is self.gone else self.generic_visit(node)


def mutant(tree: ast.Module, number: int) -> tuple[ast.Module, int, str, str]:
    """The tree with one spot changed, its line, and the text of the spot before and after."""
    tree = copy.deepcopy(tree)
    node, how = [*spots(tree)][number]
    before = ast.unparse(node).partition("\n")[0]
    if how == "statement":
        return ast.fix_missing_locations(Without(node).visit(tree)), node.lineno, before, "pass"
    changed(node, how)
    return ast.fix_missing_locations(tree), node.lineno, before, ast.unparse(node).partition("\n")[0]


def noticed(module: Any, tree: ast.Module, tests: list[str]) -> bool:
    """Whether a test fails with this tree in a module's place, found out in a process of its own."""
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
        signal.alarm(SECONDS)
        os._exit(run(module, tree, tests))
    _, status = os.waitpid(child, 0)
    return status != 0


def run(module: Any, tree: ast.Module | None, tests: list[str]) -> int:
    """Exit status of the tests; a module that cannot even be made has failed."""
    import pytest

    try:
        if tree is not None:
            planted(module, tree)
    except BaseException:
        return 1
    root = os.path.dirname(__file__)
    files = [module.__file__, *(os.path.join(root, test) for test in tests)]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--doctest-modules", "--no-header"]
    return int(pytest.main([*options, *files], plugins=[QuickFirst()]))


class QuickFirst:
    """A pytest plugin: tests of examples come before those that draw them."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Bring the tests into that order."""
        items.sort(key=lambda item: hasattr(getattr(item, "function", None), "hypothesis"))


def planted(module: Any, tree: ast.Module) -> None:
    """Give a module's functions the code of a tree; whoever has imported them has them."""
    fresh: dict[str, Any] = dict(vars(module))
    exec(compile(tree, module.__file__, "exec"), fresh)
    for name, value in fresh.items():
        old = vars(module).get(name)
        if getattr(value, "__module__", None) != module.__name__ or value is old:
            continue
        if inspect.isclass(value):
            for member in vars(value):
                replaced(inspect.getattr_static(old, member), inspect.getattr_static(value, member))
        else:
            replaced(old, value)


def replaced(old: Any, new: Any) -> None:
    """Give a function the code and defaults of another; what was remembered of it is forgotten."""
    if hasattr(old, "cache_clear"):
        old.cache_clear()
    for attribute in ("__wrapped__", "__func__", "fget"):
        old, new = getattr(old, attribute, old), getattr(new, attribute, new)
    if inspect.isfunction(old) and old.__code__.co_filename == new.__code__.co_filename:
        old.__code__, old.__defaults__, old.__kwdefaults__ = (
            new.__code__, new.__defaults__, new.__kwdefaults__,
        )  # fmt: skip


def main() -> int:
    """Plant faults and say which were not noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", nargs="+", choices=TESTS, default=[*TESTS])
    parser.add_argument("--sample", type=int, help="so many of each file (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["CI"] = "true"  # the same examples each time
    from hypothesis import settings

    importlib.import_module("tests.conftest")

    # fewer of them: what a property notices it mostly notices at once
    settings.register_profile("mutants", settings.get_profile("ci"), max_examples=15)
    settings.load_profile("mutants")
    below = False
    for name in options.files:
        module = importlib.import_module(f"dask_eindecomp.{name}")
        for test in TESTS[name]:
            importlib.import_module(f"tests.{test.removesuffix('.py')}")
        tree = ast.parse(inspect.getsource(module))
        if noticed(module, tree, TESTS[name]):
            raise SystemExit(f"the tests of {name} fail as it is; expected them to pass")
        numbers = list(range(len([*spots(tree)])))
        total = len(numbers)
        if options.sample is not None and options.sample < total:
            numbers = sorted(random.Random(options.seed).sample(numbers, options.sample))
        killed = 0
        for number in numbers:
            faulty, line, before, after = mutant(tree, number)
            if noticed(module, faulty, TESTS[name]):
                killed += 1
            else:
                print(f"{name}.py:{line}: {before}  ->  {after}", flush=True)
        share = killed / len(numbers)
        below |= share < WANTED
        print(f"{name}: {killed} of {len(numbers)} noticed, {share:.0%} ({total} in all)", flush=True)
    return int(below)


if __name__ == "__main__":
    sys.exit(main())
