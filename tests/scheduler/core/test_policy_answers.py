"""Answers of policies that make no sense are errors of the policy's: each request ends, and the message names it."""

import re
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.admission import CHECK_IT, BatchLimits
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.checked.batching import CheckedBatching
from lorrery.scheduler.core.checked.queue import CheckedQueue
from lorrery.scheduler.core.facts import Raised
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.plan import Idle, Plan, Ran
from lorrery.scheduler.core.protocols import Batching
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Sequence
from lorrery.simulator.loop.build import build_requests, build_workers
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.constant import LlmMock
from tests.scheduler.core.wrong_batchings import (
    Batch,
    ChunksInFloats,
    ChunksOfAnother,
    ChunksOfNothing,
    ChunksOn,
    ChunksOnce,
    ChunksTooLong,
    ChunksTwice,
    ChunksWithoutSample,
    ForgetsOne,
    Polls,
    PrefetchesAName,
    RunsNoStep,
    RunsNothing,
    WaitsForNan,
    WaitsForNow,
    WaitsOn,
    WaitsWithAdmitted,
)
from tests.scheduler.core.wrong_queues import (
    AdmitsAStranger,
    AdmitsATuple,
    AdmitsByHand,
    AdmitsNone,
    CancelsTheFirst,
    ClaimsToBeEmpty,
    ClaimsToHaveLess,
    DropsAStranger,
    DropsOneAtATime,
    DropsTheCancelled,
    Forgets,
    HoldsBack,
    HoldsBackForLong,
    HoldsForNan,
    HoldsForNothing,
    KeepsTheAdmitted,
    LetsNobodyIn,
    LetsNobodyInFor90Microseconds,
    MarksAdmitted,
    MarksCached,
    MarksCachedAfterwards,
    MarksRequeued,
    MarksServed,
    MovesDeadline,
    NeverAdmits,
    Queue,
    RaisesHalfACharacter,
    RaisesSpeechless,
    RenamesRunning,
    ServesRunning,
    ShortensInPrefill,
    ShortensRunning,
    WakesAtNan,
    WakesBefore,
    WakesInWords,
    WakesLater,
    WakesNow,
    WritesAdapter,
    WritesDropped,
    WritesHandle,
    WritesHandleAfterwards,
    WritesInput,
    WritesInputAfterwards,
    WritesProduced,
    WritesRunning,
)

NUM_REQUESTS = 6


def replica_of(
    settings: ReplicaSettings, make_queue: Callable[[], Queue], make_batching: Callable[[], Batching] | None = None
) -> Replica:
    return build_replica(
        settings,
        make_queue=lambda _: CheckedQueue(make_queue()),
        make_batching=None if make_batching is None else lambda _: CheckedBatching(make_batching()),
    )


def run(
    make_queue: Callable[[], Queue],
    make_batching: Callable[[], Batching] | None = None,
    cancels: Iterable[tuple[int, int]] = (),
) -> list[SimulatedRequest]:
    """Run requests for which there are two seats."""
    settings = ReplicaSettings("fcfs", 1_000, 400, max_num_seqs=2, max_num_batched_tokens=500)
    workers = build_workers(1, settings, LlmMock(), lambda s: replica_of(s, make_queue, make_batching))
    simulation = Simulation(workers, PLACEMENTS["least_loaded"](np.random.default_rng(1)))
    workload = [WorkloadRequest(n, n / 100, 50, 20) for n in range(NUM_REQUESTS)]
    ended = list(simulation.run(build_requests(workload, "Llama-2-7B", {}), cancels))
    assert not simulation.num_open
    assert not workers[0].replica.num_running
    return ended


def of(batch: type[Batch]) -> list[SimulatedRequest]:
    limits = BatchLimits(2, 500)
    return run(Queue, lambda: batch(limits))


def test_what_answers_well_runs() -> None:
    assert {request.outcome for request in [*run(Queue), *of(Batch)]} == {"finished"}


def test_a_run_ends_though_its_policies_name_one_time_after_another() -> None:
    assert {request.outcome for request in [*run(WakesLater), *of(Polls)]} == {"finished"}


@pytest.mark.parametrize(
    ("queue", "answer"),
    [
        (WakesNow, "a time that is not later than now"),
        (WakesBefore, "a time that is not later than now"),
        (WakesInWords, "TypeError: `wakes_at_ps` answered a str"),
        (WakesAtNan, "TypeError: `wakes_at_ps` answered a float"),
        (AdmitsNone, "TypeError: `admit` answered None; it must be a list"),
        (AdmitsATuple, "TypeError: `admit` answered a tuple; it must be a list"),
        (Forgets, "the queue has lost requests"),
        (WritesInput, "the queue changed input_tokens of a request; it may only read requests"),
        (WritesInputAfterwards, "the queue changed input_tokens of a request"),
        (WritesHandleAfterwards, "the queue changed handle of a request"),
        (WritesHandle, "the queue changed handle of a request"),
        (WritesProduced, "the queue changed produced_tokens of a request"),
        (WritesAdapter, "the queue changed adapter of a request"),
        (WritesDropped, "the queue changed arrived_ps of a request"),
        (MarksCached, "the queue changed computed_tokens of a request"),
        (MarksCachedAfterwards, "the queue changed computed_tokens of a request"),
        (MarksServed, "the queue changed first_token_ps of a request"),
        (MarksAdmitted, "the queue changed first_admitted_ps of a request"),
        (MarksRequeued, "the queue changed num_requeues of a request"),
        (MovesDeadline, "the queue changed deadline_ps of a request"),
        (AdmitsAStranger, "`admit` admitted a request that does not wait in this queue"),
        (AdmitsByHand, "requests enter it by `admission.admit` alone"),
    ],
)
def test_a_queue_whose_answer_makes_no_sense_has_raised(queue: type[Queue], answer: str) -> None:
    ended = run(queue)
    assert len(ended) == NUM_REQUESTS
    failed = [request for request in ended if request.outcome == "failed"]
    assert failed
    for request in failed:
        assert f"policy {queue.__module__}:{queue.__qualname__} under " in request.detail
        assert answer in request.detail
        assert request.detail.endswith(CHECK_IT)


@pytest.mark.parametrize(
    ("queue", "batching"),
    [
        (WritesRunning, "continuous"),
        (WritesRunning, "chunked"),
        (ShortensRunning, "continuous"),
        (RenamesRunning, "continuous"),
        (ServesRunning, "continuous"),
        (ShortensInPrefill, "chunked"),
    ],
)
def test_what_a_queue_changes_in_a_running_request_is_put_back_and_an_error(
    queue: type[WritesRunning], batching: str
) -> None:
    settings = ReplicaSettings("fcfs", 1_000, 400, batching=batching, max_num_seqs=4, max_num_batched_tokens=60)
    workers = build_workers(1, settings, LlmMock(), lambda s: replica_of(s, queue))
    simulation = Simulation(workers, PLACEMENTS["least_loaded"](np.random.default_rng(1)))
    workload = [WorkloadRequest(n, n / 100, 50, 20) for n in range(NUM_REQUESTS)]
    ended = list(simulation.run(build_requests(workload, "Llama-2-7B", {})))
    assert not simulation.num_open
    finished, failed = ([one for one in ended if one.outcome == outcome] for outcome in ("finished", "failed"))
    assert failed
    for request in failed:
        assert f"the queue changed {queue.field} of a running request; it may only read requests" in request.detail
        assert request.detail.endswith(CHECK_IT)
    assert [request.output_tokens for request in finished] == [20] * (NUM_REQUESTS - len(failed))


@pytest.mark.parametrize(("prompt", "answer"), [(8, ""), (40, "the queue changed computed_tokens of a request")])
def test_what_a_cache_says_of_a_prompt_is_no_change(prompt: int, answer: str) -> None:
    """A queue that marks prompts itself is found beside a prefix cache too."""
    settings = ReplicaSettings(
        "fcfs", 1_000, 400, memory="paged", prefix_cache="blocks", block_size=4, max_num_seqs=2,
        max_num_batched_tokens=500,
    )  # fmt: skip
    queue = MarksCachedAfterwards() if answer else Queue()
    worker = Member("w", replica_of(settings, lambda: queue), NEVER)
    for handle in range(2):
        worker.submit(Sequence(handle, prompt, 1, 0, prompt_token_ids=range(prompt)), 0)
        plan = worker.plan(handle)
        messages = [event.message for event in plan.events if isinstance(event, Raised)]
        assert [answer in message for message in messages] == [True] * bool(answer)
        if isinstance(plan, Plan):
            worker.commit(plan, Ran(1, handle + 1, [(handle, FinishReason.LENGTH)]))
    assert not worker.sequences


@pytest.mark.parametrize(
    ("queue", "ahead"), [(LetsNobodyIn, "1 ps later"), (LetsNobodyInFor90Microseconds, "100,000,000 ps later")]
)
def test_a_queue_that_names_one_time_after_another_in_vain_has_raised(queue: type[Queue], ahead: str) -> None:
    ended = run(queue)
    assert [request.outcome for request in ended] == ["failed"] * NUM_REQUESTS
    for request in ended:
        assert f"policy {queue.__module__}:{queue.__qualname__} under " in request.detail
        assert re.search(f"a time (10,000|1,000|100) times in a row, on average at most {ahead}", request.detail)
        assert request.detail.endswith(CHECK_IT)


def test_the_decision_that_is_one_too_many_is_counted_not_timed() -> None:
    worker = member(LetsNobodyIn())
    worker.submit(Sequence(0, 50, 20, 0), 0)
    late_ps = 10**9  # as in a live scheduler, which gets to each decision after its time
    times = [n * late_ps for n in range(10_000)]
    assert not [message for at_ps in times for message in raised(worker, at_ps)]
    assert len(raised(worker, times[-1])) == 1  # the decision after that answer, which is due at once
    assert not worker.sequences
    # The same queue may try the next requests' patience a tenth as often.
    worker.submit(Sequence(1, 50, 20, times[-1]), times[-1])
    again = [message for _ in range(1_001) for message in raised(worker, times[-1])]
    assert len(again) == 1
    assert "1,000 times in a row" in again[0]


def test_a_queue_that_polled_too_often_once_may_still_name_times_of_use() -> None:
    queue = LetsNobodyIn()
    worker = member(queue)
    worker.submit(Sequence(0, 50, 20, 0), 0)
    assert len([message for _ in range(10_001) for message in raised(worker, 0)]) == 1
    queue.ahead_ps = 100 * 10**6
    worker.submit(Sequence(1, 50, 20, 0), 0)
    assert not [message for n in range(3_000) for message in raised(worker, n * queue.ahead_ps)]
    assert worker.sequences


@pytest.mark.parametrize("queue", [HoldsBack, HoldsBackForLong, WakesLater])
def test_a_queue_may_hold_requests_back_until_times_that_it_names(queue: type[Queue]) -> None:
    assert {request.outcome for request in run(queue)} == {"finished"}


def test_times_in_vain_are_counted_anew_once_a_request_was_dropped() -> None:
    worker = member(DropsOneAtATime())
    for handle in range(10_500):
        worker.submit(Sequence(handle, 50, 20, 0), 0)
    assert not [message for at_ps in range(10_500) for message in raised(worker, at_ps)]
    assert not worker.sequences


def test_a_way_to_batch_that_waits_on_though_requests_run_ends_them() -> None:
    ended = of(WaitsOn)
    assert [request.outcome for request in ended] == ["failed"] * NUM_REQUESTS
    for request in ended:
        assert (
            f"under {WaitsOn.__module__}:WaitsOn raised ValueError: `choose` answered a Wait 10,000 times"
            in request.detail
        )


def test_strict_slora_polls_a_queue_that_lets_nobody_in_for_as_long_as_it_likes() -> None:
    settings = ReplicaSettings("fcfs", 1_000, 400, batching="slora_loop", limits="slora", strict=True)
    worker = Member("w", replica_of(settings, lambda: NeverAdmits(strict=True)), NEVER)
    worker.submit(Sequence(0, 50, 20, 0), 0)
    at_ps = 0
    for _ in range(25_000):
        decision = worker.plan(at_ps)
        assert isinstance(decision, Idle)
        assert not decision.events
        assert decision.until_ps is not None
        at_ps = decision.until_ps
    assert at_ps > 200 * 10**12


@pytest.mark.parametrize(
    ("queue", "answer"),
    [
        (HoldsForNothing, "`holds_for` answered less than 1"),
        (HoldsForNan, "TypeError: `holds_for` answered a float; it must be an int"),
    ],
)
def test_an_answer_for_no_step_is_refused_where_memory_is_full(queue: type[Queue], answer: str) -> None:
    settings = ReplicaSettings("fcfs", 100, 90, max_num_seqs=2, max_num_batched_tokens=500)
    workers = build_workers(1, settings, LlmMock(), lambda s: replica_of(s, queue))
    simulation = Simulation(workers, PLACEMENTS["least_loaded"](np.random.default_rng(1)))
    workload = [WorkloadRequest(n, n / 100, 50, 20) for n in range(NUM_REQUESTS)]
    ended = list(simulation.run(build_requests(workload, "Llama-2-7B", {})))
    assert len(ended) == NUM_REQUESTS
    assert any(answer in request.detail for request in ended)


def test_a_queue_whose_len_is_wrong_ends_its_requests_and_rests() -> None:
    worker = member(ClaimsToHaveLess())
    worker.submit(Sequence(0, 50, 20, 0), 0)
    assert raised(worker, 0)
    assert not worker.sequences
    decision = worker.plan(1)
    assert isinstance(decision, Idle)
    assert decision.until_ps is None
    worker.submit(Sequence(1, 50, 20, 1), 1)
    assert any("__len__() should return >= 0" in message for message in raised(worker, 1))


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        (RaisesSpeechless, "raised SpeechlessError: (its message raised KeyError)"),
        (RaisesHalfACharacter, r"raised ValueError: \ud800"),
    ],
)
def test_an_error_whose_message_cannot_be_shown_is_told_all_the_same(queue: type[Queue], message: str) -> None:
    ended = run(queue)
    assert {request.outcome for request in ended} == {"failed"}
    assert all(request.detail.endswith(message) for request in ended)


def test_requests_of_a_queue_that_says_it_has_none_end_once() -> None:
    worker = member(ClaimsToBeEmpty())
    worker.submit(Sequence(0, 50, 20, 0), 0)
    (message,) = raised(worker, 0)
    assert message.endswith(f"they neither run nor wait, or its len() leaves them out; {CHECK_IT}")
    assert not worker.sequences
    worker.submit(Sequence(1, 50, 20, 1), 1)
    plan = worker.plan(1)
    assert isinstance(plan, Plan)
    assert [sequence.handle for sequence in plan.joins] == [1]


def test_a_request_that_is_dropped_after_its_end_has_ended_once() -> None:
    last = NUM_REQUESTS - 1
    ended = run(DropsTheCancelled, cancels=[(60_000_000_000, last)])
    outcomes = {request.handle: request.outcome for request in ended}
    assert outcomes == {n: "cancelled" if n == last else "finished" for n in range(NUM_REQUESTS)}
    assert len(ended) == NUM_REQUESTS


def member(queue: Queue) -> Member:
    settings = ReplicaSettings("fcfs", 1_000, 400, max_num_seqs=2, max_num_batched_tokens=500)
    return Member("w", replica_of(settings, lambda: queue), NEVER)


def raised(worker: Member, at_ps: int) -> list[str]:
    return [event.message for event in worker.plan(at_ps).events if isinstance(event, Raised)]


def test_a_queue_that_cancels_another_request_than_it_was_asked_for_has_raised() -> None:
    worker = member(CancelsTheFirst())
    for handle in range(4):
        worker.submit(Sequence(handle, 50, 20, 0), 0)
    worker.plan(0)
    worker.cancel(3, 1)
    (message,) = raised(worker, 1)
    assert message.endswith(f"`cancel` answered another request than the one it was asked for; {CHECK_IT}")
    assert set(worker.sequences) == {0, 1}  # those that run


def test_a_request_that_ends_though_its_worker_does_not_have_it_is_told_by_how_it_ends() -> None:
    worker = member(KeepsTheAdmitted())
    worker.submit(Sequence(0, 50, 1, 0), 0)
    plan = worker.plan(0)
    assert isinstance(plan, Plan)
    worker.cancel(0, 10)
    worker.commit(plan, Ran(1, 10, [(0, FinishReason.LENGTH)]))
    (message,) = raised(worker, 10)
    assert message.endswith(f"the queue still has requests that have ended; {CHECK_IT}")
    stranger = member(DropsAStranger())
    stranger.submit(Sequence(0, 50, 1, 0), 0)
    assert raised(stranger, 0)[0].endswith(f"`admit` dropped a request that it does not have; {CHECK_IT}")


@pytest.mark.parametrize(
    ("batch", "answer"),
    [
        (WaitsForNow, "a Wait until now or before"),
        (WaitsForNan, "TypeError: Wait(nan): until_ps must be whole picoseconds, or None"),
        (PrefetchesAName, "TypeError: `choose` answered a Step that would prefetch a str"),
        (ChunksInFloats, "TypeError"),
        (ChunksOnce, "a Step whose `chunks` are a list_iterator; they must be a list"),
        (ChunksOfNothing, "a Step in which nothing runs"),
        (WaitsWithAdmitted, "admitted requests and answered a Wait"),
        (RunsNothing, "a Step in which nothing runs"),
        (RunsNoStep, "a Step of less than one step"),
        (ForgetsOne, "a Step in which nothing runs"),
        (ChunksTwice, "two chunks of one request"),
        (ChunksTooLong, "does not follow on what is computed"),
        (ChunksWithoutSample, "does not say whether it ends its input"),
        (ChunksOfAnother, "a request that is not in prefill"),
        (ChunksOn, "without one chunk that leaves some of its prompt"),
    ],
)
def test_a_way_to_batch_whose_answer_makes_no_sense_has_raised(batch: type[Batch], answer: str) -> None:
    ended = of(batch)
    assert len(ended) == NUM_REQUESTS
    failed = [request for request in ended if request.outcome == "failed"]
    assert failed
    for request in failed:
        assert f"under {batch.__module__}:{batch.__qualname__} raised " in request.detail
        assert answer in request.detail
        # A Wait is refused where it is made; so is a Chunk if the core is compiled.
        assert request.detail.endswith(CHECK_IT) or batch in (WaitsForNan, ChunksInFloats)
