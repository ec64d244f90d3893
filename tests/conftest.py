"""What every test runs under: planning errors are raised, and hypothesis has no deadline."""

from __future__ import annotations

from collections.abc import Iterator

import dask
import pytest
from hypothesis import HealthCheck, settings

import dask_eindecomp  # noqa: F401  # sets the defaults of its configuration

settings.register_profile("ci", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Planning errors are errors of the test."""
    with dask.config.set({"eindecomp.strict": True}):
        yield
