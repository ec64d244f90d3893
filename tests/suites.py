"""Other people's test suites under the hook: which tests pass plainly and fail when every plan is applied.

``python -m tests.suites dask`` runs the array tests that come with the installed dask, ``xarray`` xarray's own of Dask
arrays.  ``flox --folder FOLDER`` runs those of flox, which come with its sources alone: its folder of tests under
another name, for ours is called so.  Tests that fail with the hook are run again without it, and what passes then once
more with it.  Exits with 1 if anything fails with it twice and not without it, or if so little was planned that the run
says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUITES = {
    "dask": ("dask.array.tests", "test_*.py", 1000),
    "xarray": ("xarray.tests", "test_dask.py", 50),
    "flox": ("flox", "test_*.py", 100),
}
"""Package, its test files, and how many graphs must have been planned for the run to say something."""
INSPECTING: dict[str, str] = {
    "test_creation.py::test_creation_data_producers": "wants aliases for inputs, which a plan reads as they are",
    "test_optimization.py::test_fuse_getter_with_asarray[10]": "counts the tasks of Dask's own fusion",
    "test_optimization.py::test_fuse_roots": "counts the tasks of Dask's own fusion",
    "test_xarray.py::test_xarray_blockwise_fusion_store[False]": "counts the tasks of Dask's own fusion",
    "test_xarray.py::test_xarray_blockwise_fusion_store[True]": "counts the tasks of Dask's own fusion",
    "test_dask.py::test_graph_manipulation": "clones a rechunk, which plain Dask computes only beside the original",
}
"""Tests that look at the raw graph or rest on how it is optimised, each with what it wants of it."""


def test_files(suite: str, folder: Path | None) -> list[Path]:
    """The files of a suite, in a folder or where its package keeps them."""
    package, pattern, _ = SUITES[suite]
    if folder is not None:
        return sorted(folder.absolute().glob(pattern))
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed; expected it beside dask_eindecomp")
    return sorted(Path(spec.submodule_search_locations[0]).glob(pattern))


def shares(files: Sequence[Path], processes: int) -> list[list[Path]]:
    """The files in so many groups, about equally long."""
    groups: list[list[Path]] = [[] for _ in range(processes)]
    for file in sorted(files, key=lambda one: -one.stat().st_size):
        min(groups, key=lambda group: sum(one.stat().st_size for one in group)).append(file)
    return [group for group in groups if group]


def started(
    tests: Sequence[str], forced: bool, report: Path, root: Path, select: str
) -> subprocess.Popen[bytes]:
    """A pytest process that runs some tests of a folder and reports to a file, its output beside that."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "EINDECOMP_REPORT": str(report),
        "EINDECOMP_FORCED": "1" if forced else "",
    }
    options = [
        "-q",
        "-p",
        "tests.forced",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--timeout",
        "300",
        "-k",
        select,
    ]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(root), *tests]
    with report.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT)


def reported(
    groups: Sequence[Sequence[str]], forced: bool, root: Path, select: str = ""
) -> tuple[dict[str, str], Counter[str]]:
    """Outcomes by test, and counts, of groups of tests that each run in a process of its own."""
    outcomes: dict[str, str] = {}
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{number}.json" for number in range(len(groups))]
        running = [started(tests, forced, report, root, select) for tests, report in zip(groups, reports)]
        for process, report in zip(running, reports):
            process.wait()
            if not report.exists() or process.returncode not in (0, 1):  # some tests may fail
                output = report.with_suffix(".log").read_text()[-3000:]
                raise SystemExit(f"pytest ended with {process.returncode}:\n{output}")
            read = json.loads(report.read_text())
            outcomes |= read["outcomes"]
            counts.update(read["counts"])
    return outcomes, counts


def main() -> int:
    """Run a suite and print what fails because of the hook."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--files", nargs="+", help="only these files of the suite")
    parser.add_argument(
        "--select", default="", help="only tests whose names fit this expression of pytest's -k"
    )
    parser.add_argument("--folder", type=Path, help="where the suite's tests are, if not in its package")
    options = parser.parse_args()
    every = test_files(options.suite, options.folder)
    files = [file for file in every if not options.files or file.name in options.files]
    if not files:
        raise SystemExit(f"found no tests of {options.suite}; expected files {SUITES[options.suite][1]}")
    root = files[0].parent
    found, counts = reported(
        [[file.name for file in group] for group in shares(files, options.processes)],
        True,
        root,
        options.select,
    )
    failed = sorted(test for test, outcome in found.items() if outcome == "failed")
    plain, _ = reported([failed], False, root) if failed else ({}, None)
    suspects = [test for test in failed if plain.get(test) != "failed" and test not in INSPECTING]
    again, _ = reported([suspects], True, root) if suspects else ({}, None)
    print(
        f"{options.suite}: {len(found):,} tests, {counts['planned']:,} of {counts['graphs']:,} graphs planned"
    )
    new = 0
    for test in failed:
        said = INSPECTING.get(test, "fails without the hook, too")
        if test in suspects:
            # some tests draw at random, and a busy machine is no reason to fail
            repeats = again.get(test) == "failed"
            new += repeats
            said = "NEW" if repeats else "passes with the hook, too, when it is run again"
        print(f"fails: {test}: {said}")
    wanted = 0 if options.files or options.select else SUITES[options.suite][2]
    if counts["planned"] < wanted:
        print(f"only {counts['planned']} graphs were planned; expected {wanted} or more")
    print(f"{new} new failures")
    return int(bool(new) or counts["planned"] < wanted)


if __name__ == "__main__":
    sys.exit(main())
