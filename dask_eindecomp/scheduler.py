"""The scheduler's side of a placement: tiles stay on their workers as long as these can run them.

With this plugin tasks are restricted to their workers strictly, so that work stealing leaves them alone and the bytes a
plan predicts are those that move.  A worker may be lost, retired or paused meanwhile; its tasks are then set free, so
that nothing waits for it::

    placed ──▶ its worker runs ──▶ done
                  │ is gone, leaves or pauses
                  ▼
               any worker

Dask drops copies every two seconds of which it thinks there are too many, by how many tasks wait for them and not where
these will run.  What a plan shipped would be shipped again; copies on workers whose tasks are still to come stay.

Where a key that a plan made still lives and comes again in Dask's own graph, it is what it was: the scheduler keeps the
first way to make a key anyway, but warns, and remembers for ever what only the second way would read.

The plugin keeps nothing of a task: what it has to know is written on the task itself.  Register it by
``dask_eindecomp.register(client)``, by ``dask scheduler --preload dask_eindecomp.scheduler``, or by the Dask setting
``distributed.scheduler.preload``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from functools import partial
from inspect import signature
from time import time
from typing import Any

from distributed import SchedulerPlugin
from distributed.active_memory_manager import ReduceReplicas, Suggestion
from distributed.core import Status
from tornado.ioloop import PeriodicCallback

from dask_eindecomp.plan import PLACED, PLANNED

# a placement needs it, and no thread goes on while libraries are loaded: rather now than while a plan is made
with suppress(ImportError):
    import scipy.optimize  # noqa: F401

__all__ = ["NAME", "KeepsPlaced", "Placing", "dask_setup"]

NAME = "eindecomp"
"""Of the plugin in a scheduler."""
PERIOD = 100
"""Milliseconds between looks at tasks that wait for a worker which does not run."""

PLUGINS: dict[str, Placing] = {}
"""Plugins of this process by their scheduler's address."""


class KeepsPlaced(ReduceReplicas):  # type: ignore[misc]
    """Drops superfluous copies, but none on a worker that a task is meant for which has yet to read it."""

    def run(self) -> Generator[Suggestion, Any, None]:
        """Dask's suggestions, kept away from these workers."""
        for suggestion in super().run():
            task = suggestion.ts
            needed = {
                address
                for waiter in task.waiters or ()
                if PLACED in (waiter.annotations or ())
                for address in waiter.worker_restrictions or ()
            }
            others = {worker for worker in task.who_has or () if worker.address not in needed}
            if not needed:
                yield suggestion
            elif others:
                yield Suggestion("drop", task, others)


class Placing(SchedulerPlugin):  # type: ignore[misc]
    """Sets tasks free whose worker cannot run them."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.scheduler: Any = None
        self._watch: PeriodicCallback | None = None

    async def start(self, scheduler: Any) -> None:
        """Begin to watch a scheduler."""
        self.scheduler = scheduler
        PLUGINS[scheduler.address] = self
        self._exchange(ReduceReplicas, KeepsPlaced)
        # nothing public lets a plugin see a graph before the scheduler compares it with what it knows
        making = getattr(scheduler, "_generate_taskstates", None)
        if making is not None and {*signature(making).parameters} == {"keys", "dsk", "computation"}:
            scheduler._generate_taskstates = partial(self._unlike_planned, making)
        self._watch = PeriodicCallback(self.look, PERIOD)
        self._watch.start()

    async def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.stop()
        if PLUGINS.get(self.scheduler.address) is self:
            del PLUGINS[self.scheduler.address]
            self._exchange(KeepsPlaced, ReduceReplicas)
            self.scheduler.__dict__.pop("_generate_taskstates", None)

    def _unlike_planned(self, making: Callable[..., Any], *, keys: Any, dsk: Any, computation: Any) -> Any:
        """Let the scheduler take in a graph without what a plan already makes in another way."""
        made = {key for key, task in dsk.items() if self._is_planned(key, task.dependencies)}
        if made:
            needed, stack = set(made), [*keys]
            while stack:
                key = stack.pop()
                if key not in needed and key in dsk:
                    needed.add(key)
                    stack += dsk[key].dependencies
            dsk = {key: task for key, task in dsk.items() if key in needed and key not in made}
        return making(keys=keys, dsk=dsk, computation=computation)

    def _is_planned(self, key: Any, sources: Iterable[Any]) -> bool:
        """Whether the scheduler makes a key by a plan, of other sources."""
        task = self.scheduler.tasks.get(key)
        if task is None or task.run_spec is None or PLANNED not in (task.annotations or ()):
            return False
        return {one.key for one in task.dependencies} != {*sources}

    def _exchange(self, old: type[ReduceReplicas], new: type[ReduceReplicas]) -> None:
        """Put one policy in the place of another, if the scheduler has that."""
        manager = self.scheduler.extensions.get("amm")
        for policy in [one for one in getattr(manager, "policies", ()) if type(one) is old]:
            manager.policies.discard(policy)
            manager.add_policy(new())

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        """Set all tasks free that were meant for a worker which is gone."""
        self.free(
            ts
            for ts in scheduler.tasks.values()
            if ts.worker_restrictions and worker in ts.worker_restrictions
        )

    def look(self) -> None:
        """Set tasks free that wait for a worker which is paused or leaves."""
        scheduler = self.scheduler
        if scheduler.plugins.get(NAME) is not self:  # it was unregistered
            scheduler.loop.add_callback(self.close)
            return
        running = {worker.address for worker in scheduler.running}
        self.free(ts for ts in scheduler.unrunnable if not running & (ts.worker_restrictions or running))
        for worker in scheduler.workers.values():
            if worker.status != Status.running:
                self.free(worker.processing)

    def free(self, tasks: Iterable[Any]) -> None:
        """Let any worker run those of the tasks that a plan placed."""
        placed = [ts for ts in tasks if ts.worker_restrictions and PLACED in (ts.annotations or ())]
        waiting = {}
        stealing = self.scheduler.extensions.get("stealing")
        for ts in placed:
            ts.worker_restrictions = None
            if ts.state == "no-worker":
                waiting[ts.key] = "processing"
            elif ts.state == "processing" and stealing is not None:
                stealing.put_key_in_stealable(ts)
        if waiting:
            self.scheduler.transitions(waiting, stimulus_id=f"eindecomp-free-{time()}")


def dask_setup(scheduler: Any) -> None:
    """Add the plugin to a scheduler that starts with this module as its preload."""
    scheduler.add_plugin(Placing(), idempotent=True)
