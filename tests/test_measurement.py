"""What `measure` sees on a cluster whose scheduler and workers are processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

pytest.importorskip("distributed")

from distributed import Client, wait

from dask_eindecomp import EinDecomp, Topology, explain, measure
from dask_eindecomp.cost import Traffic
from dask_eindecomp.measurement import DELIVERY, OUTSIDE, Measured, Record, Seen, Spent, _fill
from dask_eindecomp.partition import Partition
from dask_eindecomp.plan import Choice, Plan
from tests.cluster import machines

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore:Sending large graph")]
FORCED = EinDecomp(force=True)


@pytest.fixture(scope="module")
def three_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Three workers whose scheduler has the plugin."""
    folder = tmp_path_factory.mktemp("cluster")
    with (
        machines(folder, preload="dask_eindecomp.scheduler") as mine,
        Client(mine.address, set_as_default=False) as client,
    ):
        for _ in range(3):
            mine.add_worker()
        client.wait_for_workers(3, timeout=60)
        yield client


@pytest.fixture
def client(three_workers: Client) -> Iterator[Client]:
    """Their client, the current one of this test."""
    with three_workers.as_current(), dask.config.set(scheduler=three_workers.get):
        yield three_workers


def held(client: Client, *shape: int, seed: int) -> da.Array:
    """An array whose blocks lie on the workers in turn."""
    values = np.random.default_rng(seed).normal(size=shape)
    array = da.from_array(values, chunks=tuple(-(-extent // 4) for extent in shape)).persist()
    wait(array)
    return array


def sent(client: Client) -> int:
    return sum(client.run(lambda dask_worker: dask_worker.transfer_outgoing_bytes_total).values())


def recorders(client: Client) -> list[str]:
    names = client.run_on_scheduler(lambda dask_scheduler: [*dask_scheduler.plugins])
    return [name for name in names if name.startswith("eindecomp-measure")]


def test_bytes_messages_and_tasks_are_those_predicted_expression_by_expression(client: Client) -> None:
    a, b, c = (held(client, 240, 240, seed=seed) for seed in range(3))
    result = da.exp(a @ b) @ c + 1
    plan = explain(result, hook=FORCED)
    before = sent(client)
    with dask.config.set(array_optimize=FORCED), measure(client, plan) as measured:
        done = result.persist()
        wait(done)
    moved = sent(client) - before
    assert measured.total.nbytes == moved > 0
    assert measured.predicted.keys() == measured.happened.keys()
    assert len(measured.predicted) < len(plan.choices) + 1  # some are computed inside others' tasks
    for name, predicted in measured.predicted.items():
        happened = measured.happened[name]
        assert (happened.nbytes, happened.messages, happened.tasks) == (
            predicted.nbytes,
            predicted.messages,
            predicted.tasks,
        ), name
        assert happened.seconds > 0
    assert measured.happened[DELIVERY].tasks == plan.delivery.tasks > 0
    assert "inside" in str(measured) and "everything" in str(measured)
    assert "shipped x" not in str(measured) and "tasks x" not in str(measured)
    assert not recorders(client)


def test_a_worker_remembers_all_it_fetches_meanwhile_and_as_little_as_before_afterwards(
    client: Client,
) -> None:
    def forget(dask_worker: Any) -> None:
        dask_worker.transfer_incoming_log = type(dask_worker.transfer_incoming_log)(maxlen=0)

    client.run(forget)
    a = held(client, 240, 240, seed=5)
    plan = explain(a @ a, hook=FORCED)
    before = sent(client)
    with dask.config.set(array_optimize=FORCED), measure(client, plan) as measured:
        done = (a @ a).persist()
        wait(done)
    assert measured.total.nbytes == sent(client) - before > 0
    lengths = client.run(lambda dask_worker: dask_worker.transfer_incoming_log.maxlen)
    assert set(lengths.values()) == {0}


def test_what_is_no_part_of_the_plan_is_told_apart(client: Client) -> None:
    a = held(client, 120, 120, seed=1)
    plan = explain(a @ a, hook=FORCED)
    with measure(client, plan) as measured:  # the hook is off
        wait((a @ a).persist())
    assert measured.happened.keys() == {OUTSIDE}
    assert measured.happened[OUTSIDE].tasks > 0
    assert "no task of a plan ran" in str(measured)


def test_what_is_left_to_dask_is_compared_with_the_graph_as_it_came(client: Client) -> None:
    a = held(client, 120, 120, seed=1)
    hook = EinDecomp(margin=1.0, topology=explain(a @ a).topology)
    plan = explain(a @ a, hook=hook)
    assert plan.verdict.startswith("left to Dask") and plan.baseline is not None
    with dask.config.set(array_optimize=hook), measure(client, plan) as measured:
        wait((a @ a).persist())
    assert measured.happened.keys() == {OUTSIDE} and not measured.predicted
    assert measured.expected.tasks == plan.baseline.tasks == measured.total.tasks
    assert "left to Dask" in str(measured)


def test_the_peak_of_memory_is_seen(client: Client) -> None:
    plan = explain(held(client, 8, 8, seed=2))
    with measure(client, plan) as measured:
        wait(da.random.random((5000, 5000), chunks=-1).persist())
    assert 180e6 < measured.peak_nbytes < 320e6
    assert measured.happened[OUTSIDE].peak_nbytes <= measured.peak_nbytes


def test_an_error_inside_leaves_nothing_behind(client: Client) -> None:
    plan = explain(held(client, 8, 8, seed=3))
    with pytest.raises(KeyError), measure(client, plan):
        raise KeyError("what the user did")
    assert not recorders(client)
    names = client.run(_samplers)
    assert not any(names.values())


def _samplers() -> list[str]:
    import threading

    return [thread.name for thread in threading.enumerate() if thread.name == "eindecomp-memory"]


def test_an_asynchronous_client_is_refused(client: Client) -> None:
    async def run() -> None:
        async with Client(client.scheduler.address, asynchronous=True, set_as_default=False) as own:
            with measure(own, plan):
                pass

    plan = explain(held(client, 8, 8, seed=4))
    with pytest.raises(TypeError, match="asynchronous"):
        asyncio.run(run())


# what is made of what was seen


def choice(name: str, inside: str = "", **traffic: int) -> Choice:
    return Choice(name, "ij->ij", Partition((("i", (2,)),)), Traffic(**traffic), seconds=1.0, inside=inside)


def plan_of(*choices: Choice) -> Plan:
    return Plan(choices, 1.0, "seconds", Topology(workers=2), verdict="applied: forced")


def step(start: float, stop: float) -> dict[str, Any]:
    return {"action": "compute", "start": start, "stop": stop}


def test_a_piece_counts_for_the_first_that_reads_it_on_its_worker() -> None:
    record = Record(
        purposes={"x": "join X", "y": "join Y", "cut": "repartition A", "out": "repartition Y"},
        sources={"x": ("cut", "far"), "y": ("far",), "cut": ("a",), "out": ("y",), "mine": ()},
        runs=[
            ("cut", "w", (step(0, 1),)),
            ("x", "v", (step(1, 2), step(2, 4))),
            ("y", "v", (step(5, 6),)),
            ("y", "w", (step(3, 6),)),
            ("out", "v", (step(6, 7),)),
            ("mine", "v", (step(6, 8),)),
        ],
    )
    seen = {
        "v": Seen(100, [(1.5, 150), (5.5, 170), (9.0, 500)], [{"cut": 8, "far": 2}, {"odd": 3}]),
        "w": Seen(10, [(0.5, 30)], [{"far": 2}]),
        "late": None,
    }
    found = Measured(plan_of(choice("X", nbytes=10, tasks=1), choice("Y", inside="X")))
    _fill(found, record, seen)
    # Y is computed inside X's tasks, so all that is said of it is said of X
    assert found.happened["X"] == Spent(8 + 2 + 2, 3, 4.0, 3, 70)
    assert found.happened[DELIVERY] == Spent(0, 0, 1.0, 1, 0)
    assert found.happened[OUTSIDE] == Spent(3, 1, 2.0, 1, 0)
    assert found.predicted == {"X": Spent(10, 0, 2.0, 1, 0)}
    assert found.total == Spent(15, 4, 8.0, 5, 400)


def test_departures_are_told_where_they_matter() -> None:
    found = Measured(plan_of(choice("X", nbytes=4 << 20, tasks=4, peak_nbytes=8 << 20)))
    found.predicted = {"X": Spent(4 << 20, 4, 1.0, 4, 8 << 20), "Z": Spent()}
    found.happened = {"X": Spent(8 << 20, 4, 1.1, 5, 4 << 20), "Z": Spent(2 << 20)}
    found.titles = {"X": "product"}
    _, _, first, last, *_ = str(found).splitlines()
    assert first.split()[0] == "product"
    assert first.endswith("shipped x2.0, peak x0.5")
    assert last.endswith("shipped xinf")
