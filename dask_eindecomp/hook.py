"""The hook: what Dask calls to optimise a graph of arrays.

``EinDecomp`` lifts, contracts, decomposes and lowers.  With a distributed client it is unpickled and called in the
scheduler's process, where the client's configuration is not set: so what it needs of the configuration is read when
it is pickled and travels inside it, and the workers are looked up where it is called.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

import dask
from dask._task_spec import GraphNode
from dask.array.optimization import optimize as dask_optimize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer

from dask_eindecomp.annotations import AnnotationError, has_wishes, without_wishes
from dask_eindecomp.cache import Plans
from dask_eindecomp.config import setting
from dask_eindecomp.contract import contract, pairwise_flops
from dask_eindecomp.cost import Traffic
from dask_eindecomp.decompose import BudgetError, PlanningTimeout, decompose
from dask_eindecomp.estimate import price
from dask_eindecomp.gathering import gathered, regathered, without
from dask_eindecomp.graph import EinGraph
from dask_eindecomp.lift import ARRAY_TYPES, Lifted, ShapeError, holds_contraction, lift
from dask_eindecomp.lower import digest, lower
from dask_eindecomp.machines import find_topology, home_address, keeps_tiles, owned, scheduler_here
from dask_eindecomp.partition import Chunks, Partition
from dask_eindecomp.place import place
from dask_eindecomp.plan import Plan
from dask_eindecomp.splice import fused_blockwise, splice, taken_over
from dask_eindecomp.topology import Topology
from dask_eindecomp.versions import warn_if_untested

__all__ = ["EinDecomp", "eindecomp"]

logger = logging.getLogger("dask_eindecomp")
PLANS = Plans()


@dataclass(frozen=True)
class EinDecomp:
    """An optimiser for ``dask.config.set(array_optimize=...)`` that plans contractions.

    Frozen, hashable and picklable; equal ones share a call.

    Examples
    --------
    >>> import dask, dask.array as da
    >>> x = da.ones((8, 8), chunks=4)
    >>> with dask.config.set(array_optimize=EinDecomp(force=True)):
    ...     float((x @ x).sum().compute(scheduler="synchronous"))
    512.0
    """

    topology: Topology | None = None
    """The machines; None to find them when called."""
    objective: str = "seconds"
    """``"seconds"``, ``"bytes"`` or ``"paper"``."""
    force: bool = False
    """Apply every plan, cheaper or not."""
    reassociate: bool = False
    """Order chains of products anew where that takes less work; rounding may then differ."""
    memory_limit: int | None = None
    """Bytes that one worker may hold at a time; None for 0.6 of its memory."""
    max_block_bytes: int | None = None
    """Bytes of the largest block of a planned array; None for ``eindecomp.max-block-bytes``."""
    max_tasks: int | None = None
    """Dask tasks of a plan; None for ``eindecomp.max-tasks``."""
    planning_timeout: float | None = None
    """Seconds that planning may take; None for ``eindecomp.planning-timeout``."""
    margin: float | None = None
    """Share by which a plan must be cheaper than the graph as it came; None for ``eindecomp.margin``."""
    strict: bool | None = None
    """Raise when planning fails; None for ``eindecomp.strict``."""
    array_types: frozenset[str] = ARRAY_TYPES
    """Qualified names of the block types that are planned."""
    measured: Topology | None = field(default=None, compare=False, repr=False)
    """Figures of the file ``eindecomp.topology``; set when it is pickled."""
    home: str | None = field(default=None, compare=False, repr=False)
    """Address of the scheduler it was sent to; set when it is pickled."""

    def __post_init__(self) -> None:
        if self.objective not in ("seconds", "bytes", "paper"):
            raise ValueError(f"unknown objective {self.objective!r}; expected seconds, bytes or paper")
        if self.topology is not None and not isinstance(self.topology, Topology):
            raise TypeError(f"topology is {self.topology!r}; expected a Topology or None")

    def __reduce__(self) -> tuple[Any, ...]:
        warn_if_untested()  # here the user sees it, and not in a scheduler's log alone
        settled = replace(
            self,
            max_block_bytes=setting("max-block-bytes", self.max_block_bytes),
            max_tasks=setting("max-tasks", self.max_tasks),
            planning_timeout=setting("planning-timeout", self.planning_timeout),
            margin=setting("margin", self.margin),
            strict=setting("strict", self.strict),
            measured=self._measured(),
            home=self.home or home_address(),
        )
        return EinDecomp, tuple(getattr(settled, item.name) for item in fields(self))

    def __call__(self, dsk: Any, keys: Any, **kwargs: Any) -> Any:
        """The graph, planned where that is worth it, else as Dask's own optimiser gives it."""
        if isinstance(dsk, HighLevelGraph) and (self.force or holds_contraction(dsk) or has_wishes(dsk)):
            try:
                with OTHERS.come_first():
                    planned = self._rewrite(dsk, keys)
            except (ShapeError, AnnotationError):
                raise
            except Exception as error:
                if setting("strict", self.strict):
                    raise
                _log_once(error)
                planned = None
            if planned is not None:
                return planned
        if isinstance(dsk, HighLevelGraph):
            dsk = without_wishes(dsk)
        if isinstance(dsk, HighLevelGraph) and any(layer.annotations for layer in dsk.layers.values()):
            wanted = [*flatten(keys, container=(list, set))]
            return fused_blockwise(dsk, wanted).cull(set(wanted))
        return dask_optimize(dsk, keys, **kwargs)

    def plan(
        self, dsk: HighLevelGraph, keys: Any, free: frozenset[str] = frozenset()
    ) -> tuple[Lifted, EinGraph, Plan]:
        """Lift and plan without running: what was lifted, the binary graph, the plan with its verdict.

        Arrays named in ``free`` need not keep their chunks; they leave under another name.
        """
        warn_if_untested()
        topology = self.topology or find_topology(self.home, self._measured())
        lifted = lift(dsk, keys, self.array_types)
        lifted = replace(lifted, graph=owned(lifted.graph, topology, self.home))
        if free:
            lifted = replace(lifted, graph=_freed(dsk, lifted, free))
        graph = contract(lifted.graph, self.reassociate)
        limits = self._limits()
        timeout = setting("planning-timeout", self.planning_timeout)

        def make() -> Plan:
            as_it_came = _as_it_came(lifted.graph, topology)
            try:
                plan = decompose(
                    graph, objective=self.objective, topology=topology, timeout=timeout, **limits
                )
            except BudgetError as error:
                plan = replace(as_it_came, refused=str(error))
            return replace(plan, baseline=as_it_came.traffic, baseline_seconds=as_it_came.seconds)

        try:
            settings = (topology, self.objective, self.reassociate, *limits.values())
            plan = PLANS.plan(lifted.graph, graph, settings, make)
        except PlanningTimeout:
            as_it_came = _as_it_came(lifted.graph, topology)
            late = f"planning took more than {timeout:g} s; expected less, or a larger planning-timeout"
            plan = replace(
                as_it_came, refused=late, baseline=as_it_came.traffic, baseline_seconds=as_it_came.seconds
            )
        return lifted, graph, replace(plan, verdict=self._verdict(lifted, plan))

    def _measured(self) -> Topology | None:
        """Figures of the machines from the file that ``eindecomp.topology`` names."""
        path = setting("topology")
        return Topology.load(path) if self.measured is None and path else self.measured

    def _limits(self) -> dict[str, Any]:
        """What the user allows a plan; None where nothing is said."""
        return {
            "memory_limit": self.memory_limit,
            "max_block_bytes": setting("max-block-bytes", self.max_block_bytes),
            "max_tasks": setting("max-tasks", self.max_tasks),
        }

    def _verdict(self, lifted: Lifted, plan: Plan) -> str:
        margin = setting("margin", self.margin)
        if not lifted.graph.nodes:
            return "nothing to plan: the graph runs as it came"
        if plan.refused:
            return f"left to Dask: {plan.refused}"
        if self.force:
            return "applied: forced"
        if any(node.pinned for node in lifted.graph.nodes.values()):
            return "applied: cuts are fixed by hand"
        if not lifted.contracts:
            return "left to Dask: no expression joins and aggregates"
        assert plan.baseline is not None and plan.baseline_seconds is not None
        if beyond := _beyond(lifted.graph, plan.baseline, **self._limits()):
            return f"applied: as it came, {beyond}"
        more = plan.traffic.nbytes > plan.baseline.nbytes
        wanted = max(margin, DEARER) if more else margin
        if plan.seconds > (1 - wanted) * plan.baseline_seconds:
            ships = "ships more than the graph as it came, and " if more else ""
            return f"left to Dask: {ships}not {wanted:.0%} cheaper than {'it' if more else 'the graph as it came'}"
        return (
            f"applied: about {plan.baseline_seconds / plan.seconds:.1f} times as fast as the graph as it came"
        )

    def _rewrite(self, dsk: HighLevelGraph, keys: Any) -> HighLevelGraph | None:
        """The graph with its planned part lowered; None where Dask's own optimiser does as well."""
        every = [*flatten(keys, container=(list, set))]
        ends = gathered(dsk, every)
        rest = [key for key in every if key not in ends]
        blocks = [key for array in ends.values() for key in array]
        inner = without(dsk, ends) if ends else dsk
        # what is wanted block by block, too, keeps its blocks
        free = frozenset(key[0] for key in blocks) - {key[0] for key in rest if isinstance(key, tuple)}
        lifted, graph, plan = self.plan(inner, [*rest, *blocks], free)
        if not plan.verdict.startswith("applied"):
            return None
        found = {
            output.name.removeprefix(FREE): output.source for output in graph.outputs if output.chunks is None
        }
        rest += [key for key in blocks if key[0] not in found]
        # nobody sees the blocks, which so keep the names that say what was done
        outputs = (replace(one, name="") if one.chunks is None else one for one in graph.outputs)
        graph = replace(graph, outputs=tuple(outputs))
        gathering = {end: found.get(array[0][0], dsk.layers[end]) for end, array in ends.items()}
        return taken_over(apply(inner, rest, lifted, graph, plan, gathering), keys, _known(self.home))


DEARER = 0.2
"""Share by which a plan must be cheaper that ships more than the graph as it came: sending takes processors' time."""

eindecomp = EinDecomp()
"""The hook with default settings."""


def freed(graph: EinGraph, plan: Plan) -> tuple[EinGraph, dict[str, tuple[str, Chunks]]]:
    """The graph with a name for each array in free chunks that no other plan gives it, and that name and those chunks.

    The latter by the array's own name.
    """
    mark = digest(graph, plan.partitions)[:16]
    outputs, found = [], {}
    for output in graph.outputs:
        if output.chunks is None:
            node = graph.nodes[output.source]
            chunks = plan.partitions[node.name].grid(node.expression.output)
            name = output.name.removeprefix(FREE)
            output = replace(output, name=f"{output.name}-{mark}")
            found[name] = output.name, chunks
        outputs.append(output)
    return replace(graph, outputs=tuple(outputs)), found


def apply(
    dsk: HighLevelGraph,
    keys: Any,
    lifted: Lifted,
    graph: EinGraph,
    plan: Plan,
    gathering: Mapping[str, str | Layer] | None = None,
) -> HighLevelGraph:
    """A Dask graph that runs a plan; layers outside it go through Dask's own optimiser.

    ``gathering`` are keys of tasks to add that put a tensor of the graph together, or their layers as they came.
    """
    topology = plan.topology
    known = 1 < topology.workers == len(topology.addresses)
    placement = place(graph, plan.partitions, topology) if known else None
    lowered = lower(graph, plan.partitions, placement, topology)
    strict = known and keeps_tiles(topology)
    outputs = [output.name for output in graph.outputs if output.name]
    ends = {}
    for end, source in (gathering or {}).items():
        if isinstance(source, str):
            grid = plan.partitions[source].grid(graph.nodes[source].expression.output)
            task = regathered(end, lowered.names[source], tuple(map(len, grid)))
            ends[end] = MaterializedLayer({end: task})
        else:
            ends[end] = source
    workers = {key: topology.addresses[number] for key, number in lowered.workers.items()}
    return splice(
        without_wishes(dsk),
        keys,
        lifted.outside,
        lowered.layers,
        lowered.reads,
        outputs,
        lowered.token,
        workers,
        strict,
        ends,
        lowered.purposes if topology.addresses else None,
    )


def placed(graph: EinGraph, plan: Plan) -> Plan:
    """The plan with what its placement ships; as it is if it will not run or there is one worker."""
    if plan.refused or plan.topology.workers == 1:
        return plan
    return plan.placed(place(graph, plan.partitions, plan.topology))


def _known(home: str | None) -> Callable[[Any], Any]:
    """What the scheduler in whose process this runs knows of how a key is made; nothing elsewhere."""
    scheduler = scheduler_here(home)

    def task(key: Any) -> Any:
        known = None if scheduler is None else scheduler.tasks.get(key)
        return known.run_spec if known is not None and isinstance(known.run_spec, GraphNode) else None

    return task


FREE = "planned-"
"""What the name of an array in free chunks begins with."""


def _freed(dsk: HighLevelGraph, lifted: Lifted, free: frozenset[str]) -> EinGraph:
    """The lifted graph with the outputs named in any chunks; what layers outside read keeps name and chunks."""
    read = {name for layer in lifted.outside for name in dsk.dependencies[layer]}
    outputs = []
    for output in lifted.graph.outputs:
        computed = output.name in free and output.source in lifted.graph.nodes
        if computed:
            outputs.append(replace(output, name=f"{FREE}{output.name}", chunks=None))
        if not computed or output.name in read:
            outputs.append(output)
    return replace(lifted.graph, outputs=tuple(outputs))


def _as_it_came(graph: EinGraph, topology: Topology) -> Plan:
    """The graph with the cuts it came in, priced under the same model, Dask's kernels and task counts included."""
    came = replace(
        graph, nodes={name: replace(node, kernel=node.came_kernel) for name, node in graph.nodes.items()}
    )
    # those alike are one, so that the repeated layers of a model are priced once
    cuts = {node.came: Partition(node.came) for node in graph.nodes.values()}
    plan = price(came, {node.name: cuts[node.came] for node in graph.nodes.values()}, topology)
    choices = []
    for choice in plan.choices:
        node = came.nodes[choice.name]
        counted = choice.join.tasks + choice.aggregate.tasks
        seconds = choice.seconds + (node.tasks - counted) * topology.task_overhead
        join, combined = replace(choice.join, tasks=node.tasks), replace(choice.aggregate, tasks=0)
        if node.kernel == "blas":
            # with a path, Dask multiplies the operands of a block two at a time
            flops = pairwise_flops(node, choice.partition)
            work = (flops - join.flops, 0, choice.tiles, "blas", node.dtype)
            seconds += topology.compute_seconds(*work) - topology.compute_seconds(0, *work[1:])
            join = replace(join, flops=flops)
        choices.append(replace(choice, join=join, aggregate=combined, seconds=seconds))
    return replace(plan, choices=tuple(choices))


def _beyond(
    graph: EinGraph,
    came: Traffic,
    memory_limit: int | None,
    max_block_bytes: int | None,
    max_tasks: int | None,
) -> str:
    """Which limit the graph as it came does not keep; empty if it keeps them all."""
    block = max(
        prod(max(cut, default=0) for label, cut in node.came if label in node.expression.output)
        * graph.itemsize(node.name)
        for node in graph.nodes.values()
    )
    for name, limit, needed in (
        ("memory_limit", memory_limit, came.peak_nbytes),
        ("max-block-bytes", max_block_bytes, block),
        ("max-tasks", max_tasks, came.tasks),
    ):
        if limit is not None and needed > limit:
            return f"{needed:,} are beyond the {name} of {limit:,}"
    return ""


class _Others:
    """The other threads of this process, the event loop of a scheduler above all, which answers all its clients.

    Planning is Python that computes, and a thread that wants to go on waits for it each time it comes back from
    reading a socket; a full garbage collection stops every thread for as long as there are objects, 0.2 s where a graph
    has thousands of layers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planning = 0
        self._switch, self._collect = sys.getswitchinterval(), gc.get_threshold()

    @contextmanager
    def come_first(self) -> Iterator[None]:
        """They wait less, and full collections until later, from however many threads this is entered."""
        with self._lock:
            if not self._planning:
                self._switch, self._collect = sys.getswitchinterval(), gc.get_threshold()
                sys.setswitchinterval(min(self._switch, SWITCH))
                young, next_older = map(min, self._collect, COLLECT)
                gc.set_threshold(young, next_older, NEVER)
            self._planning += 1
        try:
            yield
        finally:
            with self._lock:
                self._planning -= 1
                if not self._planning:
                    sys.setswitchinterval(self._switch)
                    gc.set_threshold(*self._collect)


SWITCH = 1e-4
"""Seconds after which a thread that plans lets another go on."""
COLLECT = (700, 10)
"""Objects made before the youngest are collected, and collections of these before one of the next generation."""
NEVER = 1 << 30
"""Collections of that generation before a full one: more than there will be."""

OTHERS = _Others()

_logged: set[str] = set()


def _log_once(error: Exception) -> None:
    """Say once for each reason that planning failed and the graph runs as it came."""
    reason = f"{type(error).__name__}: {error}"
    if reason not in _logged:
        _logged.add(reason)
        logger.warning("planning failed, the graph runs as it came: %s", reason, exc_info=error)


class QueryPlanningError(RuntimeError):
    """Dask's array expressions are on: they have no graph to plan and never call the hook."""


def refuse_query_planning() -> None:
    """Say so if Dask's array expressions are on.

    Raises
    ------
    QueryPlanningError
        If the Dask setting ``array.query-planning`` is on.
    """
    if dask.config.get("array.query-planning", False):
        raise QueryPlanningError(
            "array.query-planning is True, so Dask never calls array_optimize and nothing is planned; expected False "
            "or None, set before dask.array is imported: dask.config.set({'array.query-planning': False})"
        )
