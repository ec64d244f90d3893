"""The decision, readable: what was chosen for each expression, what it costs, and why."""

from __future__ import annotations

import html
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dask_eindecomp.cost import Traffic
from dask_eindecomp.partition import Partition
from dask_eindecomp.topology import Topology

__all__ = [
    "PLACED",
    "PLANNED",
    "Choice",
    "Placement",
    "Plan",
    "Shipped",
    "Workers",
    "readable_bytes",
    "table",
]

NOTHING = Traffic()

PLACED = "eindecomp-placed"
"""Annotation of layers whose tasks a plan placed, by which the scheduler's plugin knows them."""
PLANNED = "eindecomp-planned"
"""Annotation of layers that are part of a plan's graph; says what they do for it."""

Workers = npt.NDArray[np.int64]
"""A worker's number for every tile or block, shaped like the grid."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How one expression is cut."""

    name: str
    """Name of the expression."""
    einsum: str
    """What it computes."""
    cuts: Partition
    """The cut of every label."""
    join: Traffic = NOTHING
    """What the join ships and computes."""
    aggregate: Traffic = NOTHING
    """What combining partial results ships and computes."""
    repartition: Traffic = NOTHING
    """What cutting its operands anew ships."""
    seconds: float = 0.0
    """Estimated seconds, its share of the tasks included."""
    reason: str = ""
    """Why this partition."""
    title: str = ""
    """The name a reader is shown."""
    inside: str = ""
    """The expression in whose tasks it is computed; empty if it has tasks of its own."""

    @property
    def partition(self) -> dict[str, int]:
        """Parts by label."""
        return self.cuts.parts

    @property
    def tiles(self) -> int:
        """Kernel calls."""
        return self.cuts.tiles

    @property
    def traffic(self) -> Traffic:
        """Join, aggregate and repartition together."""
        return self.join + self.aggregate + self.repartition


@dataclass(frozen=True, slots=True)
class Shipped:
    """What one expression ships where its tiles are placed: bytes and messages alone."""

    join: Traffic
    """Copies of its operands beyond the first of each."""
    aggregate: Traffic
    """Partial results."""
    repartition: Traffic
    """What first copies of its operands lack."""


@dataclass(frozen=True)
class Placement:
    """Owners of everything a plan computes, and what they ship."""

    tiles: Mapping[str, Workers]
    """For every expression the worker of each tile, an axis a label in the order of ``expression.labels``."""
    blocks: Mapping[str, Workers]
    """For every tensor the worker of each block."""
    shipped: Mapping[str, Shipped]
    """What every expression ships that has not too many tiles to look at each."""
    delivery: Traffic
    """What cutting the results into the chunks they were promised in ships."""


@dataclass(frozen=True, repr=False)
class Plan:
    """One partition for every expression of a graph, at the least total cost.

    ``print(plan)`` shows a table; in a notebook a plan shows itself as one.
    """

    choices: tuple[Choice, ...]
    """One choice an expression, in topological order."""
    cost: float
    """The figure minimised: floats (``"paper"``), bytes (``"bytes"``) or seconds (``"seconds"``)."""
    objective: str
    """Which of the three."""
    topology: Topology
    """The machines planned for."""
    gap: float = 0.0
    """0.0 if proven optimal, else a bound on ``cost / optimum - 1``."""
    delivery: Traffic = NOTHING
    """What cutting the results into the chunks they were promised in moves."""
    delivery_seconds: float = 0.0
    """Estimated seconds of that, one result after the other."""
    baseline: Traffic | None = None
    """Traffic of the graph as it came, same model; None if it has none."""
    baseline_seconds: float | None = None
    """Estimated seconds of the graph as it came."""
    left_alone: tuple[tuple[str, str], ...] = ()
    """Layers that were not planned, each with the reason."""
    loose: bool = False
    """Whether a cluster may run tiles elsewhere than they are placed, so that the bytes are an estimate."""
    refused: str = ""
    """Why there is no plan within the limits, and what would do; empty if there is one."""
    verdict: str = ""
    """Whether the plan would be applied, in words."""
    partitions: Mapping[str, Partition] = field(init=False, compare=False, repr=False)
    """The cut of every expression, by name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "partitions", {choice.name: choice.cuts for choice in self.choices})

    def placed(self, placement: Placement) -> Plan:
        """The plan with the bytes and messages of a placement instead of those at best overlap."""

        def counted(model: Traffic, found: Traffic) -> Traffic:
            return replace(model, nbytes=found.nbytes, messages=found.messages)

        choices = []
        for choice in self.choices:
            mine = placement.shipped.get(choice.name)
            if mine is None:  # too many tiles to look at each
                choices.append(choice)
                continue
            joined, combined = counted(choice.join, mine.join), counted(choice.aggregate, mine.aggregate)
            moved = counted(choice.repartition, mine.repartition)
            choices.append(replace(choice, join=joined, aggregate=combined, repartition=moved))
        return replace(self, choices=tuple(choices), delivery=counted(self.delivery, placement.delivery))

    @property
    def traffic(self) -> Traffic:
        """What the whole plan moves and computes."""
        return sum((choice.traffic for choice in self.choices), self.delivery)

    @property
    def seconds(self) -> float:
        """Estimated seconds of the whole plan."""
        return sum(choice.seconds for choice in self.choices) + self.delivery_seconds

    @property
    def is_cheaper(self) -> bool:
        """Whether the plan is estimated to take less time than the graph as it came."""
        return self.baseline_seconds is not None and self.seconds < self.baseline_seconds

    def to_json(self) -> str:
        """The plan as JSON text: choices, totals, what was left alone."""
        record = {
            "objective": self.objective,
            "cost": self.cost,
            "gap": self.gap,
            "seconds": self.seconds,
            "verdict": self.verdict,
            "loose": self.loose,
            "refused": self.refused,
            "traffic": self.traffic.to_dict(),
            "baseline": self.baseline.to_dict() if self.baseline else None,
            "baseline_seconds": self.baseline_seconds,
            "workers": self.topology.workers,
            "threads": self.topology.threads,
            "left_alone": [list(pair) for pair in self.left_alone],
            "choices": [
                {
                    "name": choice.name,
                    "title": choice.title,
                    "einsum": choice.einsum,
                    "partition": choice.partition,
                    "tiles": choice.tiles,
                    "join": choice.join.to_dict(),
                    "aggregate": choice.aggregate.to_dict(),
                    "repartition": choice.repartition.to_dict(),
                    "seconds": choice.seconds,
                    "reason": choice.reason,
                }
                for choice in self.choices
            ],
        }
        return json.dumps(record, indent=2)

    @property
    def _header(self) -> tuple[str, ...]:
        return (
            "expression",
            "einsum",
            "partition",
            "tiles",
            "join",
            "aggregate",
            "repartition",
            "seconds",
            "why",
        )

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                choice.title or choice.name,
                choice.einsum,
                " ".join(f"{label}:{parts}" for label, parts in choice.partition.items() if parts > 1)
                or "whole",
                str(choice.tiles),
                readable_bytes(choice.join.nbytes),
                readable_bytes(choice.aggregate.nbytes),
                readable_bytes(choice.repartition.nbytes),
                f"{choice.seconds:.3g}",
                choice.reason,
            )
            for choice in self.choices
        ]

    @property
    def _totals(self) -> list[str]:
        machines = f"{self.topology.workers} worker{'s' * (self.topology.workers > 1)}"
        machines += f" x {self.topology.threads} thread{'s' * (self.topology.threads > 1)}"
        lines = [
            f"planned for {machines}, objective {self.objective}: cost {self.cost:.6g}, " + self._proof,
            f"plan:       {_total(self.traffic, self.seconds)}",
        ]
        if self.baseline is not None and self.baseline_seconds is not None:
            lines.append(f"as it came: {_total(self.baseline, self.baseline_seconds)}")
        if self.loose and self.choices and not self.refused:
            lines.append(
                "bytes are an estimate, since Dask may move tiles; register(client) keeps them in place"
            )
        if self.verdict:
            lines.append(self.verdict)
        return lines

    @property
    def _proof(self) -> str:
        """How far from the optimum the plan may be, in words."""
        if self.refused:
            return "no plan, the graph as it came"
        return "proven optimal" if not self.gap else f"within {self.gap:.1%} of the optimum"

    def __repr__(self) -> str:
        return f"<Plan of {len(self.choices)} expressions: {self._totals[1]}>"

    def __str__(self) -> str:
        lines = list(self._totals)
        if self.choices:
            lines = [*table(self._header, self._rows, {3, 4, 5, 6, 7}), "", *lines]
        for layer, reason in self.left_alone:
            lines.append(f"left alone: {layer}: {reason}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self._header)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._rows
        )
        totals = "".join(f"<p>{html.escape(line)}</p>" for line in self._totals)
        alone = "".join(
            f"<li><code>{html.escape(layer)}</code>: {html.escape(reason)}</li>"
            for layer, reason in self.left_alone
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{totals}" + (
            f"<p>Left alone:</p><ul>{alone}</ul>" if alone else ""
        )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Container[int]) -> list[str]:
    """Lines of a table, columns of numbers to the right.

    >>> print(*table(("what", "n"), [("one", "1"), ("ten", "10")], {1}), sep="\\n")
    what   n
    --------
    one    1
    ten   10
    """
    every = [header, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(header))]
    first, *rest = [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in every
    ]
    return [first, "-" * len(first), *rest]


def readable_bytes(nbytes: int) -> str:
    """Bytes with a unit.

    >>> readable_bytes(0), readable_bytes(41_000_000)
    ('0', '41.0 MB')
    """
    if nbytes < 1000:
        return f"{nbytes} B" if nbytes else "0"
    size = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size:.1f} TB"


def _total(traffic: Traffic, seconds: float) -> str:
    return (
        f"{traffic.tasks} tasks, {readable_bytes(traffic.nbytes)} between workers, "
        f"{readable_bytes(traffic.peak_nbytes)} on a worker at most, "
        f"{traffic.flops:.3g} joins, about {seconds:.3g} s"
    )
