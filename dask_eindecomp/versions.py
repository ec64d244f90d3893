"""Which versions of Dask are tested: layers are known by Dask's own functions, which may change in the next."""

from __future__ import annotations

import logging
import re
import warnings
from functools import cache

import dask

__all__ = ["NEWEST", "warn_if_untested"]

logger = logging.getLogger("dask_eindecomp")

NEWEST = "2026.8"
"""The newest Dask that the tests pass with; any patch of it is as good."""


def warn_if_untested() -> None:
    """Warn, once in a process, if the installed Dask is newer than any that is tested.

    It is logged where warnings are errors: nothing fails for it.
    """
    _warn(dask.__version__)


@cache
def _warn(version: str) -> None:
    if _release(version) <= _release(NEWEST):
        return
    text = (
        f"Dask {version} is newer than {NEWEST}, the newest that dask_eindecomp is tested with; layers that it does not "
        f"recognise are left to Dask, so that less may be planned than with {NEWEST}"
    )
    try:
        warnings.warn(text, stacklevel=3)
    except UserWarning:
        logger.warning(text)


def _release(version: str) -> tuple[int, ...]:
    """Year and month of a version of Dask; nothing if it says none, as in a copy without its history.

    >>> _release("2026.8.1"), _release("2026.10.0+3.g1a2b3c4"), _release("unknown")
    ((2026, 8), (2026, 10), ())
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
