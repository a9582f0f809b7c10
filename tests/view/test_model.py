"""What page and terminal know after some frames: rates, names, who is gone."""

import msgspec
import pytest

from lorrery.view.figures import Counter, Gauge
from lorrery.view.frame import AdapterRow, Frame, Hello, ResidentRow, Totals
from lorrery.view.model import Model
from lorrery.view.top.tables import TABLES
from tests.view.fake import FakeCluster

(ADAPTERS,) = (table for table in TABLES if table.name == "adapters")
HELLO = Hello("live", "llama-2-7b", "a made-up cluster", "0")


def frames(seconds: float, every: float = 0.5, **arguments: int) -> list[Frame]:
    cluster, made = FakeCluster(**arguments), []
    while cluster.at < seconds:
        cluster.advance(every)
        made.append(cluster.frame())
    return made


def model_of(made: list[Frame]) -> Model:
    model = Model(HELLO)
    for frame in made:
        model.apply(frame)
    return model


@pytest.mark.parametrize("every", [0.1, 0.5, 4.0])
def test_a_rate_is_the_growth_per_second_however_often_frames_come(every: float) -> None:
    counter, at = Counter(), 0.0
    while at < 20:
        counter.push(at, 100 * at)
        at += every
    assert counter.rate(2.0) == pytest.approx(100)
    assert counter.growth(8.0) == pytest.approx(800)


def test_a_count_that_begins_anew_has_no_negative_rate() -> None:
    counter = Counter()
    for at, total in ((0, 0), (1, 500), (2, 3), (3, 13)):
        counter.push(at, total)
    assert counter.rate(10.0) == 10
    assert counter.growth(60.0) == 10


def test_a_count_that_stands_still_has_no_rate_and_is_not_kept_again() -> None:
    counter = Counter()
    for tick in range(1000):
        counter.push(tick / 10, min(tick, 500))
    assert (counter.rate(2.0), counter.growth(60.0)) == (0, 500 - 399)


def test_a_gauge_knows_its_mean_and_what_it_was() -> None:
    gauge = Gauge()
    assert (gauge.mean(10), gauge.before(10)) == (0, None)
    for tick in range(400):
        gauge.push(tick / 10, tick // 100)
    assert gauge.mean(5) == 3
    assert gauge.before(25) == 1
    assert gauge.before(60) is None


def test_names_follow_a_connection_that_numbers_anew() -> None:
    made = frames(3)
    model = model_of(made)
    before = {worker.name for worker in model.workers}
    renamed = msgspec.structs.replace(made[-1], adapters_new=["only"], tenants_new=["one"], at=made[-1].at + 0.1)
    model.begin(HELLO)
    model.apply(renamed)
    assert model.adapter_name(0) == "only"
    assert model.tenant_name(0) == "one"
    assert model.adapter_name(-1) is None
    assert {worker.name for worker in model.workers} == before


def test_a_worker_that_is_gone_is_lost_until_it_is_back_and_one_that_drained_is_not() -> None:
    (made,) = frames(0.5, num_workers=2)
    draining = msgspec.structs.replace(made.workers[0], state="draining", running=[])
    model = model_of([msgspec.structs.replace(made, workers=[draining, made.workers[1]])])
    model.apply(msgspec.structs.replace(made, at=1.0, workers=[]))
    assert [worker.name for worker in model.lost] == ["worker-1"]
    assert model.lost[0].waiting == 0
    model.apply(msgspec.structs.replace(made, at=2.0))
    assert model.lost == []
    model.apply(msgspec.structs.replace(made, at=3.0, workers=[]))
    assert len(model.lost) == 2
    model.apply(msgspec.structs.replace(made, at=640.0, workers=[]))
    assert len(model.lost) == 2


def test_a_clock_that_begins_anew_forgets_what_was() -> None:
    made = frames(20)
    model = model_of(made)
    assert model.ended
    model.begin(HELLO)
    model.apply(msgspec.structs.replace(made[0], totals=Totals()))
    assert (model.at, len(model.ended), len(model.events)) == (made[0].at, len(made[0].ended), len(made[0].events))


def test_an_unloaded_adapter_is_listed_until_its_last_request_ends_and_again_once_it_is_loaded() -> None:
    cluster = FakeCluster()
    cluster.advance(5)
    model = Model(HELLO)
    first = cluster.frame()
    busy = next(row for row in first.adapters if row.running and row.adapter >= 0)
    name = first.adapters_new[busy.adapter]

    def listed(**changes: object) -> bool:
        rows = [] if changes.pop("without_row", False) else [msgspec.structs.replace(busy, **changes)]
        model.apply(msgspec.structs.replace(first, adapters=rows, adapters_new=first.adapters_new * (not model.at)))
        return name in {row.values[0] for row in ADAPTERS.rows(model)}

    assert listed()
    assert listed(unloaded=True)
    assert not listed(unloaded=True, running=0, waiting=0)
    assert listed(without_row=True)  # loaded again, and not yet asked for


@pytest.mark.parametrize(("of_before", "newest", "counts"), [(1, 0, (1, 0)), (0, 1, (1, 0)), (1, 2, (0, 1))])
def test_a_gpu_with_two_versions_of_an_adapter_is_counted_once(
    of_before: int, newest: int, counts: tuple[int, int]
) -> None:
    (made,) = frames(0.5, num_workers=2)
    # An adapter that was unloaded and loaded again; a GPU keeps the version of before until it needs the room.
    rows = [ResidentRow(0, of_before, 8), ResidentRow(0, newest, 16, loaded_in=0.5 * (newest == 2))]
    workers = [msgspec.structs.replace(worker, adapters=rows) for worker in made.workers]
    model = model_of([msgspec.structs.replace(made, workers=workers)])
    (row,) = [row for row in ADAPTERS.rows(model) if row.values[0] == model.adapter_name(0)]
    assert row.values[3:5] == tuple(2 * number for number in counts)
    assert row.values[-1] == (8 if newest == 0 else 16)  # of the one in use, or that comes


def test_a_row_of_an_older_record_is_of_an_adapter_that_is_loaded() -> None:
    assert not msgspec.json.decode(b"[0, 1, 2, 3, 4, 5]", type=AdapterRow).unloaded
