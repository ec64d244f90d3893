"""The least sum of tables over a graph of variables, exactly.

A sum of one table a variable and one an edge is minimised by eliminating the variables in min-plus algebra: join all
tables that hold a variable, keep the least over its values, go on with the variable whose joint table is smallest, and
walk back.  The work is exponential only in how entangled the graph is, not in its size.

Two things keep tables small.  An edge sees only a part of a value (how the tensor it carries is cut), so values that
all edges of a variable see alike form one *class*, of which the cheapest stands for all.  And equal tables, the repeated
layers of a model, are joined once: tables are known by identity, and so is what was made of them.

Where a joint table would pass ``WORK_CAP``, values are dropped, and what the optimum costs at least is found by
eliminating the tables of such a variable in groups (mini-buckets; Dechter and Rish, J. ACM 50(2), 2003).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Factor", "Late", "Table", "gap_of", "minimise"]

WORK_CAP = 1 << 29
"""Most sums that the elimination of one variable may take."""

IN_CACHE = 1 << 16
"""Entries of a table that are worked on at a time."""

Table = npt.NDArray[np.float64]
Classes = npt.NDArray[np.int64]


class Late(Exception):
    """The time that planning may take is over."""


@dataclass(frozen=True, eq=False, slots=True)
class Factor:
    """A cost that depends on what some variables' values look like from here."""

    scope: tuple[str, ...]
    """The variables, one an axis of the table."""
    table: Table
    """Cost of every combination of classes."""
    classes: tuple[Classes, ...]
    """For each variable the class that each of its values falls into."""

    def narrowed(self, name: str, values: Classes) -> Factor:
        """The same of a variable that keeps only some of its values."""
        if name not in self.scope:
            return self
        picked = tuple(mine[values] if one == name else mine for one, mine in zip(self.scope, self.classes))
        return replace(self, classes=picked)


def minimise(
    alone: Mapping[str, Table], factors: Sequence[Factor], deadline: float | None = None
) -> tuple[dict[str, int], float, float]:
    """The assignment of least total cost, that cost, and a bound on how far from the optimum it may be.

    Parameters
    ----------
    alone
        Cost of every value of each variable by itself.
    factors
        Costs of two variables together.
    deadline
        ``time.monotonic()`` at which to give up.

    Raises
    ------
    Late
        If the deadline passes.
    """
    kept = {name: np.arange(len(costs)) for name, costs in alone.items()}
    some, narrowed = dict(alone), list(factors)
    while True:
        solved = _Elimination(some, narrowed, deadline).run()
        if solved is not None:
            break
        # the variable with most values loses the half that looks worst
        name = max(some, key=lambda one: (len(some[one]), one))
        if len(some[name]) == 1:
            raise AssertionError("one value each is always within the cap")
        hopes = _hopes(name, some, narrowed)
        keep = np.sort(np.argsort(hopes, kind="stable")[: -(-len(hopes) // 2)])
        kept[name] = kept[name][keep]
        some[name] = some[name][keep]
        narrowed = [factor.narrowed(name, keep) for factor in narrowed]
    value, chosen = solved
    indices = {name: int(kept[name][chosen[name]]) for name in chosen}
    if all(len(some[name]) == len(alone[name]) for name in alone):
        return indices, value, 0.0
    least = _Elimination(alone, factors, deadline, relaxed=True).run()
    assert least is not None
    return indices, value, gap_of(value, least[0])


def gap_of(value: float, least: float) -> float:
    """How much more than the least possible a value is, as a share of it."""
    if value <= least:
        return 0.0
    return value / least - 1 if least > 0 else float("inf")


def _hopes(name: str, alone: dict[str, Table], factors: Sequence[Factor]) -> Table:
    """For every value of a variable its own cost and the least its edges can cost."""
    total = alone[name].copy()
    for factor in factors:
        for axis, one in enumerate(factor.scope):
            if one == name:
                others = tuple(other for other in range(len(factor.scope)) if other != axis)
                total += factor.table.min(axis=others)[factor.classes[axis]]
    return total


class _Elimination:
    """Tables as they are while one variable after the other goes."""

    def __init__(
        self,
        alone: Mapping[str, Table],
        factors: Sequence[Factor],
        deadline: float | None,
        relaxed: bool = False,
    ) -> None:
        self.alone = dict(alone)
        self.deadline = deadline
        self.relaxed = relaxed
        self.touching: dict[str, list[Factor]] = {name: [] for name in alone}
        self.age = dict.fromkeys(alone, 0)
        self.place = {name: number for number, name in enumerate(alone)}
        self.steps: list[tuple[str, list[Factor], Table]] = []
        self.constant = 0.0
        # results by what they were made of; the arrays are kept, so that their identities stay theirs
        self.memo: dict[object, Any] = {}
        self.held: list[object] = []
        for factor in factors:
            self.add(factor)

    def run(self) -> tuple[float, dict[str, int]] | None:
        """Eliminate and walk back: the least cost and a choice that has it; None if a table passes the cap."""
        looks: dict[str, object] = {}
        alike: dict[object, list[str]] = {}
        queue: list[tuple[tuple[int, int, float], int, int, int, str]] = []

        def rank(names: Iterable[str]) -> None:
            for name in names:
                looks[name] = self.look(name)
                alike.setdefault(looks[name], []).append(name)
            for name in names:
                look = ("work", looks[name])
                if look not in self.memo:
                    self.memo[look] = self.work(name, self.touching[name])
                growth, work = self.memo[look]
                most = len(alike[looks[name]])
                # of those that make no table larger, or about as much larger, first the one of which there are most
                tidy = (_magnitude(growth), -most, growth)
                heappush(queue, (tidy, work, self.age[name], self.place[name], name))

        rank(self.alone)
        while looks:
            _, work, age, _, first = heappop(queue)
            if first not in looks or age != self.age[first]:
                continue
            if work > WORK_CAP and not self.relaxed:
                return None
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise Late
            # all that look the same go at once, before what is around them comes to look different
            look = looks[first]
            changed: dict[str, None] = {}
            for name in alike.pop(look):
                if looks.get(name) == look and name not in changed:
                    del looks[name]
                    changed |= dict.fromkeys(self.eliminate(name, work > WORK_CAP))
            rank([other for other in changed if other in looks])
        return self.constant, {} if self.relaxed else self.walk_back()

    def look(self, name: str) -> object:
        """What the tables around a variable are: where it is the same, one elimination is that of another."""
        mine = self.touching[name]
        return (id(self.alone[name]), *[(id(f.table), f.scope.index(name), id(f.classes[0])) for f in mine])

    def joint(self, name: str, factors: Sequence[Factor]) -> tuple[Classes, int]:
        """Classes of a variable that some factors tell apart together, and how many."""
        seen = {}
        for factor in factors:
            for one, mine in zip(factor.scope, factor.classes):
                if one == name:
                    seen[id(mine)] = mine
        key = tuple(sorted(seen)) if len(seen) > 1 else next(iter(seen))
        if key not in self.memo:
            distinct = list(seen.values())
            self.held += distinct
            classes, count = _numbered(distinct[0])
            for other in distinct[1:]:
                wider, finest = _numbered(classes * (int(other.max()) + 1) + other)
                # where one tells all apart that both do, it stands for both: known arrays are known tables
                other, others = _numbered(other)
                classes = next((one for one, n in ((classes, count), (other, others)) if n == finest), wider)
                count = finest
            self.memo[key] = (classes, count)
        return self.memo[key]  # type: ignore[no-any-return]

    def add(self, factor: Factor) -> None:
        """Count one more factor; two of the same variables become one where that is no larger."""
        for other in self.touching[factor.scope[0]]:
            if set(other.scope) == set(factor.scope):
                classes = [self.joint(name, (other, factor)) for name in factor.scope]
                if prod(count for _, count in classes) <= max(other.table.size, factor.table.size):
                    for name in dict.fromkeys(other.scope):
                        self.touching[name].remove(other)
                    factor = self.together(other, factor, classes)
                    break
        for name in dict.fromkeys(factor.scope):
            self.touching[name].append(factor)

    def together(self, one: Factor, other: Factor, joint: Sequence[tuple[Classes, int]]) -> Factor:
        """The sum of two factors of the same variables."""
        parts = ((id(f.table), *map(id, f.classes)) for f in (one, other))
        order = tuple(one.scope.index(name) for name in other.scope)
        key = ("together", order, *parts, *(id(classes) for classes, _ in joint))
        if key not in self.memo:
            self.held += [one, other]
            rows = {name: _examples(*each) for name, each in zip(other.scope, joint)}
            tables = [
                _spread(
                    f.scope, f.table[np.ix_(*(c[rows[n]] for n, c in zip(f.scope, f.classes)))], other.scope
                )
                for f in (one, other)
            ]
            self.memo[key] = tables[0] + tables[1]
        return Factor(other.scope, self.memo[key], tuple(classes for classes, _ in joint))

    def work(self, name: str, factors: Sequence[Factor]) -> tuple[float, int]:
        """How much larger tables get when a variable goes from some factors, and how many sums that takes at most."""
        seen: dict[tuple[str, int], int] = {}
        sizes = 0
        for factor in factors:
            sizes += factor.table.size
            for one, classes, size in zip(factor.scope, factor.classes, factor.table.shape):
                seen[one, id(classes)] = size
        counts: dict[str, int] = {name: 1}
        for (one, _), size in seen.items():
            counts[one] = min(counts.get(one, 1) * size, len(self.alone[one]))
        work = prod(counts.values())
        return work / counts[name] - sizes, work

    def eliminate(self, name: str, split: bool) -> list[str]:
        """Put the least over all values of a variable in its place; gives the variables that saw a change."""
        mine, costs = self.touching.pop(name), self.alone[name]
        if not self.relaxed:
            self.steps.append((name, mine, costs))
        changed = list(dict.fromkeys(one for factor in mine for one in factor.scope if one != name))
        for factor in mine:
            for other in changed:
                if other in factor.scope:
                    self.touching[other].remove(factor)
        groups = self.buckets(name, mine) if split else [mine]
        for number, group in enumerate(groups):
            # only one of several groups may count what the variable costs by itself
            self.put(name, group, costs if number == 0 else np.zeros_like(costs))
        for other in changed:
            self.age[other] = self.age[other] + 1
        return changed

    def buckets(self, name: str, factors: Sequence[Factor]) -> list[list[Factor]]:
        """The factors of a variable in groups that are within the cap, or single where even that is not."""
        groups: list[list[Factor]] = []
        for factor in factors:
            for group in groups:
                if self.work(name, [*group, factor])[1] <= WORK_CAP:
                    group.append(factor)
                    break
            else:
                groups.append([factor])
        return groups

    def put(self, name: str, group: list[Factor], costs: Table) -> None:
        """Add the least over a variable of some factors to what is left."""
        others = list(dict.fromkeys(one for factor in group for one in factor.scope if one != name))
        if not others:
            inner = sum(factor.table[factor.classes[0]] for factor in group)
            self.constant += float((costs + inner).min())
            return
        numbers = {one: number for number, one in enumerate(others)} | {name: -1}
        key = (
            "least",
            id(costs),
            *((id(f.table), *map(id, f.classes), *(numbers[one] for one in f.scope)) for f in group),
        )
        if key not in self.memo:
            self.held += [costs, *group]
            self.memo[key] = self.least(name, others, group, costs)
        table, classes = self.memo[key]
        if len(others) == 1:
            (other,) = others
            added = ("added", id(self.alone[other]), id(table), id(classes[0]))
            if added not in self.memo:
                self.held += [self.alone[other], table, classes[0]]
                self.memo[added] = self.alone[other] + table[classes[0]]
            self.alone[other] = self.memo[added]
            return
        self.add(Factor(tuple(others), table, classes))

    def least(
        self, name: str, others: list[str], group: list[Factor], costs: Table
    ) -> tuple[Table, tuple[Classes, ...]]:
        """The joint table of some factors with one variable minimised away, and what the others' classes are."""
        mine, count = self.joint(name, group)
        # of the values that look alike from everywhere the cheapest
        order = np.lexsort((costs, mine))
        first = order[np.searchsorted(mine[order], np.arange(count))]
        theirs = [self.joint(other, group) for other in others]
        examples = {other: _examples(*one) for other, one in zip(others, theirs)}
        tables = []
        for factor in group:
            rows = {name: first} | examples
            index = np.ix_(*(classes[rows[one]] for one, classes in zip(factor.scope, factor.classes)))
            tables.append((factor.scope, factor.table[index]))
        shape = tuple(size for _, size in theirs)
        scope = (name, *others)
        spread = [costs[first].reshape(-1, *(1,) * len(others))]
        spread += [_spread(axes, table, scope) for axes, table in tables]
        return _least_sum(spread, (count, *shape)), tuple(classes for classes, _ in theirs)

    def walk_back(self) -> dict[str, int]:
        """The choice of every variable, the last eliminated first."""
        chosen: dict[str, int] = {}
        for name, mine, costs in reversed(self.steps):
            seen = [
                tuple(int(c[chosen[one]]) if one != name else -1 for one, c in zip(f.scope, f.classes))
                for f in mine
            ]
            key = ("back", id(costs), *((id(f.table), *map(id, f.classes), s) for f, s in zip(mine, seen)))
            if key not in self.memo:
                total = costs
                for factor, at in zip(mine, seen):
                    index = tuple(
                        classes if place < 0 else place for classes, place in zip(factor.classes, at)
                    )
                    total = total + factor.table[index]
                self.memo[key] = int(total.argmin())
            chosen[name] = self.memo[key]
        return chosen


def _magnitude(value: float) -> int:
    """The order of magnitude of what tables grow by, a power of four; 0 if they do not."""
    return (int(value).bit_length() + 1) // 2 if value > 0 else 0


def _numbered(classes: Classes) -> tuple[Classes, int]:
    """Classes numbered without gaps, and how many; the same array if they already are."""
    used = np.unique(classes)
    count = len(used)
    if used[-1] == count - 1:
        return classes, count
    return np.searchsorted(used, classes), count


def _examples(classes: Classes, count: int) -> Classes:
    """One value of each class."""
    found = np.empty(count, dtype=np.int64)
    found[classes] = np.arange(len(classes))
    return found


def _spread(axes: tuple[str, ...], table: Table, wanted: tuple[str, ...]) -> Table:
    """A table with its axes in the order of ``wanted``, axes it lacks of length 1."""
    order = sorted(range(len(axes)), key=lambda axis: wanted.index(axes[axis]))
    sizes = iter(table.transpose(order).shape)
    present = set(axes)
    return table.transpose(order).reshape(tuple(next(sizes) if one in present else 1 for one in wanted))


def _least_sum(tables: list[Table], shape: tuple[int, ...]) -> Table:
    """The least over the first axis of the sum of tables that broadcast to ``shape``.

    The sum is never held whole: slices of it that fit into a processor's cache are added up and compared.
    """
    count, *rest = shape
    first, *others = _folded(tables)
    if not others:
        return np.asarray(np.broadcast_to(first, shape).min(axis=0))
    second, *others = others
    result = np.full(rest, np.inf)
    step = max(1, IN_CACHE // prod(rest))
    scratch = np.empty((min(step, count), *rest))
    for start in range(0, count, step):
        total = scratch[: min(step, count - start)]
        np.add(first[start : start + step], second[start : start + step], out=total)
        for other in others:
            np.add(total, other[start : start + step], out=total)
        np.minimum(result, total[0] if step == 1 else total.min(axis=0), out=result)
    return result


def _folded(tables: list[Table]) -> list[Table]:
    """The same sum of fewer tables: each is added to one that has all its axes, if there is one."""
    left: list[Table] = []
    for table in sorted(tables, key=lambda one: -one.size):
        for number, other in enumerate(left):
            if all(mine in (1, theirs) for mine, theirs in zip(table.shape, other.shape)):
                left[number] = other + table
                break
        else:
            left.append(table)
    return left
