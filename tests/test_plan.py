"""A plan says what was chosen, what it costs and why: as a table, as JSON and as HTML."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from dask_eindecomp.cost import Traffic
from dask_eindecomp.decompose import decompose
from dask_eindecomp.graph import EinGraph
from dask_eindecomp.partition import Partition
from dask_eindecomp.plan import Choice, Plan, readable_bytes
from dask_eindecomp.topology import Topology
from tests import strategies


def choice(name: str = "Z", parts: int = 2, **fields: object) -> Choice:
    """A matmul cut along one label."""
    cuts = Partition.balanced({"i": 4, "j": 4, "k": 4}, {"i": parts})
    return Choice(name, "ij,jk->ik", cuts, **fields)  # type: ignore[arg-type]


def plan(*choices: Choice, **fields: object) -> Plan:
    """A plan for two workers that costs 5 bytes."""
    values: dict[str, object] = {"cost": 5.0, "objective": "bytes", "topology": Topology(workers=2)} | fields
    return Plan(choices, **values)  # type: ignore[arg-type]


def test_a_choice_says_how_many_parts_and_tiles() -> None:
    assert choice().partition == {"i": 2, "j": 1, "k": 1}
    assert choice().tiles == 2


def test_the_traffic_of_a_choice_is_join_aggregate_and_repartition() -> None:
    one = choice(
        join=Traffic(nbytes=1, tasks=2), aggregate=Traffic(nbytes=10), repartition=Traffic(nbytes=100)
    )
    assert one.traffic == Traffic(nbytes=111, tasks=2)


def test_the_traffic_of_a_plan_is_that_of_its_choices_and_the_delivery() -> None:
    whole = plan(
        choice("Y", join=Traffic(nbytes=1, peak_nbytes=8)),
        choice("Z", aggregate=Traffic(nbytes=2, peak_nbytes=9)),
        delivery=Traffic(nbytes=4, tasks=3),
    )
    assert whole.traffic == Traffic(nbytes=7, tasks=3, peak_nbytes=9)


def test_the_seconds_of_a_plan_are_those_of_its_choices_and_the_delivery() -> None:
    whole = plan(choice(seconds=2.0), choice("Y", seconds=1.0), delivery_seconds=2.0)
    assert whole.seconds == 5.0


def test_a_plan_of_nothing_moves_nothing() -> None:
    empty = plan()
    assert empty.traffic == Traffic()
    assert empty.seconds == 0
    assert empty.partitions == {}
    assert str(empty).startswith("planned for 2 workers x 1 thread")


def test_partitions_are_found_by_name() -> None:
    one, two = choice("Y", 1), choice("Z", 4)
    assert plan(one, two).partitions == {"Y": one.cuts, "Z": two.cuts}


def test_partitions_follow_when_choices_are_replaced() -> None:
    assert replace(plan(choice("Y")), choices=(choice("X"),)).partitions.keys() == {"X"}


def test_a_plan_is_cheaper_only_than_a_graph_whose_time_is_known() -> None:
    one = plan(choice(seconds=2.0))
    assert not one.is_cheaper
    assert replace(one, baseline_seconds=2.5).is_cheaper
    assert not replace(one, baseline_seconds=2.0).is_cheaper


def test_it_prints_a_row_an_expression_with_the_labels_that_are_cut() -> None:
    text = str(plan(choice("Y", 1, reason="too small"), choice("Z", 2, join=Traffic(nbytes=41_000_000))))
    lines = text.splitlines()
    assert lines[0].split() == [
        *("expression", "einsum", "partition", "tiles", "join", "aggregate", "repartition", "seconds", "why")
    ]
    assert set(lines[1]) == {"-"}
    assert lines[2].split() == ["Y", "ij,jk->ik", "whole", "1", "0", "0", "0", "0", "too", "small"]
    assert lines[3].split() == ["Z", "ij,jk->ik", "i:2", "2", "41.0", "MB", "0", "0", "0"]


def test_columns_line_up() -> None:
    text = str(plan(choice("a"), choice("much-longer-name", reason="why")))
    rows = text.splitlines()[:4]
    assert (
        len(
            {row.index(column) for row, column in zip(rows[2:], ["ij,jk", "ij,jk"])}
            | {rows[0].index("einsum")}
        )
        == 1
    )


def test_a_reader_is_shown_the_title_rather_than_the_name() -> None:
    text = str(plan(choice("chunk_einsum-0f3a", title="scores")))
    assert "scores" in text
    assert "0f3a" not in text


def test_it_says_whether_it_is_optimal() -> None:
    assert "cost 5, proven optimal" in str(plan(choice()))
    assert "within 12.5% of the optimum" in str(plan(choice(), gap=0.125))


def test_it_names_the_machines_one_or_many() -> None:
    assert "1 worker x 8 threads, objective bytes" in str(plan(topology=Topology.of_threads(8)))
    assert "2 workers x 1 thread," in str(plan())


def test_the_graph_as_it_came_stands_beside_it() -> None:
    text = str(plan(baseline=Traffic(nbytes=2000, tasks=64, flops=5), baseline_seconds=1.5))
    assert "as it came: 64 tasks, 2.0 kB between workers, 0 on a worker at most, 5 joins, about 1.5 s" in text
    assert "as it came" not in str(plan())


def test_the_verdict_and_what_was_left_alone_come_last() -> None:
    lines = str(plan(verdict="applied", left_alone=(("map-1", "unknown function"),))).splitlines()
    assert lines[-2:] == ["applied", "left alone: map-1: unknown function"]


def test_json_holds_every_figure() -> None:
    whole = plan(
        choice(join=Traffic(nbytes=3, tasks=2), seconds=0.5, reason="no partial results", title="scores"),
        baseline=Traffic(tasks=9),
        baseline_seconds=4.0,
        gap=0.25,
        left_alone=(("map-1", "unknown"),),
        verdict="applied",
    )
    record = json.loads(whole.to_json())
    assert record["cost"] == 5.0
    assert record["objective"] == "bytes"
    assert record["gap"] == 0.25
    assert record["seconds"] == whole.seconds == 0.5
    assert record["traffic"] == whole.traffic.to_dict()
    assert record["baseline"] == Traffic(tasks=9).to_dict()
    assert record["baseline_seconds"] == 4.0
    assert (record["workers"], record["threads"], record["verdict"]) == (2, 1, "applied")
    assert record["left_alone"] == [["map-1", "unknown"]]
    assert record["choices"] == [
        {
            "name": "Z",
            "title": "scores",
            "einsum": "ij,jk->ik",
            "partition": {"i": 2, "j": 1, "k": 1},
            "tiles": 2,
            "join": Traffic(nbytes=3, tasks=2).to_dict(),
            "aggregate": Traffic().to_dict(),
            "repartition": Traffic().to_dict(),
            "seconds": 0.5,
            "reason": "no partial results",
        }
    ]


def test_json_without_a_baseline_has_none() -> None:
    record = json.loads(plan().to_json())
    assert record["baseline"] is None
    assert record["baseline_seconds"] is None


def test_html_escapes_what_users_name() -> None:
    page = plan(choice(title="<b>Z</b>"), left_alone=(("<script>", "a < b"),))._repr_html_()
    assert "<b>" not in page
    assert "<script>" not in page
    assert "&lt;b&gt;Z&lt;/b&gt;" in page
    assert "<code>&lt;script&gt;</code>: a &lt; b" in page
    assert page.count("<tr>") == 2


def test_html_lists_what_was_left_alone_only_if_there_is_any() -> None:
    assert "Left alone" not in plan(choice())._repr_html_()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0"), (1, "1 B"), (999, "999 B"), (1000, "1.0 kB"), (1_500_000, "1.5 MB"), (2 * 10**9, "2.0 GB")],
)
def test_bytes_have_a_unit(nbytes: int, text: str) -> None:
    assert readable_bytes(nbytes) == text


def test_more_than_the_largest_unit_is_still_a_number_of_it() -> None:
    assert readable_bytes(3 * 10**12) == "3.0 TB"
    assert readable_bytes(5 * 10**15) == "5000.0 TB"


@settings(max_examples=50)
@given(strategies.graphs())
def test_any_plan_can_be_read(graph: EinGraph) -> None:
    found = decompose(graph, tiles=4, objective="seconds")
    record = json.loads(found.to_json())
    assert [one["name"] for one in record["choices"]] == list(graph.nodes)
    assert record["traffic"]["nbytes"] == found.traffic.nbytes
    for one in found.choices:
        assert one.einsum in str(found)
    assert found._repr_html_().count("<tr>") == len(graph.nodes) + 1
