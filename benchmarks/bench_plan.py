"""How long planning takes, at the size of real models: LLaMA-65B, every expression of its 80 layers spelled out.

Prints one line an objective and number of workers: seconds of ``decompose``, the cost found, the proven gap; then what
it takes to plan the same graph again under other names.  Nothing here uses BLAS or more than one thread.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from dask_eindecomp.cache import Plans
from dask_eindecomp.decompose import decompose
from dask_eindecomp.graph import EinGraph
from dask_eindecomp.hook import OTHERS
from dask_eindecomp.plan import Plan
from dask_eindecomp.topology import Topology

SIZES = {
    "7B": {"layers": 32, "a": 4096, "h": 32, "d": 128, "f": 11008},
    "13B": {"layers": 40, "a": 5120, "h": 40, "d": 128, "f": 13824},
    "65B": {"layers": 80, "a": 8192, "h": 64, "d": 128, "f": 22016},
}
"""Layers, width, heads, head size and feed-forward width."""

CLUSTER = {
    "memory": 96 << 30, "bandwidth": 2e10, "latency": 2e-5, "flops": 1e14, "task_overhead": 2e-4,
    "memory_bandwidth": 2e12, "small_tile": 1 << 30,
}  # fmt: skip
"""A GPU and its network, roughly."""


def llama(layers: int, a: int, h: int, d: int, f: int, batch: int = 8, sequence: int = 4096) -> EinGraph:
    """A decoder-only transformer: 22 expressions a layer, norms, rotary embedding and softmax spelled out.

    >>> len(llama(layers=2, a=8, h=2, d=4, f=16, batch=2, sequence=4).nodes)
    44
    """
    inputs: dict[str, tuple[int, ...]] = {"x": (batch, sequence, a), "rotary": (sequence, d)}
    nodes: dict[str, tuple[Any, ...]] = {}
    into_heads, x = (a, h, d), "x"
    for number in range(layers):
        shapes = {"query": into_heads, "key": into_heads, "value": into_heads, "output": (h, d, a)}
        shapes |= {"gate": (a, f), "up": (a, f), "down": (f, a)}
        inputs |= {f"{name}.{number}": shape for name, shape in shapes.items()}
        layer: dict[str, tuple[Any, ...]] = {
            "norm": ("bsa,bsa->bs", x, x),
            "xn": ("bsa,bs->bsa", x, "norm"),
            "q": ("bsa,ahd->bshd", "xn", "query"),
            "k": ("bsa,ahd->bshd", "xn", "key"),
            "v": ("bsa,ahd->bshd", "xn", "value"),
            "qr": ("bshd,sd->bshd", "q", "rotary"),
            "kr": ("bshd,sd->bshd", "k", "rotary"),
            "scores": ("bshd,bthd->bhst", "qr", "kr"),
            "most": ("bhst->bhs", "scores", {"aggregate": "max"}),
            "powers": ("bhst,bhs->bhst", "scores", "most", {"join": "subtract"}),
            "total": ("bhst->bhs", "powers"),
            "weights": ("bhst,bhs->bhst", "powers", "total", {"join": "divide"}),
            "context": ("bhst,bthd->bshd", "weights", "v"),
            "attended": ("bshd,hda->bsa", "context", "output"),
            "y": ("bsa,bsa->bsa", x, "attended", {"join": "add"}),
            "norm2": ("bsa,bsa->bs", "y", "y"),
            "yn": ("bsa,bs->bsa", "y", "norm2"),
            "gated": ("bsa,af->bsf", "yn", "gate"),
            "raised": ("bsa,af->bsf", "yn", "up"),
            "active": ("bsf,bsf->bsf", "gated", "raised"),
            "lowered": ("bsf,fa->bsa", "active", "down"),
            "z": ("bsa,bsa->bsa", "y", "lowered", {"join": "add"}),
        }
        own = {*layer, *shapes}
        for name, (subscripts, *rest) in layer.items():
            named = [f"{one}.{number}" if isinstance(one, str) and one in own else one for one in rest]
            nodes[f"{name}.{number}"] = (subscripts, *named)
        x = f"z.{number}"
    return EinGraph.from_spec(inputs, nodes, [x], dtype="float32")


def renamed(graph: EinGraph) -> EinGraph:
    """The same graph, every tensor under another name."""
    inputs = {f"again-{name}": replace(one, name=f"again-{name}") for name, one in graph.inputs.items()}
    nodes = {
        f"again-{name}": replace(
            one, name=f"again-{name}", inputs=tuple(f"again-{source}" for source in one.inputs)
        )
        for name, one in graph.nodes.items()
    }
    outputs = tuple(
        replace(one, name=f"again-{one.name}", source=f"again-{one.source}") for one in graph.outputs
    )
    return EinGraph(inputs, nodes, outputs)


def main() -> None:
    """Plan one model under every objective and for every number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="65B")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 96, 1024])
    parser.add_argument("--objectives", nargs="+", default=["paper", "bytes", "seconds"])
    parser.add_argument("--repeats", type=int, default=3, help="the least is printed")
    options = parser.parse_args()
    graph = llama(**SIZES[options.model])
    print(f"LLaMA-{options.model}: {len(graph.nodes):,} expressions")
    print(f"{'objective':10} {'workers':>7} {'seconds':>8} {'cost':>14} {'gap':>6}")
    for objective in options.objectives:
        for workers in options.workers:
            topology = Topology(workers=workers, **CLUSTER)
            found = []
            for _ in range(options.repeats):
                started = time.perf_counter()
                with OTHERS.come_first():  # as the hook plans
                    plan = decompose(graph, topology=topology, objective=objective)
                found.append(time.perf_counter() - started)
            print(
                f"{objective:10} {workers:7} {min(found):8.2f} {plan.cost:14.8g} {plan.gap:6.1%}", flush=True
            )
    plans, topology = Plans(), Topology(workers=64, **CLUSTER)
    plans.plan(graph, graph, topology, lambda: decompose(graph, topology=topology))
    found = []
    for _ in range(5):
        again = renamed(graph)
        started = time.perf_counter()
        plan = plans.plan(again, again, topology, no_plan)
        found.append(time.perf_counter() - started)
        assert list(plan.partitions) == list(again.nodes)
    print(f"again under other names: {1e5 * min(found) / len(graph.nodes):.2f} ms for 100 expressions")


def no_plan() -> Plan:
    """What is remembered is not planned."""
    raise AssertionError("planned anew")


if __name__ == "__main__":
    main()
