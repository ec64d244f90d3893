"""Notebooks run from top to bottom, and are kept with what they printed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

PRINTS = {
    "01-first-plan": (
        r"tasks: \d+ instead of \d+",
        r"plain Dask: \d+\.\d\d s, planned: \d+\.\d\d s",
        r"\d+\.\d times as fast",
        r"equal to NumPy: True",
        r"sort: ",
        r"4 expressions are planned all the same",
    ),
}
"""What the cells of each notebook are sure to print, in order."""


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: Any) -> str:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def assert_in_order(patterns: tuple[str, ...], text: str) -> None:
    at = 0
    for pattern in patterns:
        found = re.compile(pattern).search(text, at)
        assert found is not None, f"no {pattern!r} in what follows {text[:at]!r}: {text[at:]!r}"
        at = found.end()


def test_every_notebook_is_known_by_what_it_prints() -> None:
    assert {notebook.stem for notebook in NOTEBOOKS} == PRINTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_should(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3")
    client.execute(env=environment)  # raises CellExecutionError at the first cell that does
    assert all(output.output_type != "error" for cell in code_cells(notebook) for output in cell.outputs)
    assert_in_order(PRINTS[path.stem], printed(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in code_cells(notebook)] == [
        number + 1 for number in range(len(code_cells(notebook)))
    ]
    assert_in_order(PRINTS[path.stem], printed(notebook))


def test_a_plan_shows_itself_as_a_table() -> None:
    notebook = nbformat.read(ROOT / "notebooks" / "01-first-plan.ipynb", as_version=4)
    shown = [
        output.data["text/html"]
        for cell in code_cells(notebook)
        for output in cell.outputs
        if cell.source.endswith("\nplan")
    ]
    assert len(shown) == 1
    assert "<table>" in shown[0]
    assert "as it came" in shown[0]
