"""What every test runs under: planning errors are raised, and hypothesis has no deadline."""

from __future__ import annotations

import os
from collections.abc import Iterator

import dask
import pytest
from hypothesis import HealthCheck, settings

from dask_eindecomp import hook

# CI draws the same examples each time, so that a red run is about the change; elsewhere they are new in every run.
quiet = [HealthCheck.too_slow]
settings.register_profile("ci", deadline=None, suppress_health_check=quiet, derandomize=True, database=None)
settings.register_profile("dev", deadline=None, suppress_health_check=quiet)
settings.register_profile(
    "nightly", deadline=None, suppress_health_check=quiet, max_examples=20_000, database=None
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Planning errors are errors of the test, and no plan of another test is remembered."""
    hook.PLANS.clear()
    # a busy machine is no reason to fail
    with dask.config.set({"eindecomp.strict": True, "eindecomp.planning-timeout": 60.0}):
        yield
