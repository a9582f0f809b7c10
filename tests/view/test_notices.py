"""What is wrong is said, and nothing else: a table of what frames show, and the notices of the last one."""

import msgspec
import pytest

from lorrery.view import frame as f
from lorrery.view.model import Model
from lorrery.view.notices import Notice, Subject, notices
from tests.view.test_model import HELLO, frames, model_of

IDLE = f.Worker("worker-0", 0, "H100-SXM", 1, "ready", [], 0, 0.0, 0, 1000, [], 0, 0.0, "idle", 0, 0.0, 0)
RUNS = f.RunningRow(1, -1, 0, 10, 5)
EMPTY = f.Frame(0.0, [], [], [f.Shard("s:1", True)], [IDLE], 0, 0, [], [], f.Totals(), [], 0, [], 0)
LONG = "a" * 40
ENDED = f.EndedRow(9, 0, -1, 0, 10, 5, 4.0, 1.0, 0.0, 0.5, 0.5, "stop")
"""Joined worker-0's batch at 5 s."""


def at(seconds: float, **changes: object) -> f.Frame:
    return msgspec.structs.replace(EMPTY, at=float(seconds), **changes)


def worker(**changes: object) -> f.Worker:
    return msgspec.structs.replace(IDLE, **changes)


def stuck(second: float, **changes: object) -> f.Frame:
    return at(second, workers=[worker(running=[RUNS], waiting=1200, oldest=second, kv=400)], **changes)


def moving(second: int) -> f.Frame:
    running = [msgspec.structs.replace(RUNS, request=second)]
    return at(second, workers=[worker(running=running, waiting=3, oldest=20.0)])


def growing(second: int) -> f.Frame:
    running = [msgspec.structs.replace(RUNS, request=second)]
    busy = worker(running=running, waiting=2 * second, oldest=second / 2)
    totals = f.Totals(requests=50 * second, finished=48 * second)
    return at(second, workers=[busy, worker(id="worker-1")], totals=totals)


def loaded(second: float, thrash: int, name: str = "sql-lora") -> f.Frame:
    new = [name] if second == 0 else []
    return at(second, adapters_new=new, adapters=[f.AdapterRow(0, 0, 0, 9, 8, thrash)])


def shared(second: int, waiting: int = 20) -> f.Frame:
    rows = [f.TenantRow(0, 2, waiting, 5.0, 100 * second, 0), f.TenantRow(1, 20, 20, 5.0, 1900 * second, 0)]
    return at(second, tenants_new=["small", "greedy"] if second == 0 else [], tenants=rows)


def refused(second: float, number: int) -> f.Frame:
    new = [""] if second == 0 else []
    return at(second, tenants_new=new, tenants=[f.TenantRow(0, 0, 0, 0.0, 0, number)])


def unplaced(second: float, number: int = 2) -> f.Frame:
    return at(second, unplaced=number)


def preempting(second: float, preempted: int) -> f.Frame:
    return at(second, workers=[worker(running=[RUNS], kv=900, preempted=preempted)])


def failing(second: float, text: str) -> f.Frame:
    return at(second, events=[f.EventRow(float(second), "load_failed", text)])


def many_lost(number: int) -> list[f.Frame]:
    return [at(1, workers=[worker(id=f"w-{n}") for n in range(number)]), at(2, workers=[])]


GONE = "worker-0 is gone, since 1:05"
NO_STREAM = "scheduler s:1 is not connected"
ADMITS_NOTHING = "worker-0 admits nothing: 1,200 waiting, the first for 10 s"
CASES: dict[str, tuple[list[f.Frame], list[tuple[str, str]]]] = {
    "a cluster that rests": ([*map(at, range(100))], []),
    "stuck for less than ten seconds": ([*map(stuck, (0.0, 5.0, 9.9))], []),
    "stuck for ten seconds": ([*map(stuck, (0.0, 5.0, 10.0))], [("stuck queue", ADMITS_NOTHING)]),
    "a request came and went between two frames": ([stuck(0.0), stuck(10.0, ended=[ENDED])], []),
    "requests come and go": ([*map(moving, range(20))], []),
    "a lost worker": ([at(1), at(65, workers=[])], [("lost worker", GONE)]),
    "a lost worker is back": ([at(1), at(2, workers=[]), at(3)], []),
    "a lost worker, for a minute": ([at(1), at(2, workers=[]), at(62, workers=[])], []),
    "a worker that drained": ([at(1, workers=[worker(state="draining")]), at(2, workers=[])], []),
    "a lost scheduler": ([at(1, shards=[f.Shard("s:1", False)])], [("lost scheduler", NO_STREAM)]),
    "four lost workers": (
        many_lost(4),
        [("lost worker", "4 workers (w-0, w-1, w-2, ...): gone within the last minute")],
    ),
    "three lost workers": (
        many_lost(3),
        [("lost worker", f"w-{number} is gone, since 0:02") for number in range(3)],
    ),
    "no worker for less than ten seconds": ([*map(unplaced, (0.0, 9.0))], []),
    "no worker": ([*map(unplaced, (0.0, 11.0))], [("no worker", "2 requests without a worker for 11 s")]),
    "a worker for a moment": ([unplaced(0), unplaced(5, 0), unplaced(11)], []),
    "failed loads": (
        [failing(0, "a"), failing(59, "sql-lora on worker-0: no such file")],
        [("failed load", "2 adapter loads failed: sql-lora on worker-0: no such file")],
    ),
    "a failed load, a minute ago": ([failing(0, "a"), at(60)], []),
    "unfair share, but not for long": ([*map(shared, range(29))], []),
    "unfair share": (
        [*map(shared, range(35))],
        [("unfair share", "small gets 5% of the tokens; greedy gets 95%")],
    ),
    "little for one that wants little": ([shared(second, waiting=0) for second in range(35)], []),
    "loaded again before the watch": ([loaded(0, 5), loaded(10, 5)], []),
    "loaded again": (
        [loaded(0, 0), loaded(10, 4)],
        [("thrash", "sql-lora thrashes: loaded again 4 times in the last minute")],
    ),
    "loaded again, more than a minute ago": ([loaded(0, 0), loaded(10, 4), loaded(75, 4)], []),
    "a long name": (
        [loaded(0, 0, LONG), loaded(10, 1, LONG)],
        [("thrash", f"{LONG[:29]}... thrashes: loaded again 1 time in the last minute")],
    ),
    "a growing queue, and an idle worker": (
        [*map(growing, range(40))],
        [
            ("growing queue", "the queue grew from 18 to 78 in 30 s"),
            ("idle worker", "worker-1 is idle, while 78 wait at worker-0"),
        ],
    ),
    "a preemption": (
        [preempting(0, 0), preempting(9, 1)],
        [("preemption", "worker-0 preempted 1 request: KV 90% full")],
    ),
    "a preemption, ten seconds ago": ([preempting(0, 0), preempting(9, 1), preempting(20, 1)], []),
    "refusals": ([refused(0, 1), refused(1, 4)], [("refusals", "(no tenant): 3 requests refused in 10 s")]),
    "refusals, ten seconds ago": ([refused(0, 1), refused(1, 4), refused(12, 4)], []),
    "the bad ones first": (
        [refused(0, 1), msgspec.structs.replace(refused(65, 4), workers=[], shards=[f.Shard("s:1", False)])],
        [
            ("lost scheduler", NO_STREAM),
            ("lost worker", GONE),
            ("refusals", "(no tenant): 3 requests refused in 10 s"),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_notice_is_given_while_its_rule_holds_and_not_before_or_after(name: str) -> None:
    made, expected = CASES[name]
    assert [(notice.rule, notice.title) for notice in notices(model_of(made))] == expected


def test_before_the_first_frame_nothing_is_wrong() -> None:
    assert notices(Model(HELLO)) == []


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (
            [*map(stuck, (0.0, 5.0, 12.0))],
            (
                "Requests wait, the first for 10 s or more, and none has joined the batch for 10 s (now 12 s)."
                " KV is 40% full, 1 run."
            ),
        ),
        (
            [*map(shared, range(35))],
            (
                "It waits, and over 30 s got less than half of both its part of the requests (35%) and an equal share"
                " among 2 tenants (50%)."
            ),
        ),
        (
            [*map(growing, range(40))],
            "It grew by half, and by 10 or more, in 30 s: 1,500 requests came and 1,440 ended.",
        ),
    ],
)
def test_a_notice_says_its_rule_with_figures(made: list[f.Frame], why: str) -> None:
    assert notices(model_of(made))[0].why == why


def test_a_notice_names_what_it_concerns_by_the_key_of_the_model() -> None:
    assert notices(model_of([loaded(0, 0), loaded(10, 4)]))[0].subjects == [Subject("adapter", "sql-lora", "sql-lora")]
    assert notices(model_of([refused(0, 1), refused(1, 4)]))[0].subjects == [Subject("tenant", "", "(no tenant)")]
    (merged,) = notices(model_of(many_lost(5)))
    assert isinstance(merged, Notice)
    assert [subject.key for subject in merged.subjects] == [f"0/w-{number}" for number in range(5)]


def test_many_of_one_rule_are_one_notice() -> None:
    found = notices(model_of(frames(50, num_workers=8, batch=4)))
    assert [notice.rule for notice in found].count("thrash") == 1
