"""A Dask newer than any tested is told to the user once, and nothing fails for it."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

from dask_eindecomp import EinDecomp, Topology, explain, versions

PLANNED = EinDecomp(force=True, topology=Topology(workers=2))
TEXT = r"Dask 9999\.1\.0 is newer than {}, .* left to Dask".format(versions.NEWEST.replace(".", r"\."))
X = np.arange(16.0).reshape(4, 4)


@pytest.fixture(autouse=True)
def first() -> Iterator[None]:
    """This process has not warned yet."""
    versions._warn.cache_clear()
    yield
    versions._warn.cache_clear()


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask, "__version__", "9999.1.0")


def product() -> da.Array:
    a = da.from_array(X, chunks=2)
    return a @ a


def computed() -> Any:
    with dask.config.set(array_optimize=PLANNED, scheduler="synchronous"):
        return product().compute()


@pytest.mark.parametrize(
    "use",
    [computed, lambda: explain(product(), hook=PLANNED), lambda: pickle.dumps(PLANNED)],
    ids=["the hook", "explain", "sent to a scheduler"],
)
def test_a_newer_dask_is_told_once_with_both_versions(untested: None, use: Any) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        use()
        (one,) = told
        computed()
    assert told == [one]
    assert one.category is UserWarning
    with pytest.raises(UserWarning, match=TEXT):
        raise one.message if isinstance(one.message, Warning) else AssertionError(one)


def test_a_graph_that_is_not_planned_is_no_reason_to_warn(untested: None) -> None:
    a = da.from_array(X, chunks=2)
    with (
        warnings.catch_warnings(),
        dask.config.set(array_optimize=EinDecomp(topology=Topology(workers=2)), scheduler="synchronous"),
    ):
        warnings.simplefilter("error")
        np.testing.assert_array_equal((a + 1).compute(), X + 1)
    assert not versions._warn.cache_info().currsize


def test_nothing_fails_where_warnings_are_errors(untested: None, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "dask_eindecomp"):
        warnings.simplefilter("error")
        for _ in range(2):
            np.testing.assert_allclose(computed(), X @ X)
    (record,) = caplog.records
    assert record.getMessage().startswith("Dask 9999.1.0 is newer than")


@pytest.mark.parametrize(
    "version", ["2025.4.0", f"{versions.NEWEST}.0", f"{versions.NEWEST}.9+4.gabc", "unknown"]
)
def test_any_other_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr(dask, "__version__", version)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        computed()
    assert not told and not caplog.records and versions._warn.cache_info().currsize == 1


@pytest.mark.parametrize("version", ["2026.9.0", "2026.10.0", "2027.1.0", "2026.9.0+1.gabc"])
def test_months_are_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr(versions, "NEWEST", "2026.8")
    monkeypatch.setattr(dask, "__version__", version)
    with pytest.warns(UserWarning, match="is newer than 2026.8"):
        versions.warn_if_untested()
