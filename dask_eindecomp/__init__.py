"""Plan Dask array graphs by EinDecomp: the best chunks for every contraction, chosen over the whole graph."""

import warnings as _warnings

from dask_eindecomp.api import calibrate, einsum, explain, measure, optimize, register
from dask_eindecomp.expression import Aggregate
from dask_eindecomp.hook import EinDecomp, QueryPlanningError, eindecomp
from dask_eindecomp.hook import refuse_query_planning as _refuse_query_planning
from dask_eindecomp.plan import Plan
from dask_eindecomp.topology import Topology

__all__ = [
    "Aggregate",
    "EinDecomp",
    "Plan",
    "Topology",
    "calibrate",
    "eindecomp",
    "einsum",
    "explain",
    "measure",
    "optimize",
    "register",
]

try:
    _refuse_query_planning()
except QueryPlanningError as _error:
    _warnings.warn(str(_error), stacklevel=2)

__version__ = "0.1.0"
