"""Records of engines' schedulers as a live cluster can be asked for them.

A record counts calls of the scheduler, a live cluster has time. Here every step takes equally long, and each request
is sent in the middle of the step in which it has to come, so that the first call to see it is the recorded one. A
`step` counts from 0 the calls that scheduled something, which are the live steps. What came of it stands in the
scheduler's journal (`read_run`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lorrery.scheduler.subscribers.record import Record
from lorrery.service.settings.cluster import load
from lorrery.simulator.replay.journal import ExpectedPlan, read_journal
from lorrery.v1 import router_pb2
from lorrery.v1 import scheduler_pb2 as pb
from tests.cluster.client import Ask, Stream

MODEL = "Llama-3-8B"
MOST_PLACED = 16
"""So many requests are placed at one time when a worker attaches (`service.tasks`)."""


@dataclass(frozen=True)
class RecordedAsk(Ask):
    """A request of a record; `prompt_token_ids`: all of its prompt."""

    name: str = ""
    prompt_token_ids: tuple[int, ...] = ()

    def message(self) -> router_pb2.GenerateRequest:
        message = super().message()
        message.request_id = self.name
        message.token_ids.ids[:] = self.prompt_token_ids
        return message


@dataclass
class Step:
    """What one step does, by request.

    Attributes:
        sched: (tokens, computed tokens before), without what is computed beyond an end that the call does not know yet.
        tokens: who gets a token.
        preempted: in order, those of calls since the last step included.
        admitted: in order, likewise; those admitted again included.
    """

    sched: dict[int, tuple[int, int]] = field(default_factory=dict)
    tokens: set[int] = field(default_factory=set)
    preempted: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Arrival:
    """When a request is to come.

    Attributes:
        request: its number.
        step: during which it comes; or, if the engine is idle then, the one that it begins.
        idle: whether it is.
    """

    request: int
    step: int
    idle: bool


class LiveRecord:
    """A record, and what a live cluster must make of it.

    Attributes:
        name: of the record.
        asks: by request.
        arrivals: in the order of sending.
        steps: those that schedule something.
        why_not: why it cannot be asked of a live cluster; empty: it can.
        kv_events: batches of KV events that are published, as `told_of` describes them; None: they are not recorded.
    """

    def __init__(self, record: Record) -> None:
        self.name: str = record["id"]
        self.config: Record = record["config"]
        self.asks: dict[int, RecordedAsk] = {}
        self.arrivals: list[Arrival] = []
        self.steps: list[Step] = []
        self.why_not = ""
        self.kv_events: list[list[object]] | None = None

    def overrides(self) -> tuple[str, ...]:
        """Return the settings, as for `--set`: the preset's, and those of the record."""
        raise NotImplementedError

    def _order_arrivals(self) -> None:
        if sum(one.idle and not one.step for one in self.arrivals) > MOST_PLACED:
            self.why_not = "more requests than a scheduler places at one time"
        self.arrivals.sort(key=lambda one: (one.step, not one.idle))

    def check(self, journal: Path) -> list[str]:
        """Return where a run differs from the record; empty: nowhere."""
        run = read_run(journal, self.asks)
        wrong = []
        for number, (got, expected) in enumerate(zip(run.steps, self.steps, strict=False)):
            wrong = [
                f"step {number}, {what}: got {getattr(got, what)}, recorded {getattr(expected, what)}"
                for what in ("preempted", "admitted", "sched", "tokens")
                if getattr(got, what) != getattr(expected, what)
            ]
            if wrong:
                return wrong
        if len(run.steps) != len(self.steps):
            return [f"{len(run.steps)} steps, recorded {len(self.steps)}"]
        return wrong

    def misplaced(self, journal: Path) -> list[str]:
        """Return which requests came in another step than they had to; empty: none."""
        run = read_run(journal, self.asks)
        wrong = []
        for arrival in self.arrivals:
            at_ps, step = run.placed_ps[arrival.request], arrival.step
            begins_ps, ends_ps = run.begins_ps[step], run.begins_ps[step] + run.step_ps[step]
            if arrival.idle:
                begins_ps, ends_ps = (run.begins_ps[step - 1] + run.step_ps[step - 1] if step else -1), begins_ps
            if not begins_ps < at_ps <= ends_ps:
                wrong.append(f"request {arrival.request} came at {at_ps} ps; step {step} is {begins_ps} to {ends_ps}")
        return wrong


def output_of(ask: Ask) -> list[int]:
    """Return the tokens that the mock model gives."""
    return ask.expected(load(None, [f"model='{MODEL}'"]))[0]


def told_of(batches: Iterable[pb.KvEvents]) -> list[list[object]]:
    """Describe batches of KV events with numbers for hashes, in order of first mention: of removed blocks these alone.

    Of stored ones, the numbers, that of the parent, how many tokens, the adapter's number and name, and a first block's
    salt.
    """
    numbers: dict[int, int] = {}

    def number(block_hash: int) -> int:
        return numbers.setdefault(block_hash, len(numbers))

    described: list[list[object]] = []
    for batch in batches:
        events: list[object] = []
        for event in batch.events:
            stored, kind = event.stored, event.WhichOneof("event")
            if kind == "removed":
                events += [number(block_hash) for block_hash in event.removed.block_hashes]
            elif kind == "stored":
                hashes = [number(block_hash) for block_hash in stored.block_hashes]
                parent = number(stored.parent_block_hash) if stored.HasField("parent_block_hash") else None
                num_tokens = len(stored.token_ids_u32) // 4
                salt = stored.cache_salt if parent is None else ""
                events.append((hashes, parent, num_tokens, stored.adapter.number, stored.adapter.adapter_id, salt))
        if events:
            described.append(events)
    return described


# --- what a run came to -----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a journal says of the one worker's steps, with requests by the numbers that are their ids.

    Attributes:
        steps: what each did.
        begins_ps: the boundary before each.
        step_ps: how long each took, a gap before it included.
        placed_ps: when each request came.
    """

    steps: list[Step] = field(default_factory=list)
    begins_ps: list[int] = field(default_factory=list)
    step_ps: list[int] = field(default_factory=list)
    placed_ps: dict[int, int] = field(default_factory=dict)


def read_run(path: Path, asks: Mapping[int, Ask]) -> Run:
    """Read the journal of these requests: plans say who joins, leaves and computes prompts; all others decode."""
    journal = read_journal(path)
    names: dict[int, int] = {}
    known: dict[int, int] = {}  # tokens of prompt and output
    left = {number: len(output_of(ask)) for number, ask in asks.items()}
    for line in journal.inputs:
        content = line.content
        if line.type == "request":
            names[content["handle"]] = int(content["request_id"])
            known[int(content["request_id"])] = content["prompt_tokens"]
    run = Run()
    for line in journal.inputs:
        if line.type == "placed":
            run.placed_ps[names[line.content["handle"]]] = line.content["at_ps"]
    (worker,) = journal.workers
    decoding: dict[int, int] = {}  # computed tokens
    prefills: list[list[int]] = []
    decode = False
    step = Step()
    for expected in worker.expected:
        if isinstance(expected, ExpectedPlan):
            plan = expected.record
            for handle, produced_tokens in plan.get("preempted", ()):
                number = names[handle]
                step.preempted.append(number)
                left[number] = len(output_of(asks[number])) - produced_tokens
                known[number] = asks[number].prompt_tokens + produced_tokens
                decoding.pop(number, None)
            step.admitted += [names[handle] for handle, _ in plan.get("admitted", ())]
            for handle in plan.get("leaves", ()):
                decoding.pop(names[handle], None)
            prefills, decode = plan.get("prefills", []), plan.get("decode", False)
            continue
        if decode:
            step.sched |= {number: (1, computed) for number, computed in decoding.items() if left[number]}
        for handle, new_tokens, past_tokens in prefills:
            step.sched[names[handle]] = new_tokens, past_tokens
        for number, (new_tokens, past_tokens) in step.sched.items():
            if past_tokens + new_tokens == known[number]:
                step.tokens.add(number)
                known[number] += 1
                left[number] -= 1
                decoding[number] = past_tokens + new_tokens
        prefills = []
        run.steps.append(step)
        run.begins_ps.append(expected.begin_ps)
        run.step_ps.append(expected.end_ps - expected.begin_ps)
        step = Step()
    return run


# --- sending ----------------------------------------------------------------------------------------------------------


class Pace:
    """Estimates when steps begin and end, from the time of a first request and of tokens.

    Args:
        step_seconds: how long each takes.
    """

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._loop = asyncio.get_running_loop()
        self._step = 0
        self._began = 0.0

    def begins(self, step: int) -> None:
        """Note that a step begins now."""
        if step >= self._step:
            self._step, self._began = step, self._loop.time()

    async def middle_of(self, step: int) -> None:
        """Return in the middle of a step."""
        while True:  # the estimate may change meanwhile
            due = self._began + (step - self._step + 0.5) * self._step_seconds
            seconds = due - self._loop.time()
            if seconds <= 0:
                return
            await asyncio.sleep(min(seconds, self._step_seconds / 8))


async def send(
    record: LiveRecord,
    step_seconds: float,
    ask: Callable[[Ask], Stream],
    worker: Callable[[], Awaitable[None]],
    taken: Callable[[int], Awaitable[None]],
) -> list[Stream]:
    """Send a record's requests, and return their streams once all have ended.

    Args:
        record: says which and when.
        step_seconds: how long a step takes.
        ask: begins a stream.
        worker: returns once a worker has the requests that have been sent before.
        taken: returns once the scheduler has taken in so many requests; else two might overtake each other on the way.
    """
    pace = Pace(step_seconds)
    gives: dict[int, list[int]] = {number: [] for number in record.asks}  # in which steps
    for number, step in enumerate(record.steps):
        for request in step.tokens:
            gives[request].append(number)
    streams: list[Stream] = []
    watching: list[asyncio.Task[None]] = []

    async def watch(stream: Stream, steps: list[int]) -> None:
        for num_tokens, step in enumerate(steps, start=1):
            await stream.at(num_tokens)
            if len(stream.token_ids) == num_tokens:  # else later ones have come too
                pace.begins(step + 1)

    def begin(request: int) -> None:
        stream = ask(record.asks[request])
        streams.append(stream)
        watching.append(asyncio.create_task(watch(stream, gives[request])))

    first = [arrival.request for arrival in record.arrivals if arrival.idle and not arrival.step]
    for request in first:
        begin(request)
        await taken(len(streams))
    await worker()
    pace.begins(0)
    for arrival in record.arrivals[len(first) :]:
        if arrival.idle:
            await asyncio.gather(*streams)
        await pace.middle_of(arrival.step)
        begin(arrival.request)
        if arrival.idle:
            pace.begins(arrival.step)
        await taken(len(streams))
    await asyncio.gather(*streams, *watching)
    return streams
