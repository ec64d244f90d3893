"""Settings under the Dask config key ``eindecomp``, read in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import yaml

__all__ = ["setting"]

DEFAULTS = yaml.safe_load((Path(__file__).parent / "eindecomp.yaml").read_text())

dask.config.update_defaults(DEFAULTS)


def setting(name: str, override: Any = None) -> Any:
    """The value given, else that of the Dask configuration."""
    return dask.config.get(f"eindecomp.{name}") if override is None else override
