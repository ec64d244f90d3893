"""A Dask cluster as users have it: scheduler and workers are processes of their own.

``LocalCluster`` shares one process and one configuration with the client, and so hides whatever does not travel.
Here only the client knows the configuration of the test.

    client (the test) ──graph──▶ dask scheduler ──tasks──▶ dask worker
                                                      └──▶ dask worker ...
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["cluster"]

ROOT = Path(__file__).parents[1]
START = 60.0
"""Seconds in which a process must be up."""
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
BLOCKER = '''
import sys


class Lacking:
    """Finds nothing where {package} is."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Lacking())
'''
"""Run by every Python that has its folder on PYTHONPATH, as ``sitecustomize``."""


@contextmanager
def cluster(folder: Path, workers: int = 3, lacking: str | None = None) -> Iterator[str]:
    """Address of a scheduler on loopback with so many workers of one thread each.

    Everything the processes write is in ``folder``.  They end with the block, whatever happens in it.

    Parameters
    ----------
    folder
        An empty folder.
    workers
        How many.
    lacking
        A package that none of them can import.
    """
    environment = _environment(folder, lacking)
    file = folder / "scheduler.json"
    with ExitStack() as stack:
        scheduler = stack.enter_context(
            _process(
                folder / "scheduler.log",
                environment,
                ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
                + ["--scheduler-file", str(file)],
            )
        )
        _wait_for(file, scheduler, folder / "scheduler.log")
        for number in range(workers):
            stack.enter_context(
                _process(
                    folder / f"worker-{number}.log",
                    environment,
                    ["worker", "--host", "127.0.0.1", "--nthreads", "1", "--no-nanny", "--no-dashboard"]
                    + ["--name", f"worker-{number}", "--memory-limit", "2 GiB", "--death-timeout", "60"]
                    + ["--local-directory", str(folder), "--scheduler-file", str(file)],
                )
            )
        yield _address(file)


def _environment(folder: Path, lacking: str | None) -> dict[str, str]:
    """This process' environment without what configures Dask."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
    path = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    if lacking is not None:
        blocker = folder / "lacking"
        blocker.mkdir()
        (blocker / "sitecustomize.py").write_text(BLOCKER.format(package=lacking))
        path.insert(0, str(blocker))
    return kept | dict.fromkeys(ONE_THREAD, "1") | {"PYTHONPATH": os.pathsep.join(path)}


@contextmanager
def _process(log: Path, environment: dict[str, str], command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A ``dask`` command that runs until the block ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(file: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START
    while not file.exists() or not file.stat().st_size:
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(
                f"no scheduler after {START:g} s (exit status {process.poll()}):\n{log.read_text()}"
            )
        time.sleep(0.05)


def _address(file: Path) -> str:
    """What the scheduler says of itself; its file may still be being written."""
    import json

    for _ in range(100):
        try:
            return str(json.loads(file.read_text())["address"])
        except json.JSONDecodeError:
            time.sleep(0.05)
    raise RuntimeError(f"no address in {file.read_text()!r}")
