"""A pytest plugin: every test runs with the hook applying each plan, for four workers, if asked to.

Environment: ``EINDECOMP_REPORT`` names the file for outcomes and counts; ``EINDECOMP_FORCED`` turns the hook on.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import dask
import pytest

from dask_eindecomp import EinDecomp, Topology

OUTCOMES: dict[str, str] = {}
COUNTS: Counter[str] = Counter()
MACHINES = Topology(workers=4)


class Counted(EinDecomp):
    """The hook, which counts what it was called for, and what it planned."""

    def _rewrite(self, dsk: Any, keys: Any) -> Any:
        COUNTS["graphs"] += 1
        found = super()._rewrite(dsk, keys)
        COUNTS["planned"] += found is not None
        return found


def pytest_configure(config: pytest.Config) -> None:
    """Set the hook."""
    if os.environ.get("EINDECOMP_FORCED"):
        hook = Counted(force=True, topology=MACHINES, strict=True, planning_timeout=60.0)
        dask.config.set(array_optimize=hook)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the outcome of a test, the worst of its phases."""
    if report.when == "call" or report.failed or (report.when == "setup" and report.skipped):
        before = OUTCOMES.get(report.nodeid)
        OUTCOMES[report.nodeid] = before if before == "failed" else report.outcome


def pytest_sessionfinish() -> None:
    """Write outcomes and counts down."""
    report = {"outcomes": OUTCOMES, "counts": COUNTS}
    Path(os.environ["EINDECOMP_REPORT"]).write_text(json.dumps(report))
