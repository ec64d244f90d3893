"""The least sum of tables over a graph of variables, exactly.

A sum of one table a variable and one a pair is minimised by eliminating the variables in min-plus algebra: join all
tables that hold a variable, keep the least over its values and which value that was, go on with the variable whose
joint table is smallest, and walk back over the kept argmins.  The work is exponential only in how entangled the graph
is, not in its size.  Where a joint table would pass ``TABLE_CAP``, values are dropped and the gap is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import prod

import numpy as np
import numpy.typing as npt

__all__ = ["TABLE_CAP", "Table", "minimise"]

TABLE_CAP = 1 << 24
"""Most entries of a joint table."""

Table = npt.NDArray[np.float64]


def minimise(
    alone: dict[str, Table], pairs: dict[tuple[str, str], Table]
) -> tuple[dict[str, int], float, float]:
    """The assignment of least total cost, that cost, and a bound on how far from the optimum it may be."""
    dropped = False
    full_alone, full_pairs = dict(alone), dict(pairs)
    kept = {name: np.arange(len(costs)) for name, costs in alone.items()}
    while True:
        order = _elimination_order(alone, pairs)
        if order is not None:
            break
        dropped = True
        largest = max(kept, key=lambda name: (len(kept[name]), name))
        keep = np.sort(
            np.argsort(_optimistic(largest, alone, pairs), kind="stable")[: -(-len(kept[largest]) // 2)]
        )
        kept[largest] = kept[largest][keep]
        alone = alone | {largest: alone[largest][keep]}
        pairs = {
            pair: table[keep] if pair[0] == largest else table[:, keep] if pair[1] == largest else table
            for pair, table in pairs.items()
        }
    value, chosen = _eliminate(order, alone, pairs)
    indices = {name: int(kept[name][chosen[name]]) for name in chosen}
    if not dropped:
        return indices, value, 0.0
    least = sum(float(costs.min()) for costs in full_alone.values())
    least += sum(float(table.min()) for table in full_pairs.values())
    return indices, value, max(value / least - 1, 0.0) if least > 0 else float("inf")


def _optimistic(name: str, alone: Mapping[str, Table], pairs: Mapping[tuple[str, str], Table]) -> Table:
    """For every candidate of ``name`` its own cost and the least its edges can cost."""
    total = alone[name].copy()
    for (source, reader), table in pairs.items():
        if source == name:
            total += table.min(axis=1)
        elif reader == name:
            total += table.min(axis=0)
    return total


def _elimination_order(
    alone: Mapping[str, Table], pairs: Mapping[tuple[str, str], Table]
) -> list[str] | None:
    """Variables in the order of elimination, smallest joint table first; None if one would pass the cap."""
    near: dict[str, set[str]] = {name: set() for name in alone}
    for source, reader in pairs:
        near[source].add(reader)
        near[reader].add(source)
    sizes = {name: len(costs) for name, costs in alone.items()}

    def joint(name: str) -> int:
        return sizes[name] * prod(sizes[other] for other in near[name])

    weights = {name: joint(name) for name in near}
    order = []
    while weights:
        name = min(weights, key=lambda one: (weights[one], one))
        if weights.pop(name) > TABLE_CAP:
            return None
        order.append(name)
        others = near.pop(name)
        for one in others:
            near[one] |= others - {one}
            near[one].discard(name)
        for one in others:
            weights[one] = joint(one)
    return order


def _eliminate(
    order: list[str], alone: Mapping[str, Table], pairs: Mapping[tuple[str, str], Table]
) -> tuple[float, dict[str, int]]:
    """Eliminate in this order and walk back: the least cost and one choice that has it."""
    factors: list[tuple[tuple[str, ...], Table]] = [((name,), costs) for name, costs in alone.items()]
    factors += [(pair, table) for pair, table in pairs.items()]
    touching: dict[str, list[int]] = {name: [] for name in alone}
    for number, (scope, _) in enumerate(factors):
        for name in scope:
            touching[name].append(number)
    spent: set[int] = set()
    steps: list[tuple[str, tuple[str, ...], npt.NDArray[np.int64]]] = []
    constant = 0.0
    for name in order:
        mine = [number for number in touching[name] if number not in spent]
        spent.update(mine)
        scope = tuple(dict.fromkeys((name, *(one for number in mine for one in factors[number][0]))))
        table = reduce(np.add, (_spread(*factors[number], scope) for number in mine))
        table = np.broadcast_to(table, tuple(len(alone[one]) for one in scope))
        steps.append((name, scope[1:], table.argmin(axis=0)))
        least = table.min(axis=0)
        if len(scope) == 1:
            constant += float(least)
            continue
        factors.append((scope[1:], least))
        for one in scope[1:]:
            touching[one].append(len(factors) - 1)
    chosen: dict[str, int] = {}
    for name, others, best in reversed(steps):
        chosen[name] = int(best[tuple(chosen[other] for other in others)])
    return constant, chosen


def _spread(scope: tuple[str, ...], table: Table, wanted: tuple[str, ...]) -> Table:
    """A table with its axes in the order of ``wanted``, axes it lacks of length 1."""
    order = sorted(range(len(scope)), key=lambda axis: wanted.index(scope[axis]))
    present = set(scope)
    shaped = table.transpose(order)
    sizes = iter(shaped.shape)
    return shaped.reshape(tuple(next(sizes) if name in present else 1 for name in wanted))
