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

__all__ = ["Machines", "cluster", "machines"]

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


class Machines:
    """A scheduler on loopback and its workers; all they write is in a folder."""

    def __init__(self, folder: Path, lacking: str | None = None, preload: str = "") -> None:
        self.folder, self.environment = folder, _environment(folder, lacking)
        self.file = folder / "scheduler.json"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        options = f" --preload {preload}" if preload else ""
        self._start("scheduler", f"scheduler --host 127.0.0.1 --port 0 --no-dashboard{options}")
        try:
            self.address = _address(self.file, self.processes["scheduler"], folder / "scheduler.log")
        except RuntimeError:
            self.end()
            raise

    def add_worker(self, threads: int = 1, memory: str = "2GiB") -> str:
        """Start another worker; its name."""
        name = f"worker-{len(self.processes) - 1}"
        options = f"--nthreads {threads} --memory-limit {memory} --death-timeout 60"
        self._start(name, f"worker --host 127.0.0.1 --no-nanny --no-dashboard {options} --name {name}")
        return name

    def kill(self, name: str) -> None:
        """End a worker at once, as a machine that loses power does."""
        self.processes[name].kill()
        self.processes[name].wait()

    def end(self) -> None:
        """End all processes."""
        _end(list(self.processes.values()))

    def _start(self, name: str, command: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "dask", *command.split(), "--scheduler-file", str(self.file)],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


@contextmanager
def machines(folder: Path, lacking: str | None = None, preload: str = "") -> Iterator[Machines]:
    """A scheduler that has no worker yet; all processes end with the block, whatever happens in it.

    Parameters
    ----------
    folder
        An empty folder.
    lacking
        A package that no process can import.
    preload
        A module that the scheduler loads at its start.
    """
    mine = Machines(folder, lacking, preload)
    try:
        yield mine
    finally:
        mine.end()


@contextmanager
def cluster(folder: Path, workers: int = 3, lacking: str | None = None) -> Iterator[str]:
    """Address of a scheduler on loopback with so many workers of one thread each."""
    with machines(folder, lacking) as mine:
        for _ in range(workers):
            mine.add_worker()
        yield mine.address


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
