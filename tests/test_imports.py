"""Who may import whom: nouns only nouns, a stage never another stage, dask and distributed only where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dask_eindecomp

PACKAGE = Path(dask_eindecomp.__file__).parent
NOUNS = {
    "expression", "element_types", "partition", "graph", "cost", "topology", "elimination", "plan",
    "memory", "candidates", "pricing", "estimate", "cache", "shipping",
}  # fmt: skip
READERS = {"annotations", "functions", "layers"}
STAGES = {"lift", "contract", "decompose", "place", "lower"}
EDGES = {
    "hook",
    "machines",
    "splice",
    "gathering",
    "extended",
    "api",
    "__main__",
    "__init__",
    "demo",
    "minilm",
}
KERNELS = {"axes", "combining", "grams", "fused", "folds", "kernels"}
FREE = {*KERNELS, "blas", "config", "versions"}
MEASURING = {"calibration"}
PLUGINS = {"scheduler", "measurement"}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))


def imports(module: str) -> Iterator[tuple[str, bool]]:
    """Every module imported, and whether that is inside a function."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    inner = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in inner
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{module} imports relatively"
            if node.module == "dask_eindecomp":
                for alias in node.names:
                    yield f"dask_eindecomp.{alias.name}", id(node) in inner
            else:
                yield node.module, id(node) in inner


def ours(module: str) -> set[str]:
    return {name.split(".")[1] for name, _ in imports(module) if name.startswith("dask_eindecomp.")} & set(
        MODULES
    )


def test_every_module_has_its_place() -> None:
    assert set(MODULES) == NOUNS | READERS | STAGES | EDGES | FREE | MEASURING | PLUGINS


@pytest.mark.parametrize("module", sorted(NOUNS))
def test_a_noun_imports_nouns_only(module: str) -> None:
    assert ours(module) <= NOUNS
    assert not {name.split(".")[0] for name, _ in imports(module)} & {"dask", "distributed"}


@pytest.mark.parametrize("module", sorted(STAGES | READERS | MEASURING))
def test_a_stage_imports_nouns_readers_and_kernels(module: str) -> None:
    readers = READERS if module == "lift" else set()
    assert ours(module) <= NOUNS | readers | KERNELS | {"blas"}


@pytest.mark.parametrize("module", ["contract", "decompose", "place", *sorted(KERNELS)])
def test_these_do_without_dask(module: str) -> None:
    assert not {name.split(".")[0] for name, _ in imports(module)} & {"dask", "distributed"}


@pytest.mark.parametrize("module", sorted(KERNELS))
def test_kernels_import_other_kernels_alone(module: str) -> None:
    assert ours(module) <= KERNELS


@pytest.mark.parametrize("module", MODULES)
def test_distributed_is_imported_by_edges_inside_functions(module: str) -> None:
    found = [inner for name, inner in imports(module) if name.split(".")[0] == "distributed"]
    assert all(found) or module in PLUGINS
    assert not found or module in EDGES | MEASURING | PLUGINS


@pytest.mark.parametrize("module", MODULES)
def test_the_schedulers_plugin_is_imported_inside_functions(module: str) -> None:
    assert all(inner for name, inner in imports(module) if name.startswith("dask_eindecomp.scheduler"))


def test_no_public_name_hides_a_module() -> None:
    functions = {name for name in dask_eindecomp.__all__ if callable(getattr(dask_eindecomp, name))}
    assert not functions & set(MODULES)
