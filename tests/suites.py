"""Other people's test suites under the hook: which tests pass plainly and fail when every plan is applied.

``python -m tests.suites dask`` runs the array tests that come with the installed dask, ``xarray`` xarray's own of Dask
arrays.  Only tests that fail with the hook are run again without it.  Exits with 1 if any of these passes then, or if
so little was planned that the run says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SUITES = {"dask": ("dask.array.tests", "test_*.py", 1000), "xarray": ("xarray.tests", "test_dask.py", 50)}
"""Package, its test files, and how many graphs must have been planned for the run to say something."""
INSPECTING: dict[str, str] = {}
"""Tests that look at the raw graph or at how it is optimised, each with what it wants of it."""


def test_files(suite: str) -> list[Path]:
    """The files of a suite."""
    package, pattern, _ = SUITES[suite]
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


def started(tests: Sequence[str], forced: bool, report: Path, folder: Path) -> subprocess.Popen[bytes]:
    """A pytest process that runs some tests and reports to a file."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "EINDECOMP_REPORT": str(report),
        "EINDECOMP_FORCED": "1" if forced else "",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.forced",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
    ]
    command += ["--rootdir", str(folder), "--timeout", "300", *tests]
    log = (folder / f"{report.stem}.log").open("wb")
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)


def outcomes(groups: Sequence[Sequence[str]], forced: bool, folder: Path) -> Iterator[dict[str, Any]]:
    """What groups of tests report, each run by a process of its own."""
    reports = [folder / f"{'forced' if forced else 'plain'}-{number}.json" for number in range(len(groups))]
    running = [started(tests, forced, report, folder) for tests, report in zip(groups, reports)]
    for process, report in zip(running, reports):
        process.wait()
        if not report.exists():
            raise SystemExit(
                f"pytest ended with {process.returncode}:\n{report.with_suffix('.log').read_text()[-3000:]}"
            )
        yield json.loads(report.read_text())


def main() -> int:
    """Run a suite and print what fails because of the hook."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--files", nargs="+", help="only these files of the suite")
    options = parser.parse_args()
    files = [file for file in test_files(options.suite) if not options.files or file.name in options.files]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        groups = [[str(file) for file in group] for group in shares(files, options.processes)]
        reports = list(outcomes(groups, True, folder))
        found = {test: outcome for report in reports for test, outcome in report["outcomes"].items()}
        failed = sorted(test for test, outcome in found.items() if outcome == "failed")
        again: dict[str, str] = {}
        if failed:
            # identifiers are relative to the temporary folder
            (plain,) = outcomes(
                [
                    [
                        str((folder / test.partition("::")[0]).resolve()) + "::" + test.partition("::")[2]
                        for test in failed
                    ]
                ],
                False,
                folder,
            )
            again = plain["outcomes"]
    planned = sum(report["counts"].get("planned", 0) for report in reports)
    graphs = sum(report["counts"].get("graphs", 0) for report in reports)
    fresh = [test for test in failed if again.get(test) == "passed"]
    news = [test for test in fresh if test.rpartition("/")[2] not in INSPECTING]
    print(f"{options.suite}: {len(found):,} tests, {planned:,} of {graphs:,} graphs planned")
    print(f"{len(failed)} fail with the hook, {len(failed) - len(fresh)} of them without it, too")
    for test in fresh:
        name = test.rpartition("/")[2]
        print(
            f"{'fails' if test in news else 'looks'}: {name}"
            + (f": {INSPECTING[name]}" if name in INSPECTING else "")
        )
    wanted = 0 if options.files else SUITES[options.suite][2]
    if planned < wanted:
        print(f"only {planned} graphs were planned; expected {wanted} or more")
    return int(bool(news) or planned < wanted)


if __name__ == "__main__":
    sys.exit(main())
