"""A Dask cluster as users have it: scheduler and workers are processes of their own.

``LocalCluster`` shares one process and one configuration with the client, and so hides whatever does not travel.
Here only the client knows the configuration of the test.

    client (the test) ──graph──▶ dask scheduler ──tasks──▶ dask worker
                                                      └──▶ dask worker ...
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["cluster"]

ROOT = Path(__file__).parents[1]
START = 60.0
"""Seconds in which a process must be up."""
WORKER = "--memory-limit 2GiB --death-timeout 60"
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
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, command: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "dask", *command.split(), "--scheduler-file", str(file)],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        processes.append(process)

    try:
        start("scheduler", "scheduler --host 127.0.0.1 --port 0 --no-dashboard")
        address = _address(file, processes[0], folder / "scheduler.log")
        for number in range(workers):
            name = f"worker-{number}"
            start(
                name, f"worker --host 127.0.0.1 --nthreads 1 --no-nanny --no-dashboard {WORKER} --name {name}"
            )
        yield address
    finally:
        _end(processes)


def _environment(folder: Path, lacking: str | None) -> dict[str, str]:
    """This process' environment without what configures Dask."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
    path = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    if lacking is not None:
        blocker = folder / "lacking"
        blocker.mkdir()
        (blocker / "sitecustomize.py").write_text(BLOCKER.format(package=lacking))
        path.insert(0, str(blocker))
    own = {"PYTHONPATH": os.pathsep.join(path), "DASK_TEMPORARY_DIRECTORY": str(folder)}
    return kept | dict.fromkeys(ONE_THREAD, "1") | own


def _address(file: Path, scheduler: subprocess.Popen[bytes], log: Path) -> str:
    """What the scheduler says of itself once it is up."""
    until = time.monotonic() + START
    while scheduler.poll() is None and time.monotonic() < until:
        # it may still be writing
        with suppress(FileNotFoundError, json.JSONDecodeError):
            return str(json.loads(file.read_text())["address"])
        time.sleep(0.05)
    raise RuntimeError(f"no scheduler in {START:g} s, exit status {scheduler.poll()}:\n{log.read_text()}")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the last started first, and whatever does not end by itself."""
    for process in reversed(processes):
        process.terminate()
    for process in reversed(processes):
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
