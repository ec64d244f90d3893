"""The machines a graph would run on, found where Dask is asked to run it.

With a distributed client the hook is called in the scheduler's process, where the workers are asked of the scheduler
itself; in the client's process they are asked of the client; without either they are this process' threads.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from itertools import product
from typing import Any

import dask
from dask.system import CPU_COUNT

from dask_eindecomp.calibration import ask_workers
from dask_eindecomp.graph import EinGraph
from dask_eindecomp.topology import Topology, host_of

__all__ = [
    "find_topology",
    "has_loose_tiles",
    "home_address",
    "keeps_tiles",
    "owned",
    "registered",
    "scheduler_here",
]


def find_topology(home: str | None = None, measured: Topology | None = None) -> Topology:
    """The workers a graph would run on, found where this is called.

    ``home`` tells schedulers apart where several live in one process.  How fast they are is taken from ``measured``.
    """
    found = _workers_found(home)
    if measured is None:
        return found
    who = ("workers", "threads", "shares", "memory", "addresses", "hosts")
    return replace(measured, **{name: getattr(found, name) for name in who})


def _workers_found(home: str | None) -> Topology:
    """The machines with default figures."""
    scheduler = scheduler_here(home)
    if scheduler is not None:
        # copied at once: the event loop goes on meanwhile; paused workers run nothing
        workers = list(scheduler.running) or list(scheduler.workers.values())
        found = [(str(one.address), int(one.nthreads), int(one.memory_limit or 0)) for one in workers]
        return _of_workers(sorted(found))
    client = _client_here()
    if client is not None:
        asked = sorted(ask_workers(client).items())
        return _of_workers([(a, int(w["nthreads"]), int(w["memory_limit"] or 0)) for a, w in asked])
    return _of_this_process()


def owned(graph: EinGraph, topology: Topology, home: str | None) -> EinGraph:
    """The graph with the owners of its persisted inputs, where the cluster says them all."""
    numbers = {address: number for number, address in enumerate(topology.addresses)}
    held = [one for one in graph.inputs.values() if one.stays and one.chunks is not None]
    if not held or len(numbers) < 2:
        return graph
    keys = {
        one.name: [(one.name, *at) for at in product(*map(range, map(len, one.chunks or ())))] for one in held
    }
    there = _who_has([key for mine in keys.values() for key in mine], home)
    inputs = dict(graph.inputs)
    for one in held:
        holders = [[numbers[at] for at in there.get(key, ()) if at in numbers] for key in keys[one.name]]
        if all(holders):
            inputs[one.name] = replace(one, owners=tuple(map(min, holders)))
    return replace(graph, inputs=inputs)


def _who_has(keys: list[Any], home: str | None) -> dict[Any, list[str]]:
    """Addresses of the workers that hold each block, as the cluster knows them where this is called."""
    scheduler = scheduler_here(home)
    if scheduler is not None:
        tasks = ((key, scheduler.tasks.get(key)) for key in keys)
        # copied at once: the event loop goes on meanwhile
        holders = {key: tuple(task.who_has or ()) for key, task in tasks if task is not None}
        return {key: [str(one.address) for one in found] for key, found in holders.items()}
    client = _client_here()
    if client is None:
        return {}
    return dict(client.sync(client.scheduler.who_has, keys=keys))


def home_address() -> str | None:
    """Address of the current client's scheduler, without asking it: pickling must not wait for a reply."""
    if "distributed" not in sys.modules:
        return None
    from distributed.client import _get_global_client

    client = _get_global_client()
    return getattr(getattr(client, "scheduler", None), "address", None)


def has_loose_tiles(topology: Topology) -> bool:
    """Whether these are workers of the current client's cluster, and its scheduler lacks the plugin."""
    client = _client_here()
    if client is None or topology.workers == 1 or not topology.addresses:
        return False
    try:
        return not client.run_on_scheduler(registered)
    except Exception:  # the package is missing there: then nothing is planned either
        return True


def registered(dask_scheduler: Any) -> bool:
    """Whether a scheduler has the plugin."""
    return "eindecomp" in dask_scheduler.plugins


def keeps_tiles(topology: Topology) -> bool:
    """Whether the scheduler in whose process this runs has the plugin which makes strict restrictions safe."""
    module = sys.modules.get("dask_eindecomp.scheduler")
    plugins = list(module.PLUGINS.values()) if module and _offloaded() else []
    return any(set(topology.addresses) <= set(plugin.scheduler.workers) for plugin in plugins)


def _offloaded() -> bool:
    """Whether this runs in the thread in which a scheduler unpacks graphs."""
    return threading.current_thread().name.startswith("Dask-Offload")


def scheduler_here(home: str | None) -> Any:
    """The scheduler in whose offload thread this runs; None elsewhere."""
    if not _offloaded():
        return None
    plugins = getattr(sys.modules.get("dask_eindecomp.scheduler"), "PLUGINS", {})
    if home in plugins:
        return plugins[home].scheduler
    module = sys.modules.get("distributed.scheduler")
    live = [one for one in getattr(module.Scheduler, "_instances", ()) if one.workers] if module else []
    return next((one for one in live if one.address == home), live[0] if live else None)


def _client_here() -> Any:
    """The current client if that is where Dask would run; None otherwise."""
    if "distributed" not in sys.modules:
        return None
    from distributed.client import _get_global_client

    client = _get_global_client()
    if client is None or client.asynchronous:
        return None
    chosen = dask.base.get_scheduler()
    return client if getattr(chosen, "__self__", None) is client else None


def _of_workers(workers: list[tuple[str, int, int]]) -> Topology:
    """A cluster's topology from address, threads and memory limit of each worker."""
    if not workers:
        return _of_this_process()
    shares = tuple(count for _, count, _ in workers)
    threads = max(1, round(sum(shares) / len(workers)))
    limits = [limit for _, _, limit in workers if limit]
    addresses = tuple(address for address, _, _ in workers)
    hosts = {host_of(address) for address in addresses}
    # on this machine threads share its cores; what other machines have is not known
    crowded = len(workers) * threads / CPU_COUNT if hosts <= {"127.0.0.1", "localhost", ""} else 1.0
    return Topology(
        workers=len(workers),
        threads=threads,
        shares=shares if len(set(shares)) > 1 else (),
        memory=min(limits, default=Topology().memory),
        addresses=addresses,
        hosts=len(hosts),
        contention=max(1.0, crowded),
    )


def _of_this_process() -> Topology:
    """Threads of this process, or one where Dask is told to run without any."""
    chosen = dask.config.get("scheduler", None)
    if isinstance(chosen, str) and chosen.lower() in ("sync", "synchronous", "single-threaded"):
        return replace(Topology.of_threads(1), memory=_memory_here())
    workers = int(dask.config.get("num_workers", None) or CPU_COUNT)
    if isinstance(chosen, str) and chosen.lower() in ("processes", "multiprocessing"):
        return Topology(workers=workers, memory=max(_memory_here() // workers, 1))
    return replace(Topology.of_threads(workers), memory=_memory_here())


def _memory_here() -> int:
    """Bytes of memory of this machine, where the system says; else the topology's default."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return Topology().memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
