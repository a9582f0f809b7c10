"""Plays a workload against a cluster and records the outcome of each request.

*Open loop*: each request is sent at its intended time, however slow the answers are; the schedule is absolute, so a
late send never shifts the next one. *Closed loop*: a fixed number of clients send one request after another, and the
intended send time is the actual one. In both, a later turn of a session is sent one think time after the previous
answer ended, which is its intended time. A session ends at its first failed turn. The clients of a closed loop take
session after session.

The workload is in device seconds; in wall time it takes `time_scale` times as long. Outcomes are in device seconds
again, deadlines in wall time. At most `max_in_flight` requests are open at once; a send that must wait for one to end
is late against its intended time, and counts as late.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lorrery.loadgen.metrics import LoadMetrics
from lorrery.loadgen.reception import Ask, Client, Exchange, Reception, Send
from lorrery.loadgen.workload.arrivals import WARMUP_CONCURRENCY, again_and_again, warmup_requests
from lorrery.loadgen.workload.outcome import INTERRUPTED, OK, RequestOutcome
from lorrery.loadgen.workload.request import WorkloadRequest, sessions

MAX_IN_FLIGHT = 8000
"""Open requests at once; 16 connections of 500 streams."""
WRONG_TOKEN_COUNT = "WRONG_TOKEN_COUNT"  # noqa: S105  a status, no secret
"""Status of a stream that ended well with more or fewer tokens than it was asked for, or than its usage says."""


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """How to play a workload.

    Attributes:
        seed: prompts and outputs are functions of it and the request's index.
        ignore_eos: ask for exactly the true length; otherwise the output ends there by itself.
        max_new_tokens: without `ignore_eos`, ask for this many if the true length is not above it.
        timeout_seconds: deadline of each request, wall time.
        concurrency: clients of the closed loop; None: open loop.
        duration_seconds: closed loop: send nothing new after this many device seconds.
        repeat: closed loop: restart the workload at its end, with new indices and so new prompts.
        warmup_requests: short requests sent and awaited before the run; excluded from all figures.
        max_in_flight: open loop: most requests open at once.
    """

    seed: int = 0
    ignore_eos: bool = True
    max_new_tokens: int | None = None
    timeout_seconds: float = 300.0
    concurrency: int | None = None
    duration_seconds: float | None = None
    repeat: bool = False
    warmup_requests: int = 0
    max_in_flight: int = MAX_IN_FLIGHT


@dataclass(slots=True)
class Tally:
    """Progress of a run; written by the driver, read by a display.

    Attributes:
        num_requests: planned number; 0 if only time limits the run.
    """

    num_requests: int = 0
    num_sent: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_tokens: int = 0
    phase: str = "run"

    @property
    def num_ended(self) -> int:
        """Requests that completed or failed."""
        return self.num_completed + self.num_failed


@dataclass(slots=True)
class Driver:
    """Plays one workload once.

    Args:
        client: open.
        settings: how to play it.
        time_scale: wall seconds per device second.
        metrics: counts all requests sent.

    Attributes:
        num_unsent: turns not sent because an earlier turn of their session failed.
        num_without_usage: completed requests for which the server reported no token count.
    """

    client: Client
    settings: DriveSettings
    time_scale: float
    metrics: LoadMetrics
    tally: Tally = field(default_factory=Tally)
    outcomes: list[RequestOutcome] = field(default_factory=list)
    warmup_outcomes: list[RequestOutcome] = field(default_factory=list)
    interrupted: bool = False
    num_unsent: int = 0
    num_without_usage: int = 0
    _start: float = field(default=0.0, init=False)
    _into: list[RequestOutcome] = field(default_factory=list, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.settings.max_in_flight)

    def stop(self) -> None:
        """Stop sending and cancel open requests; `run` then returns soon. For a signal handler."""
        self.interrupted = True
        for task in self._tasks:
            task.cancel()

    async def warm_up(self, workload: Sequence[WorkloadRequest]) -> None:
        """Send short copies of the workload's first requests and wait for them; their ends are in `warmup_outcomes`."""
        short = warmup_requests(workload, self.settings.warmup_requests)
        self._begin("warm-up", len(short), self.warmup_outcomes)
        await self._play_closed(([one] for one in short), WARMUP_CONCURRENCY, None)

    async def run(self, workload: Sequence[WorkloadRequest]) -> None:
        """Play the workload; return when every sent request has ended, with `outcomes` in the order of their ends."""
        self._begin("run", 0 if self.settings.repeat else len(workload), self.outcomes)
        if not self.interrupted:
            if self.settings.concurrency is None:
                await self._play_open(workload)
            else:
                requests = again_and_again(workload) if self.settings.repeat else iter(workload)
                await self._play_closed(sessions(requests), self.settings.concurrency, self.settings.duration_seconds)

    def _begin(self, phase: str, num_requests: int, into: list[RequestOutcome]) -> None:
        tally = self.tally
        tally.phase, tally.num_requests = phase, num_requests
        tally.num_sent = tally.num_completed = tally.num_failed = tally.output_tokens = 0
        self._into = into
        self._start = time.monotonic()

    async def _play_open(self, workload: Sequence[WorkloadRequest]) -> None:
        async with asyncio.TaskGroup() as group:
            self._own(group.create_task(self._send_at_times(group, workload)))

    async def _play_closed(
        self, requests: Iterator[list[WorkloadRequest]], concurrency: int, duration_seconds: float | None
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                self._own(group.create_task(self._send_in_turn(requests, duration_seconds)))

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_at_times(self, group: asyncio.TaskGroup, workload: Sequence[WorkloadRequest]) -> None:
        for turns in sessions(workload):
            send = self._prepare(turns[0])  # before its time, so that drawing the prompt causes no delay
            intended = self._start + turns[0].at_seconds * self.time_scale
            await asyncio.sleep(0)  # when behind, streams still get their turn between two sends
            await _sleep_until(intended)
            await self._free.acquire()
            self._own(group.create_task(self._play_session(turns, send, intended, None)))

    async def _send_in_turn(self, requests: Iterator[list[WorkloadRequest]], duration_seconds: float | None) -> None:
        until = None if duration_seconds is None else self._start + duration_seconds * self.time_scale
        for turns in requests:  # the iterator is shared: each client takes the next session
            if until is not None and time.monotonic() >= until:
                return
            await self._free.acquire()
            await self._play_session(turns, self._prepare(turns[0]), None, until)

    async def _play_session(
        self, turns: Sequence[WorkloadRequest], send: Send, intended: float | None, until: float | None
    ) -> None:
        """Send the turns of a session in sequence; the first is prepared, and holds one of the places in flight."""
        history: list[Exchange] = []
        for number, request in enumerate(turns):
            if request.turn is not None and number:
                intended = time.monotonic() + request.turn.think_seconds * self.time_scale
                if until is not None and intended >= until:
                    return
                send = self._prepare(request, history)
                await _sleep_until(intended)
                await self._free.acquire()
            reception = Reception(keeps_output=number + 1 < len(turns))
            if not await self._one(request, send, reception, intended):
                self.num_unsent += len(turns) - number - 1
                return
            history.append(Exchange(request, reception))

    def _prepare(self, request: WorkloadRequest, history: Sequence[Exchange] = ()) -> Send:
        settings, asked = self.settings, request.output_tokens
        if not settings.ignore_eos:
            asked = max(settings.max_new_tokens or 0, asked)
        return self.client.prepare(
            Ask(request, settings.seed, settings.ignore_eos, asked, settings.timeout_seconds, tuple(history))
        )

    async def _one(self, request: WorkloadRequest, send: Send, reception: Reception, intended: float | None) -> bool:
        """Send a request, release its place in flight, and return whether it completed as asked."""
        sent = time.monotonic()
        intended = sent if intended is None else intended
        self.tally.num_sent += 1
        self.metrics.request_sent(request.prompt_tokens, (sent - intended) / self.time_scale)
        try:
            await send(reception, self._count_tokens)
        finally:
            self._free.release()
            completed = self._record(request, reception, intended, sent)
        return completed

    def _count_tokens(self, num_tokens: int) -> None:
        self.tally.output_tokens += num_tokens
        self.metrics.tokens_received(num_tokens)

    def _record(self, request: WorkloadRequest, reception: Reception, intended: float, sent: float) -> bool:
        status, detail = self._judge(request, reception)
        finish = reception.finish
        seconds = (np.array(reception.message_seconds, np.float64) - self._start) / self.time_scale
        outcome = RequestOutcome(
            index=request.index,
            prompt_tokens=(finish and finish.prompt_tokens) or request.prompt_tokens,
            intended_seconds=self._device_seconds(intended),
            sent_seconds=self._device_seconds(sent),
            end_seconds=self._device_seconds(time.monotonic()),
            status=status,
            adapter_id=request.adapter_id,
            tenant_id=request.tenant_id,
            message_seconds=seconds,
            message_tokens=np.array(reception.message_tokens, np.int64),
            detail=detail,
            finish_reason=finish.reason if finish else "",
            cached_tokens=finish.cached_tokens if finish else 0,
            queue_seconds=finish.queue_seconds if finish else None,
            worker_id=finish.worker_id if finish else "",
            num_requeues=finish.num_requeues if finish else 0,
            adapter_load_seconds=finish.adapter_load_seconds if finish else None,
            prefill_seconds=finish.prefill_seconds if finish else None,
            decode_seconds=finish.decode_seconds if finish else None,
            token_ids_crc32=reception.crc32,
            priority=request.priority,
        )
        self._into.append(outcome)
        self.tally.num_completed += status == OK
        self.tally.num_failed += status not in (OK, INTERRUPTED)
        self.num_without_usage += status == OK and finish is not None and finish.completion_tokens is None
        self.metrics.request_ended(outcome, completed=status == OK)
        return status == OK

    def _device_seconds(self, monotonic: float) -> float:
        return (monotonic - self._start) / self.time_scale

    def _judge(self, request: WorkloadRequest, reception: Reception) -> tuple[str, str]:
        """Return a request's status and details: a stream that ended well must also have delivered what was asked."""
        finish = reception.finish
        if reception.status != OK or finish is None:
            return reception.status or INTERRUPTED, reception.detail
        received = sum(reception.message_tokens)
        if not received:
            return WRONG_TOKEN_COUNT, "received no token"
        if finish.completion_tokens is None:
            return OK, ""  # the tokens per event are unknown then
        if (self.settings.ignore_eos or self.client.tells_true_length) and received != request.output_tokens:
            return WRONG_TOKEN_COUNT, f"received {received} tokens; {request.output_tokens} were to come"
        if received != finish.completion_tokens:
            return WRONG_TOKEN_COUNT, f"received {received} tokens; usage says {finish.completion_tokens}"
        return OK, ""


async def _sleep_until(at: float) -> None:
    while (left := at - time.monotonic()) > 0:  # noqa: ASYNC110  waits for a time, not for a change
        await asyncio.sleep(left)
