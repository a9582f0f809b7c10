"""What is wrong is said, and nothing else: a table of what frames show, and the notices of the last one."""

import msgspec
import pytest

from lorrery.view import frame as f
from lorrery.view.model import Model
from lorrery.view.notices import Notice, Subject, span
from lorrery.view.rules import notices
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
    return at(second, workers=[worker(running=[RUNS], waiting=1200, oldest=second, kv=400, busy=second)], **changes)


def moving(second: int) -> f.Frame:
    running = [msgspec.structs.replace(RUNS, request=second)]
    return at(second, workers=[worker(running=running, waiting=3, oldest=20.0, busy=second)])


def growing(second: int) -> f.Frame:
    running = [msgspec.structs.replace(RUNS, request=second)]
    busy = worker(running=running, waiting=2 * second, oldest=second / 2, busy=second)
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


def preempting(second: float, preempted: int, finished: int = 0) -> f.Frame:
    busy = worker(running=[RUNS], kv=900, preempted=preempted, busy=second)
    return at(second, workers=[busy], totals=f.Totals(preempted=preempted, finished=finished))


def failing(second: float, text: str) -> f.Frame:
    return at(second, events=[f.EventRow(float(second), "load_failed", text)])


def many_lost(number: int) -> list[f.Frame]:
    return [at(1, workers=[worker(id=f"w-{n}") for n in range(number)]), at(2, workers=[])]


def decoding(second: float, *steps: float, batch: int = 8, context: int = 100, gpus: str = "") -> f.Frame:
    """Workers that decode, of which the first has a larger batch and context than the others if asked for."""

    def one(number: int, step: float) -> f.Worker:
        size, prompt = (batch, context) if number == 0 else (8, 100)
        running = [msgspec.structs.replace(RUNS, request=100 * number + n, prompt_tokens=prompt) for n in range(size)]
        gpu = "A10G" if str(number) in gpus else "H100-SXM"
        return worker(id=f"worker-{number}", gpu=gpu, running=running, step=step, kind="decode", busy=second)

    return at(second, workers=[one(number, step) for number, step in enumerate(steps)])


def served(second: float, name: str, counted: int, missed: int) -> f.Frame:
    return at(second, objectives=[f.ObjectiveRow(name, counted, missed)])


def hanging(second: float) -> f.Frame:
    return at(second, workers=[worker(running=[RUNS], step=0.02, busy=min(second, 5.0))])


def late(second: float, share: float) -> f.Frame:
    return at(second, workers=[worker(running=[RUNS], busy=second, late=share * second, tokens=int(second))])


def full(second: float, waiting: int = 5) -> f.Frame:
    running = [msgspec.structs.replace(RUNS, request=int(second))]
    return at(
        second,
        workers=[worker(running=running, kv=950, waiting=waiting, oldest=1.0, busy=second)],
        totals=f.Totals(output_tokens=int(second)),
    )


def backlog(second: int) -> f.Frame:
    running = [msgspec.structs.replace(RUNS, request=second)]
    busy = worker(running=running, waiting=20 + second // 10, oldest=1.0, busy=second, tokens=second)
    return at(second, workers=[busy], totals=f.Totals(output_tokens=second))


def waits(second: float, of_small: float) -> f.Frame:
    """Two tenants; a request of each ends every second."""
    rows = [
        msgspec.structs.replace(ENDED, request=tenant, tenant=tenant, queue=queue)
        for tenant, queue in ((0, of_small), (1, 0.1), (1, 0.1), (1, 0.1), (1, 0.1), (1, 0.1), (1, 0.1))
    ]
    tenants = [f.TenantRow(0, 1, 0, 0.0, 0, 0), f.TenantRow(1, 1, 0, 0.0, 0, 0)]
    return at(second, tenants_new=["small", "greedy"] if second == 0 else [], tenants=tenants, ended=rows)


def faulty(*rules: str) -> f.Frame:
    return at(1, faults=[f.FaultRow(rule, 7) for rule in rules])


def missing(second: float, **changes: object) -> f.Frame:
    return at(second, missing=[f.MissingRow(0, "worker-9", "H100-SXM", 1, 1000, 5.0)], **changes)


def lost_count(second: float, lost: int, **changes: object) -> f.Frame:
    return at(second, totals=f.Totals(workers_lost=lost), **changes)


SLOWER = "worker-0 is 4.0 times slower than its peers: 48 ms a step, theirs 12 ms"
BACKLOG = "more wait than run, 26 against 1, and the queue grows"
GONE = "worker-0 has been gone for 0 s"
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
    "a lost worker, after ten minutes": (
        [at(1, workers=[IDLE, worker(id="w")]), *(at(t, workers=[worker(id="w")]) for t in (2, 602))],
        [("lost worker", "worker-0 has been gone for 10 min")],
    ),
    "a lost worker is replaced": (
        [at(1), at(2, workers=[]), at(3, workers=[worker(id="other")])],
        [],
    ),
    "a worker of another kind is no replacement": (
        [at(1), at(2, workers=[]), at(3, workers=[worker(id="other", gpu="A10G")])],
        [("lost worker", "worker-0 has been gone for 1 s")],
    ),
    "a worker lost before the watch": ([missing(10), missing(12)], [("lost worker", "worker-9 has been gone for 7 s")]),
    "a worker lost before the watch is back": ([missing(10), at(12, workers=[IDLE, worker(id="worker-9")])], []),
    "a worker lost before the watch is replaced": ([missing(10), at(12, workers=[IDLE, worker(id="w")])], []),
    "a worker was lost, and is back": (
        [lost_count(0, 0), lost_count(1, 1, workers=[]), lost_count(2, 1)],
        [("returned worker", "1 worker lost in the last 5 min, and back or replaced since")],
    ),
    "a worker was lost, and is back, five minutes ago": (
        [lost_count(0, 0), lost_count(1, 1, workers=[]), lost_count(2, 1), lost_count(302, 1)],
        [],
    ),
    "a worker four times slower than its peers": (
        [decoding(t, 0.048, 0.012, 0.012, 0.012) for t in range(10)],
        [("slow worker", SLOWER)],
    ),
    "one of two workers is slower": ([decoding(t, 0.048, 0.012) for t in range(10)], [("slow worker", SLOWER)]),
    "slower for less than five steps": ([decoding(t, 0.048, 0.012, 0.012) for t in range(4)], []),
    "as slow as its batch is larger": ([decoding(t, 0.024, 0.012, 0.012, batch=16) for t in range(10)], []),
    "as slow as its context is longer": ([decoding(t, 0.048, 0.012, 0.012, context=400) for t in range(10)], []),
    "slow at a larger batch": (
        [decoding(t, 0.098, 0.012, 0.012, batch=16) for t in range(10)],
        [
            (
                "slow worker",
                SLOWER.replace("4.0", "4.1").replace("48 ms", "98 ms"),
            )
        ],
    ),
    "a GPU of another kind is slower": ([decoding(t, 0.048, 0.012, 0.012, gpus="0") for t in range(10)], []),
    "a worker that was slow": (
        [decoding(t, 0.048 if t < 10 else 0.012, 0.012, 0.012) for t in range(50)],
        [],
    ),
    "a worker hangs": (
        [*map(hanging, range(17))],
        [("stalled worker", "worker-0 stands still: 1 run, and no step has ended for 11 s")],
    ),
    "a worker hung for less than ten seconds": ([*map(hanging, range(15))], []),
    "no ready worker": (
        [at(t, workers=[worker(state="draining")]) for t in (0, 10)],
        [("no worker", "no worker has been ready for 10 s")],
    ),
    "requests wait and no token comes": (
        [at(t, held=3) for t in (0, 30, 61)],
        [("stuck queue", "3 requests waiting, and no token for 1 min")],
    ),
    "a fifth fails": (
        [served(t, "served", 10 * t, 2 * t) for t in range(20)],
        [("error budget", "20% of 190 requests missed the objective 'served' in 19 s")],
    ),
    "as many fail as the budget allows twice": ([served(t, "served", 100 * t, 2 * t) for t in range(20)], []),
    "a fifth are slow to begin": (
        [served(t, "ttft", 10 * t, 2 * t) for t in range(20)],
        [("missed objective", "20% of 190 requests missed the objective 'ttft' in 19 s")],
    ),
    "a router lags": (
        [served(t, "lag", 100 * t, 2 * t) for t in range(20)],
        [("lagging router", "2% of the token frames waited for the router")],
    ),
    "a worker behind its pace": (
        [late(t, 0.05) for t in range(20)],
        [("late worker", "worker-0 is behind its pace by 5%")],
    ),
    "a worker on its pace": ([late(t, 0.01) for t in range(20)], []),
    "a full pool": (
        [*map(full, range(70))],
        [("full KV", "worker-0 is short of KV memory: 95% full, 5 waiting")],
    ),
    "a full pool for which nothing waits": ([full(t, 0) for t in range(70)], []),
    "a backlog that grows slowly": ([*map(backlog, range(70))], [("growing queue", BACKLOG)]),
    "a tenant waits longer than the others": (
        [waits(t, 5.0) for t in range(10)],
        [("starved tenant", "small waits 5.0 s, the mean request 0.8 s")],
    ),
    "a tenant waits a little longer than the others": ([waits(t, 0.9) for t in range(10)], []),
    "a fault is on": ([faulty("refuse,first=3")], [("fault", "a fault is on: refuse,first=3 (7 times so far)")]),
    "two faults are on": (
        [faulty("refuse", "cut,after=5")],
        [("fault", f"a fault is on: {rule} (7 times so far)") for rule in ("refuse", "cut,after=5")],
    ),
    "four faults are on": (
        [faulty("a", "b", "c", "d")],
        [("fault", "4 faults are on: a (7 times so far); b (7 times so far); c (7 times so far); ...")],
    ),
    "a worker that drained": ([at(1, workers=[worker(state="draining")]), at(2, workers=[])], []),
    "a lost scheduler": ([at(1, shards=[f.Shard("s:1", False)])], [("lost scheduler", NO_STREAM)]),
    "four lost workers": (
        many_lost(4),
        [("lost worker", "4 workers (w-0, w-1, w-2, ...): gone, and neither back nor replaced")],
    ),
    "three lost workers": (
        many_lost(3),
        [("lost worker", f"w-{number} has been gone for 0 s") for number in range(3)],
    ),
    "no worker for less than ten seconds": ([*map(unplaced, (0.0, 9.0))], []),
    "no worker": ([*map(unplaced, (0.0, 11.0))], [("no worker", "2 requests without a worker for 11 s")]),
    "a worker for a moment": ([unplaced(0), unplaced(5, 0), unplaced(11)], []),
    "failed loads": (
        [failing(0, "a"), failing(59, "sql-lora on worker-0: no such file")],
        [("failed load", "2 adapter loads failed: sql-lora on worker-0: no such file")],
    ),
    "a failed load, five minutes ago": ([failing(0, "a"), at(300)], []),
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
    "a preemption, ten seconds ago": ([preempting(0, 0), preempting(9, 1), preempting(20, 1, 9)], []),
    "refusals": ([refused(0, 1), refused(1, 4)], [("refusals", "(no tenant): 3 requests refused in 10 s")]),
    "many preemptions, ten seconds ago": (
        [preempting(0, 0), preempting(9, 3), preempting(20, 3, 9)],
        [("preemption", "3 preemptions, 9 requests finished in 5 min")],
    ),
    "refusals, ten seconds ago": (
        [refused(0, 1), refused(1, 4), refused(12, 4)],
        [("refusals", "(no tenant): 100% of its requests refused in 5 min")],
    ),
    "refusals, five minutes ago": ([refused(0, 1), refused(1, 4), refused(302, 4)], []),
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
            [decoding(t, 0.098, 0.012, 0.012, batch=16) for t in range(10)],
            (
                "The median of its decode steps over 30 s is more than 2 times that of the other H100-SXM (2 compared),"
                " longer steps for a larger batch or more context allowed in proportion. It decodes 16 requests with"
                " 1,680 tokens, they 8 with 840."
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


def test_a_lost_worker_that_was_dismissed_is_shown_again_once_it_is_lost_again() -> None:
    model = model_of([missing(10, workers=[IDLE]), at(11, workers=[])])
    model.dismiss_lost()
    model.apply(missing(12, workers=[]))
    assert notices(model) == []
    again = f.MissingRow(0, "worker-9", "H100-SXM", 1, 1000, 13.0)
    for frame in (at(13, workers=[worker(id="worker-9")]), at(14, workers=[], missing=[again])):
        model.apply(frame)
    assert [notice.title for notice in notices(model)] == ["worker-9 has been gone for 1 s"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.9, "59 s"), (300, "5 min"), (125, "2 min 5 s"), (3725, "1 h 2 min")]
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert span(seconds) == text
