"""What a cluster can do, measured through its client.

Every figure of a `Topology` has one experiment that does what the formulas of `topology.py` price with it, so that
what is true of the machine but of no formula ends in the figure nearest to it.  A repeat runs all of them once::

    one worker      large products of each type    flops, speeds
                    small tiles                    small_tile
                    a sum of long vectors          memory_bandwidth
    every thread    large products at once         contention
    every worker    blocks of the next worker      bandwidth
                    small blocks of others         latency
                    a graph of many levels         task_overhead, turn

A disturbance hits one repeat; the best of all repeats counts, and how far the worst is from it is told as the spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from statistics import median
from time import perf_counter
from typing import Any
from uuid import uuid4

import numpy as np

from dask_eindecomp.kernels import Contraction, Join
from dask_eindecomp.topology import PASSES, Topology, TopologyError, host_of

__all__ = ["Calibration", "ask_workers", "calibration"]

Seconds = Mapping[str, float]
"""By piece of work."""
Reads = Mapping[str, Sequence[Sequence[str]]]
"""For each worker and each of its tasks the keys of the blocks it reads."""

SIDE = 768
"""Of the matrices of a large product: BLAS is at its full speed and threads do not share what is in cache."""
TYPED_SIDE = 384
"""Of the matrices that types are compared with; a complex product takes four times as long as one of doubles."""
SMALL_SIDES = (40, 72)
"""Of the matrices of small products; of lengths that do not fall on the same lines of a cache."""
SMALL_PRODUCTS = 30
"""Of each side in a turn."""
TURNS = 3
"""Of all that one thread does, in each repeat."""
DTYPES = ("float64", "float32", "complex64", "complex128")
"""Element types BLAS has; the first is what the others are compared with."""
BUSY = 0.2
"""Seconds for which all threads multiply at once: long beside the time between the first start and the last."""
VECTOR_NBYTES = 32 << 20
"""Longer than any cache."""
BLOCK_NBYTES = 16 << 20
BLOCKS = 2
"""Blocks that a worker receives at once: Dask packs no more than three into one message."""
SHIFTS = 2
"""Times that such blocks are sent in each repeat; the second ones go to memory that the first ones left."""
SMALL_BLOCKS = 8
"""Small blocks that a worker receives from each sender."""
SENDERS = 3
"""Workers at most from which one worker receives small blocks: more messages for the same tasks."""
PAIRS = 3
"""Times that others' small blocks and own ones are read in turn in each repeat; short ones are less often disturbed."""
LEVELS = 5
"""Of a graph whose tasks read those of the level before, as a plan's do: waiting for them is part of what a task costs."""
WIDTH = 5
"""Tasks of a level for each worker: about what a plan has, two or so a thread and the slices between."""

RATES = {"flops", "bandwidth", "local_bandwidth", "memory_bandwidth", *(f"{name} speed" for name in DTYPES)}
"""Figures of which more is better."""
UNITS = {  # a MAC is one multiply-add
    "memory": "B",
    "bandwidth": "B/s",
    "latency": "s",
    "flops": "MAC/s",
    "task_overhead": "s",
    "turn": "s",
    "local_bandwidth": "B/s",
    "local_latency": "s",
    "memory_bandwidth": "B/s",
    "contention": "times",
    "small_tile": "MAC",
}
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


@dataclass(frozen=True, slots=True)
class Calibration:
    """A cluster as it was measured.

    >>> print(Calibration(Topology(workers=2, contention=1.5), {"contention": 0.25}))  # doctest: +ELLIPSIS
    figure                    value  spread
    workers                       2
    threads                       1
    memory                  4.29 GB
    ...
    contention            1.5 times     25%
    ...
    """

    topology: Topology
    """Its figures."""
    spread: Mapping[str, float]
    """For each measured figure ``(worst - best) / best`` over the repeats."""

    def __str__(self) -> str:
        """A table of figure, value with unit, and spread."""
        lines = [("figure", "value", "spread")]
        for name, value in self._figures():
            spread = f"{self.spread[name]:.0%}" if name in self.spread else ""
            lines.append((name, _quantity(value, UNITS.get(name, "")), spread))
        return "\n".join(f"{name:<17} {value:>13} {spread:>7}".rstrip() for name, value, spread in lines)

    def _figures(self) -> Iterable[tuple[str, float]]:
        """Every figure that is a number, by name."""
        for item in fields(Topology):
            value = getattr(self.topology, item.name)
            if isinstance(value, (int, float)):
                yield item.name, value
        for dtype, speed in self.topology.speeds:
            yield f"{dtype} speed", speed


def _quantity(value: float, unit: str) -> str:
    """Three digits of a value and its unit with a prefix; a plain number where there is no unit.

    >>> _quantity(8.125e9, "B/s"), _quantity(0.00052, "s"), _quantity(0, "s"), _quantity(4, "")
    ('8.12 GB/s', '520 µs', '0 s', '4')
    """
    scale, prefix = 1.0, ""
    if unit not in ("", "times") and value:
        scale, prefix = next((pair for pair in PREFIXES if value >= 0.9995 * pair[0]), PREFIXES[-1])
    return f"{value / scale:.3g} {prefix}{unit}".rstrip()


def calibration(client: Any, repeats: int = 3) -> Calibration:
    """The workers of a cluster and what they can do.

    The cluster should have nothing else to do.  Workers are taken to be alike: what one thread can do is measured on
    the first.  Nothing stays on the cluster.

    Parameters
    ----------
    client
        A ``distributed.Client`` that waits for its results.
    repeats
        How often everything is measured.  Each takes a second or two.

    Raises
    ------
    TopologyError
        If there is less than one repeat, or there are no workers.
    TypeError
        If the client is asynchronous.
    """
    if repeats < 1:
        raise TopologyError(f"cannot calibrate in {repeats} repeats; expected at least 1")
    if client.asynchronous:
        raise TypeError(
            "cannot calibrate through an asynchronous client; expected Client(asynchronous=False)"
        )
    found = _workers(client)
    _warm_up(client, found)
    samples = [_repeat(client, found) for _ in range(repeats)]
    best = {name: _typical(name, [sample[name] for sample in samples]) for name in samples[0]}
    each = [_figures(sample) for sample in samples]
    figures = _figures(best)
    return Calibration(
        _with_figures(found, figures),
        {name: _spread([one[name] for one in each], name in RATES) for name in figures},
    )


# the workers


def ask_workers(client: Any) -> dict[str, Any]:
    """What a client's scheduler says of each of its workers, by address.

    ``Client.scheduler_info`` gives what was heard last, which may be the answer to the question that the client itself
    asks every two seconds, and that lists no workers.
    """
    every = {"n_workers": -1} if "n_workers" in signature(client.scheduler_info).parameters else {}
    return dict(client.sync(client.scheduler.identity, **every)["workers"])


def _workers(client: Any) -> Topology:
    """How many there are, their threads, memory and addresses; the figures are not measured yet."""
    workers = ask_workers(client)
    if not workers:
        raise TopologyError(
            f"the scheduler at {client.scheduler.address} has no workers; expected at least 1, "
            "for which client.wait_for_workers(1) waits"
        )
    limits = [int(worker["memory_limit"]) for worker in workers.values() if worker["memory_limit"]]
    return Topology(
        workers=len(workers),
        threads=max(1, round(sum(int(worker["nthreads"]) for worker in workers.values()) / len(workers))),
        memory=min(limits, default=Topology().memory),
        addresses=tuple(sorted(workers)),
        hosts=len({host_of(address) for address in workers}),
    )


def _senders(addresses: Sequence[str], outside: bool) -> dict[str, tuple[str, ...]]:
    """For each worker the others it can receive from, so that the first ones differ wherever they can.

    ``outside`` takes workers of other hosts, from the next host on; otherwise it is those of the same host.  A worker
    that has none is left out.

    >>> _senders(("tcp://a:1", "tcp://a:2", "tcp://b:1"), outside=False)
    {'tcp://a:1': ('tcp://a:2',), 'tcp://a:2': ('tcp://a:1',)}
    """
    hosts: dict[str, list[str]] = {}
    for address in addresses:
        hosts.setdefault(host_of(address), []).append(address)
    groups = list(hosts.values())
    found = {}
    for number, group in enumerate(groups):
        others = [one for later in (*groups[number + 1 :], *groups[:number]) for one in later]
        for place, address in enumerate(group):
            start = place % len(others) if others else 0
            turned = others[start:] + others[:start] if outside else group[place + 1 :] + group[:place]
            if turned:
                found[address] = tuple(turned)
    return found


def _links(found: Topology) -> dict[str, dict[str, tuple[str, ...]]]:
    """Senders for each worker, by what the figures of such a link begin with."""
    inner = _senders(found.addresses, outside=False)
    outer = _senders(found.addresses, outside=True)
    links = {"": inner} if found.hosts == 1 else {"": outer, "local_": inner}
    return {prefix: senders for prefix, senders in links.items() if senders}


# one repeat


def _warm_up(client: Any, found: Topology) -> None:
    """Load BLAS in every thread's process and open the connections between workers."""
    _run(client, [(address, partial(_busy, BUSY / 6)) for address in found.addresses * found.threads])
    for senders in _links(found).values():
        _message_seconds(client, senders, pairs=1)


def _repeat(client: Any, found: Topology) -> Seconds:
    """Do everything once."""
    first, *_ = found.addresses
    nbytes = min(VECTOR_NBYTES, found.memory // 32)
    [alone] = _run(client, [(first, partial(_alone, nbytes))])
    at_once = _run(client, [(address, partial(_busy, BUSY)) for address in found.addresses * found.threads])
    seconds: dict[str, float] = {**alone, "busy": sum(at_once) / len(at_once)}
    seconds["task"] = _level_seconds(client, found.addresses, WIDTH) / (WIDTH * found.workers)
    seconds["turn"] = _level_seconds(client, found.addresses, 1)
    nbytes = min(BLOCK_NBYTES, found.memory // 64)
    for prefix, senders in _links(found).items():
        seconds[f"{prefix}byte"] = min(_byte_seconds(client, senders, nbytes) for _ in range(SHIFTS))
        own, others = _message_seconds(client, senders, PAIRS)
        seconds |= {f"{prefix}message of its own": own, f"{prefix}message of another": others}
    return seconds


def _run(client: Any, calls: Iterable[tuple[str, Callable[[], Any]]]) -> list[Any]:
    """Results of calls, each on the worker that is named, all at once."""
    futures = [
        client.submit(call, workers=[address], allow_other_workers=False, pure=False)
        for address, call in calls
    ]
    return list(client.gather(futures))


def _byte_seconds(client: Any, senders: Mapping[str, Sequence[str]], nbytes: int) -> float:
    """Seconds a byte takes into one worker while every worker receives several blocks of one other."""
    from distributed import wait

    place = {"allow_other_workers": False, "pure": False}
    blocks = {
        receiver: client.map(_block, [nbytes] * BLOCKS, workers=[sender], **place)
        for receiver, (sender, *_) in senders.items()
    }
    with client.as_current():  # wait knows no other
        wait([block for several in blocks.values() for block in several])
    start = perf_counter()
    received = [
        client.submit(_nbytes, *several, workers=[receiver], **place) for receiver, several in blocks.items()
    ]
    client.gather(received)
    return (perf_counter() - start) / (nbytes * BLOCKS)


def _message_seconds(client: Any, senders: Mapping[str, Sequence[str]], pairs: int) -> tuple[float, float]:
    """Seconds for each small block a worker reads, where they are its own and where they are another's."""
    near = {receiver: several[:SENDERS] for receiver, several in senders.items()}
    holders = sorted({*near, *(one for several in near.values() for one in several)})
    blocks = {address: _scattered(client, address, SMALL_BLOCKS * pairs) for address in holders}
    own, others = [], []
    for pair in range(pairs):
        keys = {address: [block.key for block in blocks[address][pair::pairs]] for address in holders}
        # a task reads as many different blocks of its own worker as it then reads of others
        turned = {
            receiver: [keys[receiver][n:] + keys[receiver][:n] for n in range(len(several))]
            for receiver, several in near.items()
        }
        own.append(_graph_seconds(client, {one: list(zip(*several)) for one, several in turned.items()}))
        sent = {receiver: [keys[one] for one in several] for receiver, several in near.items()}
        others.append(_graph_seconds(client, {one: list(zip(*several)) for one, several in sent.items()}))
    blocks_read = SMALL_BLOCKS * max(map(len, near.values()))
    return median(own) / blocks_read, median(others) / blocks_read


def _level_seconds(client: Any, addresses: Sequence[str], width: int) -> float:
    """Seconds of a level of a graph with so many tasks a worker, each of which reads two of the level before.

    One of the two is the next worker's.  Waiting for the scheduler and for the other worker is most of what a task costs, and tasks of a plan do both.
    """
    from dask._task_spec import Task, TaskRef
    from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

    layers, dependencies = {}, {}
    before, token, count = "", uuid4().hex, len(addresses)
    for level in range(LEVELS):
        name = f"level-{level}-{token}"
        places: dict[Any, list[str]] = {}
        tasks: dict[Any, Any] = {}
        for worker, address in enumerate(addresses):
            for number in range(width):
                reads = [(before, worker, number), (before, (worker + 1) % count, number)] if before else []
                key = (name, worker, number)
                tasks[key] = Task(key, _made, *map(TaskRef, dict.fromkeys(reads)))
                places[key] = [address]
        place = {"workers": places.get, "allow_other_workers": False}
        layers[name] = MaterializedLayer(tasks, annotations=place)
        dependencies[name] = {before} if before else set()
        before = name
    start = perf_counter()
    client.get(HighLevelGraph(layers, dependencies), list(tasks))
    return (perf_counter() - start) / LEVELS


def _scattered(client: Any, address: str, count: int) -> list[Any]:
    """Futures of so many new small blocks on one worker."""
    blocks = [np.full(128, float(number)) for number in range(count)]
    return list(client.scatter(blocks, workers=[address], hash=False))


def _graph_seconds(client: Any, reads: Reads) -> float:
    """Seconds of a graph whose tasks read blocks, each worker's own tasks and one that adds up what they give."""
    from dask._task_spec import Task, TaskRef
    from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

    layers, ends = {}, []
    for address, tasks in reads.items():
        name, end = (f"{what}-{uuid4().hex}" for what in ("read", "total"))
        layer: dict[Any, Any] = {
            (name, number): Task((name, number), _total, *map(TaskRef, keys))
            for number, keys in enumerate(tasks)
        }
        layer[end] = Task(end, _total, *map(TaskRef, layer))
        place = {"workers": [address], "allow_other_workers": False}
        layers[name] = MaterializedLayer(layer, annotations=place)
        ends.append(end)
    graph = HighLevelGraph(layers, {name: set() for name in layers})
    start = perf_counter()
    client.get(graph, ends)
    return perf_counter() - start


# figures


def _typical(name: str, values: Sequence[float]) -> float:
    """The least seconds of all; of messages the median.

    What is wanted of these is the difference of two, which would be that of the moments at which each was least disturbed.
    """
    return median(values) if "message" in name else min(values)


def _figures(seconds: Seconds) -> dict[str, float]:
    """What the formulas need, from how long the work took."""
    figures = {
        "flops": SIDE**3 / seconds["large"],
        "task_overhead": seconds["task"],
        "turn": seconds["turn"],
        "memory_bandwidth": 1 / seconds["stream"],
        "contention": max(seconds["busy"] / seconds["large"], 1.0),
    }
    for prefix in ("", "local_"):
        if f"{prefix}byte" in seconds:
            figures[f"{prefix}bandwidth"] = 1 / seconds[f"{prefix}byte"]
            longer = seconds[f"{prefix}message of another"] - seconds[f"{prefix}message of its own"]
            figures[f"{prefix}latency"] = max(longer, 0.0)
    tiles = {side: seconds[f"tile {side}"] for side in SMALL_SIDES}
    figures["small_tile"] = _small_tile(tiles, figures["flops"], figures["memory_bandwidth"])
    for dtype in DTYPES[1:]:
        figures[f"{dtype} speed"] = seconds["float64"] / seconds[dtype]
    return figures


def _small_tile(seconds: Mapping[int, float], flops: float, memory_bandwidth: float) -> int:
    """Multiply-adds that a product costs besides its own, from the seconds of products of several sides.

    Fits ``(side**3 + s) / flops + 72 * side**2 / memory_bandwidth``, what `Topology.compute_seconds` charges for three
    matrices of doubles, with the least relative errors.

    >>> _small_tile({100: 1.5e-3 + 7.2e-5, 200: 8.5e-3 + 28.8e-5}, flops=1e9, memory_bandwidth=1e10)
    500000
    """
    weights = {side: 1 / taken**2 for side, taken in seconds.items()}
    rest = {
        side: flops * (seconds[side] - 24 * PASSES * side**2 / memory_bandwidth) - side**3 for side in seconds
    }
    mean = sum(weights[side] * rest[side] for side in seconds) / sum(weights.values())
    return max(round(mean), 0)


def _with_figures(found: Topology, figures: Mapping[str, float]) -> Topology:
    """The topology with what was measured in place of what was assumed."""
    named = {item.name: figures[item.name] for item in fields(Topology) if item.name in figures}
    speeds = dict(found.speeds) | {
        name: figures[f"{name} speed"] for name, _ in found.speeds if f"{name} speed" in figures
    }
    return replace(found, **named, speeds=tuple(sorted(speeds.items())))  # type: ignore[arg-type]


def _spread(values: Sequence[float], more_is_better: bool) -> float:
    """How far the worst is from the best, as a share of the best.

    >>> _spread([4.0, 3.0], more_is_better=True), _spread([4.0, 3.0], more_is_better=False)
    (0.25, 0.3333333333333333)
    """
    best, worst = max(values), min(values)
    if not more_is_better:
        best, worst = worst, best
    if best == worst:
        return 0.0
    return abs(worst - best) / best if best else float("inf")


# what runs on a worker


def _alone(nbytes: int) -> dict[str, float]:
    """Seconds of what is measured on one thread while all others rest, by piece of work.

    The pieces take turns, since a machine has slow moments that outlast any of them.
    """
    large = np.ones((SIDE, SIDE))
    vector = np.ones(max(nbytes // 8, 1))
    pieces: dict[str, Callable[[], float]] = {
        "large": partial(_seconds, np.matmul, large, large),
        "stream": partial(_seconds, np.add, vector, vector.copy()),
    }
    for dtype in DTYPES:
        matrix = np.ones((TYPED_SIDE, TYPED_SIDE), dtype)
        pieces[dtype] = partial(_seconds, np.matmul, matrix, matrix)
    for side in SMALL_SIDES:
        pieces[f"tile {side}"] = partial(_tile_seconds, side)
    turns = [{name: piece() for name, piece in pieces.items()} for _ in range(TURNS)]
    seconds = {name: _typical(name, [turn[name] for turn in turns]) for name in pieces}
    return {**seconds, "stream": seconds["stream"] / (3 * vector.nbytes)}


def _seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Of one call."""
    start = perf_counter()
    function(*arguments)
    return perf_counter() - start


def _tile_seconds(side: int) -> float:
    """Of a product of small matrices, computed as a plan's tile is; the least of several."""
    lengths = tuple((label, side) for label in "ijk")
    piece = ((side,), (side,))
    operands = (("i", "j"), ("j", "k"))
    tile = Join("ij,jk->ik", operands, ("i", "k"), lengths, (piece, piece), Contraction("float64"))
    matrix = np.ones((side, side))
    return min(_seconds(tile, matrix, matrix) for _ in range(SMALL_PRODUCTS))


def _busy(seconds: float) -> float:
    """Seconds of a large product while it is repeated for so long."""
    matrix = np.ones((SIDE, SIDE))
    start, count = perf_counter(), 0
    while perf_counter() < start + seconds:
        np.matmul(matrix, matrix)
        count += 1
    return (perf_counter() - start) / count


def _block(nbytes: int) -> np.ndarray:
    """So many bytes that no compression makes fewer: it does not look so far back as where they repeat."""
    page = np.frombuffer(np.random.default_rng().bytes(1 << 20), np.uint8)
    return np.resize(page, nbytes)


def _nbytes(*blocks: np.ndarray) -> int:
    """Bytes of all blocks."""
    return sum(block.nbytes for block in blocks)


def _made(*blocks: np.ndarray) -> np.ndarray:
    """A small block."""
    return np.full(128, float(len(blocks)))


def _total(*blocks: Any) -> float:
    """The sum of one element of each block."""
    return float(sum(np.ravel(block)[0] for block in blocks))
