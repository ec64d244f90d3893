"""Plan Dask array graphs by EinDecomp: the best chunks for every contraction, chosen over the whole graph."""

from dask_eindecomp.api import explain, optimize
from dask_eindecomp.expression import Aggregate
from dask_eindecomp.hook import EinDecomp, eindecomp
from dask_eindecomp.plan import Plan
from dask_eindecomp.topology import Topology

__all__ = ["Aggregate", "EinDecomp", "Plan", "Topology", "eindecomp", "explain", "optimize"]

__version__ = "0.1.0"
