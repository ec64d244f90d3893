"""``explain`` says what would be done and runs nothing; ``optimize`` gives the arrays in the chunks of the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

import dask_eindecomp
from dask_eindecomp import EinDecomp, Plan, Topology, explain, optimize
from dask_eindecomp.__main__ import main

FOUR = Topology(workers=4)


def a(*shape: int, chunks: Any = 4, start: int = 0) -> da.Array:
    return da.from_array(np.arange(float(np.prod(shape))).reshape(shape) + start, chunks=chunks)


@pytest.fixture
def product() -> da.Array:
    return a(16, 16) @ a(16, 16, start=1)


@pytest.fixture(autouse=True)
def synchronous() -> Any:
    with dask.config.set(scheduler="synchronous"):
        yield


def never(block: np.ndarray) -> np.ndarray:
    raise AssertionError("something was run")


# explain


def test_explain_shows_a_row_for_every_expression_and_totals(product: da.Array) -> None:
    plan = explain(da.exp(product), topology=FOUR)
    assert isinstance(plan, Plan)
    header, line, *rows = str(plan).splitlines()
    assert header.split() == [
        "expression",
        "einsum",
        "partition",
        "tiles",
        "join",
        "aggregate",
        "repartition",
        "seconds",
        "why",
    ]
    assert set(line) == {"-"}
    assert "ij,jk->ik" in rows[0] and rows[0].startswith(plan.choices[0].title)
    assert "exp ij->ij" in rows[1]
    text = "\n".join(rows)
    assert "planned for 4 workers x 1 thread, objective seconds" in text
    assert "plan:" in text and "as it came:" in text
    assert plan.verdict in text


def test_explain_runs_nothing() -> None:
    x = a(8, 8).map_blocks(never, dtype="f8", meta=np.zeros((0, 0)))
    plan = explain(x @ x, topology=FOUR)
    assert plan.choices
    assert "left alone: never" in str(plan)
    assert "block function never" in str(plan)


def test_the_totals_are_those_of_the_rows(product: da.Array) -> None:
    plan = explain(product + 1, product.T, topology=FOUR, hook=EinDecomp(objective="bytes"))
    assert plan.objective == "bytes"
    assert plan.traffic == sum((choice.traffic for choice in plan.choices), plan.delivery)
    assert [choice.tiles for choice in plan.choices] == [
        int(np.prod([*choice.partition.values()])) for choice in plan.choices
    ]
    assert plan.baseline is not None and plan.baseline.tasks > 0


def test_explain_as_json_says_the_same(product: da.Array) -> None:
    plan = explain(product.map_blocks(never, dtype="f8") + 1, topology=FOUR)
    record = json.loads(plan.to_json())
    assert [choice["einsum"] for choice in record["choices"]] == [choice.einsum for choice in plan.choices]
    assert [choice["partition"] for choice in record["choices"]] == [c.partition for c in plan.choices]
    assert record["verdict"] == plan.verdict
    assert record["workers"] == 4
    assert record["cost"] == plan.cost
    assert record["traffic"]["nbytes"] == plan.traffic.nbytes
    assert record["baseline"]["tasks"] == plan.baseline.tasks  # type: ignore[union-attr]
    assert record["left_alone"] == [list(pair) for pair in plan.left_alone] and record["left_alone"]


class Cells(HTMLParser):
    """Collects the cells of a table, and complains of tags that are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open[-1:] in (["td"], ["th"]):
            self.cells[-1] += text


def test_a_notebook_shows_a_table_of_the_same_cells(product: da.Array) -> None:
    plan = explain(product.map_blocks(never, name="<b>bold</b>", dtype="f8") @ a(16, 16), topology=FOUR)
    html = plan._repr_html_()
    parser = Cells()
    parser.feed(html)
    assert not parser.open
    rows = [cell for cell in parser.cells]
    assert rows[:9] == str(plan).splitlines()[0].split()
    assert plan.choices[0].einsum in rows
    assert "<b>" not in html and "&lt;b&gt;bold&lt;/b&gt;" in html


def test_the_verdict_says_whether_the_hook_would_apply_the_plan() -> None:
    big = da.ones((4000, 4000), chunks=1000) @ da.ones((4000, 4000), chunks=1000)
    assert explain(big, topology=FOUR).verdict.startswith("applied: about ")
    assert explain(big, topology=FOUR, hook=EinDecomp(force=True)).verdict == "applied: forced"
    assert explain(a(4, 4) + 1, topology=FOUR).verdict == "left to Dask: no expression joins and aggregates"
    assert explain(a(4, 4)[1:], topology=FOUR).verdict == "nothing to plan: the graph runs as it came"
    verdict = explain(big, topology=FOUR, hook=EinDecomp(margin=0.9999)).verdict
    assert verdict.startswith("left to Dask: not 100% cheaper")


def test_a_plan_is_applied_just_where_its_verdict_says_so() -> None:
    for array in (
        da.ones((4000, 4000), chunks=1000) @ da.ones((4000, 4000), chunks=1000),
        a(4, 4) + 1,
        a(4, 4)[1:],
    ):
        hook = EinDecomp(topology=FOUR)
        graph = hook(array.dask, array.__dask_keys__())
        applied = any(name.startswith("join-") for name in getattr(graph, "layers", {}))
        assert applied is explain(array, hook=hook).verdict.startswith("applied")


def test_explain_takes_the_machines_from_the_hook_or_as_given(product: da.Array) -> None:
    hook = EinDecomp(topology=Topology(workers=3))
    assert explain(product, hook=hook).topology.workers == 3
    assert explain(product, hook=hook, topology=FOUR).topology == FOUR
    with dask.config.set(scheduler="threads", num_workers=5):
        found = explain(product).topology
    assert found.slots == 5


def test_explain_takes_xarray_objects() -> None:
    xarray = pytest.importorskip("xarray")
    x = xarray.DataArray(a(16, 16), dims=("i", "j"), name="x")
    y = xarray.DataArray(a(16, 16, start=1), dims=("j", "k"), name="y")
    plan = explain(xarray.dot(x, y), topology=FOUR)
    assert sorted(plan.choices[0].partition) == ["i", "j", "k"]
    both = explain(xarray.Dataset({"z": xarray.dot(x, y), "w": x + 1}), topology=FOUR)
    assert {choice.einsum.split()[0] for choice in both.choices} >= {"add"}


@pytest.mark.parametrize("wrong", [np.ones(3), 3, None, "x", [1]])
def test_explain_refuses_what_is_no_collection(wrong: Any) -> None:
    with pytest.raises(
        TypeError, match=f"{type(wrong).__name__} is no Dask collection; expected a Dask array"
    ):
        explain(wrong)


@pytest.mark.parametrize("call", [explain, optimize])
def test_array_expressions_are_refused(call: Any, product: da.Array) -> None:
    with (
        dask.config.set({"array.query-planning": True}),
        pytest.raises(dask_eindecomp.QueryPlanningError, match=r"query-planning is True.*expected False"),
    ):
        call(product)


# optimize


def test_optimize_gives_the_same_values_in_the_chunks_of_the_plan(product: da.Array) -> None:
    planned = optimize(product, topology=FOUR)
    assert planned.chunks != product.chunks
    assert planned.shape == product.shape and planned.dtype == product.dtype
    assert type(planned._meta) is type(product._meta)
    np.testing.assert_array_equal(planned.compute(), product.compute())
    plan = explain(product, topology=FOUR)
    assert int(np.prod(planned.numblocks)) <= plan.choices[-1].tiles


def test_nothing_is_cut_back_into_the_chunks_the_array_had(product: da.Array) -> None:
    planned = optimize(product, topology=Topology(workers=1))
    assert planned.chunks == ((16,), (16,))
    assert len([key for key in planned.dask if "repartition" in str(key)]) == 0


def test_optimize_leaves_the_array_given_alone(product: da.Array) -> None:
    before = (product.name, product.chunks, dict(product.dask.layers))
    optimize(product, topology=FOUR)
    assert before == (product.name, product.chunks, dict(product.dask.layers))


def test_a_planned_array_can_be_used_like_any_other(product: da.Array) -> None:
    planned = optimize(product, topology=FOUR)
    one = product.compute()
    np.testing.assert_array_equal((planned + 1)[2:5].compute(), (one + 1)[2:5])
    np.testing.assert_array_equal((planned @ planned.T).compute(), one @ one.T)
    with dask.config.set(array_optimize=EinDecomp(force=True, topology=FOUR)):
        np.testing.assert_array_equal((planned @ planned.T).compute(), one @ one.T)
        np.testing.assert_array_equal(planned.compute(), one)
    both = dask.compute(planned, product)
    np.testing.assert_array_equal(*both)


def test_several_arrays_are_planned_together(product: da.Array) -> None:
    x, y = product + 1, product.sum(axis=0)
    found = optimize(x, y, topology=FOUR)
    assert isinstance(found, tuple) and len(found) == 2
    one, two = dask.compute(*found)
    np.testing.assert_array_equal(one, x.compute())
    np.testing.assert_array_equal(two, y.compute())


def test_the_same_array_twice_is_planned_once(product: da.Array) -> None:
    one, two = optimize(product, product, topology=FOUR)
    assert one.name == two.name and one.chunks == two.chunks
    np.testing.assert_array_equal(one.compute(), product.compute())


def test_an_array_that_another_is_made_of_may_be_planned_with_it(product: da.Array) -> None:
    first, second = optimize(product, product @ product, topology=FOUR)
    one = product.compute()
    np.testing.assert_array_equal(first.compute(), one)
    np.testing.assert_array_equal(second.compute(), one @ one)


def test_a_layer_that_stays_reads_the_chunks_it_was_promised(product: da.Array) -> None:
    shapes = []

    def seen(block: np.ndarray) -> np.ndarray:
        shapes.append(block.shape)
        return block * 2

    doubled = product.map_blocks(seen, dtype="f8", meta=np.zeros((0, 0)))
    planned, whole = optimize(product, doubled @ a(16, 16), topology=Topology(workers=1))
    one, two = dask.compute(planned, whole)
    assert set(shapes) == {(4, 4)} and len(shapes) == 16
    assert planned.chunks == ((16,), (16,))
    np.testing.assert_array_equal(one, product.compute())
    np.testing.assert_array_equal(two, 2 * one @ a(16, 16).compute())


def test_an_array_of_which_nothing_is_planned_comes_back_itself() -> None:
    x = a(8, 8)[2:]
    assert optimize(x) is x
    y = a(8, 8).cumsum(axis=0)
    assert optimize(x, y) == (x, y)


def test_an_array_that_stays_beside_a_planned_one_comes_back_itself(product: da.Array) -> None:
    x = a(8, 8)[2:]
    kept, planned = optimize(x, product, topology=FOUR)
    assert kept is x
    assert planned.name != product.name
    np.testing.assert_array_equal(kept.compute(), x.compute())


def test_optimize_keeps_what_a_slice_needs(product: da.Array) -> None:
    sliced = product[3:5]
    found = optimize(sliced, topology=FOUR)
    np.testing.assert_array_equal(found.compute(), sliced.compute())


@pytest.mark.parametrize("wrong", [np.ones(3), 3, "x"])
def test_optimize_refuses_what_is_no_dask_array(wrong: Any, product: da.Array) -> None:
    with pytest.raises(TypeError, match=f"optimize takes Dask arrays, but was given {type(wrong).__name__}"):
        optimize(product, wrong)


# the command


SCRIPT = """
import dask.array as da
x = da.ones((64, 64), chunks=16)
result = x @ x
other = result + 1
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_the_command_prints_the_plan_of_what_a_script_leaves(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dask_eindecomp", "explain", script, "--workers", "3"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "ij,jk->ik" in done.stdout
    assert "planned for 3 workers" in done.stdout


def test_the_command_takes_another_variable_and_prints_json(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", script, "--variable", "other", "--json", "--workers", "2"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["workers"] == 2
    assert record["choices"][-1]["einsum"].startswith("add")


def test_the_command_says_which_variable_is_missing(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", script, "--variable", "answer"]) == 2
    error = capsys.readouterr().err
    assert "'answer'" in error and "--variable" in error


@pytest.mark.parametrize(
    "arguments", [["explain"], [], ["dance"], ["explain", "x.py", "--worker-count", "3"]]
)
def test_the_command_refuses_arguments_it_does_not_know(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_path_inside_the_blocks_is_priced_as_what_it_does() -> None:
    x = da.ones((800, 800), chunks=200)
    topology = Topology(workers=4)
    loop, path = (
        explain(da.einsum("ab,bc,cd->ad", x, x, x, optimize=optimised), topology=topology)
        for optimised in (False, True)
    )
    assert loop.baseline.flops >= 800**4
    # of a block's two products one is computed anew for each of 4 parts of the label it lacks
    assert 2 * 4 * 800**3 <= path.baseline.flops < 1.01 * 2 * 4 * 800**3
    assert path.baseline_seconds < loop.baseline_seconds / 20


def test_calibrate_gives_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from dask_eindecomp import calibrate, calibration

    asked = []
    found = Topology(workers=3, flops=5.0)
    monkeypatch.setattr(
        calibration, "calibration", lambda *args: asked.append(args) or SimpleNamespace(topology=found)
    )
    assert calibrate("client", repeats=2) is found
    assert asked == [("client", 2)]
