"""What is wrong is said, and nothing else; the limits are the page's."""

import re
from pathlib import Path

import msgspec
import pytest

from lorrery.view import frame as f
from lorrery.view.top import notices as rules
from lorrery.view.top.model import Model
from tests.view.top.test_model import HELLO, frames, model_of

IDLE = f.Worker("worker-0", 0, "H100-SXM", 1, "ready", [], 0, 0.0, 0, 1000, [], 0, 0.0, "idle", 0, 0.0, 0)
RUNS = f.RunningRow(1, -1, 0, 10, 5)
EMPTY = f.Frame(0.0, [], [], [f.Shard("s:1", True)], [IDLE], 0, 0, [], [], f.Totals(), [], 0, [], 0)


def told(*made: f.Frame) -> list[tuple[str, str]]:
    return [(notice.rule, notice.title) for notice in rules.notices(model_of(list(made)))]


def at(seconds: float, **changes: object) -> f.Frame:
    return msgspec.structs.replace(EMPTY, at=seconds, **changes)


def worker(**changes: object) -> f.Worker:
    return msgspec.structs.replace(IDLE, **changes)


def test_a_cluster_that_rests_has_nothing_wrong() -> None:
    assert told(*(at(float(second)) for second in range(100))) == []
    assert rules.notices(Model(HELLO)) == []


def test_a_queue_that_stands_still_for_ten_seconds_is_stuck() -> None:
    def stuck(second: float) -> f.Frame:
        return at(second, workers=[worker(running=[RUNS], waiting=3, oldest=second)])

    assert told(*map(stuck, (0.0, 5.0, 9.0))) == []
    assert told(*map(stuck, (0.0, 5.0, 11.0))) == [
        ("stuck queue", "worker-0 admits nothing: 3 waiting, the first for 11 s")
    ]


def test_a_queue_whose_requests_come_and_go_is_not_stuck() -> None:
    def moving(second: int) -> f.Frame:
        running = [msgspec.structs.replace(RUNS, request=second)]
        return at(float(second), workers=[worker(running=running, waiting=3, oldest=20.0)])

    assert told(*map(moving, range(20))) == []


def test_a_lost_worker_and_a_lost_scheduler_are_told_first() -> None:
    lost = at(2.0, workers=[], shards=[f.Shard("s:1", False)], tenants=[f.TenantRow(0, 0, 0, 0.0, 0, 4)])
    before = at(1.0, tenants_new=["acme"], tenants=[f.TenantRow(0, 0, 0, 0.0, 0, 1)])
    assert [rule for rule, _ in told(before, lost)] == ["lost scheduler", "lost worker", "refusals"]
    assert ("refusals", "acme: 3 requests refused in 10 s") in told(before, lost)


def test_an_adapter_that_is_loaded_again_and_again_thrashes() -> None:
    def loaded(second: float, thrash: int) -> f.Frame:
        new = ["sql-lora"] if second == 0 else []
        return at(second, adapters_new=new, adapters=[f.AdapterRow(0, 0, 0, 9, 8, thrash)])

    assert told(loaded(0, 5), loaded(10, 5)) == []
    assert told(loaded(0, 0), loaded(10, 4)) == [("thrash", "sql-lora thrashes: loaded again 4 x in the last minute")]
    assert told(loaded(0, 0), loaded(10, 4), loaded(75, 4)) == []


def test_a_tenant_that_waits_while_another_has_its_share_is_told() -> None:
    def shared(second: int) -> f.Frame:
        rows = [f.TenantRow(0, 2, 20, 5.0, 100 * second, 0), f.TenantRow(1, 20, 20, 5.0, 1900 * second, 0)]
        return at(float(second), tenants_new=["small", "greedy"] if second == 0 else [], tenants=rows)

    assert told(*map(shared, range(25))) == []
    assert ("unfair share", "small gets 5% of the tokens; greedy gets 95%") in told(*map(shared, range(35)))


def test_a_queue_that_grows_and_a_worker_that_idles_beside_it_are_told() -> None:
    def growing(second: int) -> f.Frame:
        busy = worker(running=[msgspec.structs.replace(RUNS, request=second)], waiting=2 * second, oldest=second / 2)
        return at(float(second), workers=[busy, worker(id="worker-1")])

    assert told(*map(growing, range(40))) == [
        ("growing queue", "the queue grew from 18 to 78 in 30 s"),
        ("idle worker", "worker-1 is idle, while 78 wait at worker-0"),
    ]


def test_preemptions_requests_without_worker_and_failed_loads_are_told() -> None:
    first = at(0.0, unplaced=2, workers=[worker(running=[RUNS], kv=900)])
    failed = [f.EventRow(11.0, "load_failed", "sql-lora on worker-0: no such file")]
    last = at(11.0, unplaced=2, workers=[worker(running=[RUNS], kv=900, preempted=1)], events=failed)
    assert told(first, last) == [
        ("no worker", "2 requests without a worker for 11 s"),
        ("failed load", "1 adapter load failed: sql-lora on worker-0: no such file"),
        ("preemption", "worker-0 preempted 1 request: KV 90% full"),
    ]


def test_many_of_one_rule_are_one_notice() -> None:
    model = model_of(frames(50, num_workers=8, batch=4))
    found = rules.notices(model)
    assert len([notice for notice in found if notice.rule == "thrash"]) <= 3
    assert any(re.match(r"\d+ adapters \(.+, .+, .+, \.\.\.\): loaded again", notice.title) for notice in found)


@pytest.mark.parametrize("name", ["STUCK", "THRASH", "SHARE", "GROWTH", "RECENT"])
def test_the_page_has_the_same_limits(name: str) -> None:
    page = (Path(__file__).parents[3] / "src" / "lorrery" / "view" / "page" / "rules.js").read_text(encoding="utf-8")
    (limit,) = re.findall(rf"const {name}_SECONDS = (\d+)", page)
    assert getattr(rules, f"{name}_SECONDS") == float(limit)


def test_the_page_has_the_same_rules_in_the_same_order() -> None:
    page = (Path(__file__).parents[3] / "src" / "lorrery" / "view" / "page" / "rules.js").read_text(encoding="utf-8")
    listed = re.search(r"const RULES = \[(.*?)\]", page, re.DOTALL)[1]
    camel = [re.sub(r"[A-Z]", lambda match: f"_{match[0].lower()}", name) for name in re.findall(r"\w+", listed)]
    assert [rule.__name__.lstrip("_") for rule in rules._RULES] == camel
