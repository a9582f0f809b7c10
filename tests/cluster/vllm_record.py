"""Records of vLLM's scheduler (`tests/golden/vllm_*.jsonl`) as a live cluster can be asked for them.

A record counts calls of the scheduler, a live cluster has time. Here every step takes equally long, and each request
is sent in the middle of the step in which it has to come, so that the first call to see it is the recorded one:

* without async scheduling the call for a step is at its start: a request comes during the step before;
* with it that call is at the start of the step before: a request comes during the one before that;
* a call at an idle engine is at the request itself, so it can be for one request only. Those of the first call come
  before there is a worker.

`call` is a number of the record, `step` counts from 0 the calls that scheduled something, which are the live steps.
What came of it stands in the scheduler's journal (`read_run`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from lorrery.scheduler.core.record import Record
from lorrery.settings import load
from lorrery.simulator.journal import ExpectedPlan, read_journal
from lorrery.v1 import router_pb2
from lorrery.validation.golden.vllm_scheduler import expected_steps, token_at
from tests.cluster.client import Ask, Stream

MODEL = "Llama-3-8B"
ADAPTER_RANK = 1
MOST_PLACED = 16
"""So many requests are placed at one time when a worker attaches (`chassis.slices`)."""


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


class VllmRecord:
    """A record, and what a live cluster must make of it.

    Attributes:
        name: of the record.
        asks: by request.
        arrivals: in the order of sending.
        steps: those that schedule something.
        why_not: why it cannot be asked of a live cluster; empty: it can.
    """

    def __init__(self, record: Record) -> None:
        self.name: str = record["id"]
        self.config: Record = record["config"]
        self._rows: list[Record] = record["requests"]
        self.asks: dict[int, RecordedAsk] = {}
        self.arrivals: list[Arrival] = []
        self.steps: list[Step] = []
        self._calls: list[tuple[int, int, bool]] = []  # number, steps before it, whether it schedules something
        self.why_not = self._why_not(record)
        if not self.why_not:
            for row in self._rows:
                self.asks[row["id"]] = self._ask(row)
            self._read_steps(record)
            self._read_arrivals()

    def _why_not(self, record: Record) -> str:
        if any("abort_before" in row or "abort_during" in row for row in self._rows):
            return "a client's abort cannot be timed"
        if record["left_waiting"]:
            return "a request waits for ever"
        return ""

    # --- what is asked ----------------------------------------------------------------------------------------------

    def overrides(self) -> tuple[str, ...]:
        """Return the settings, as for `--set`: the preset's, and those of the record."""
        config = self.config
        longest = max([ask.prompt_tokens + ask.max_new_tokens for ask in self.asks.values()])
        num_adapters = max([row.get("lora", 0) for row in self._rows])
        return (
            "engine='vllm-0.32'",
            f"model='{MODEL}'",
            "worker.step_time='constant'",
            *(["scheduler.policy='priority'"] if config["policy"] == "priority" else []),
            f"scheduler.max_num_seqs={config['max_num_seqs']}",
            f"scheduler.max_num_batched_tokens={config['max_num_batched_tokens']}",
            *([] if (active := config["max_num_active_seqs"]) is None else [f"scheduler.max_num_active_seqs={active}"]),
            f"scheduler.block_size={config['block_size']}",
            f"scheduler.max_total_token_num={(config['num_gpu_blocks'] - 1) * config['block_size']}",
            f"scheduler.max_req_input_len={longest - 1}",
            f"scheduler.max_req_total_len={longest}",
            f"scheduler.watermark={config['watermark']}",
            "scheduler.refuse_never_fits=false",
            *([] if config["enable_prefix_caching"] else ["scheduler.prefix_cache={kind='none'}"]),
            *(
                f"scheduler.{name}={str(config[name]).lower()}"
                for name in (
                    "enable_chunked_prefill",
                    "long_prefill_token_threshold",
                    "long_prefill_token_threshold_adaptive",
                    "scheduler_reserve_full_isl",
                    "async_scheduling",
                )
            ),
            *([] if config["max_loras"] is None else [f"adapters.max_loras={config['max_loras']}"]),
            f"adapters.registry=[{{id='lora', rank={ADAPTER_RANK}, count={num_adapters + 1}}}]",
            "adapters.host_gb_per_second=1e6",  # loads take next to no time
            "adapters.disk_gb_per_second=1e6",
        )

    def _ask(self, row: Record) -> RecordedAsk:
        prompt, number = self._prompt(row), row["id"]
        most = min(row["max_tokens"], self.config["max_model_len"] - len(prompt))
        eos_at = row.get("eos_at")
        return RecordedAsk(
            seed=number,
            prompt_tokens=len(prompt),
            max_new_tokens=most,
            adapter_id=f"lora-{row['lora']}" if "lora" in row else "",
            ignore_eos=eos_at is None or eos_at > most,
            true_output_tokens=eos_at,
            priority=row.get("priority", 0),
            name=str(number),
            prompt_token_ids=tuple(prompt),
        )

    def _prompt(self, row: Record) -> list[int]:
        """Return a prompt; what continues an earlier request has the tokens that this one really gets."""
        number, prompt = row["id"], row["prompt"]
        tokens: list[int] = []
        if "continues" in prompt:
            earlier = self.asks[prompt["continues"]]
            tokens += [*earlier.prompt_token_ids, *_output(earlier)]
        tokens += [token_at(3 * prompt["shared"], position) for position in range(prompt.get("shared_tokens", 0))]
        end = len(tokens) + prompt["own_tokens"]
        return tokens + [token_at(3 * number + 1, position) for position in range(len(tokens), end)]

    # --- what must come of it ---------------------------------------------------------------------------------------

    def _read_steps(self, record: Record) -> None:
        known = {number: len(ask.prompt_token_ids) for number, ask in self.asks.items()}
        left = {number: len(_output(ask)) for number, ask in self.asks.items()}
        step = Step()
        for call, expected in expected_steps(record):
            step.preempted += [request for request in expected["preempted"] if left[request]]
            step.admitted += _in_order(expected["sched"], {*expected["new"], *expected["resumed"]})
            self._calls.append((call, len(self.steps), bool(expected["sched"])))
            for request, tokens, before in expected["sched"]:
                if not left[request]:
                    continue
                step.sched[request] = tokens, before
                if before + tokens == known[request]:
                    step.tokens.add(request)
                    known[request] += 1
                    left[request] -= 1
            if expected["sched"]:
                self.steps.append(step)
                step = Step()
        assert not any(left.values())

    def _read_arrivals(self) -> None:
        sees = self._sees()
        for row in self._rows:
            call, number = row["step"], row["id"]
            own, earlier = sees.get(call), sees.get(call - 1)
            if own is None:
                self.why_not = "a call that did not take place"
                return
            step, idle = own
            if not idle and (earlier is None or earlier[0] >= step):
                self.why_not = "requests between two calls at one time"
                return
            if idle and step and any(one.idle and one.step == step for one in self.arrivals):
                self.why_not = "several requests at an idle engine"
                return
            self.arrivals.append(Arrival(number, step if idle else step - 1, idle))
        if sum(one.idle and not one.step for one in self.arrivals) > MOST_PLACED:
            self.why_not = "more requests than a scheduler places at one time"
        self.arrivals.sort(key=lambda one: (one.step, not one.idle))

    def _sees(self) -> dict[int, tuple[int, bool]]:
        """Return for each call the step at whose start it sees what has come, and whether the engine is idle there."""
        sees: dict[int, tuple[int, bool]] = {}
        calls = {number: (step, schedules) for number, step, schedules in self._calls}
        for number, step, _ in self._calls:
            before, before_that = calls.get(number - 1), calls.get(number - 2)
            if before is not None and before[1]:
                sees[number] = step - int(self.config["async_scheduling"]), False
            else:  # nothing runs, or with async scheduling one step that nothing could be scheduled behind
                runs = self.config["async_scheduling"] and before and before_that and before_that[1]
                sees[number] = step, not runs
        return sees

    def check(self, journal: Path) -> list[str]:
        """Return where a run differs from the record; empty: nowhere."""
        run = read_run(journal)
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
        run = read_run(journal)
        wrong = []
        for arrival in self.arrivals:
            at_ps, step = run.placed_ps[arrival.request], arrival.step
            begins_ps, ends_ps = run.begins_ps[step], run.begins_ps[step] + run.step_ps[step]
            if arrival.idle:
                begins_ps, ends_ps = (run.begins_ps[step - 1] + run.step_ps[step - 1] if step else -1), begins_ps
            if not begins_ps < at_ps <= ends_ps:
                wrong.append(f"request {arrival.request} came at {at_ps} ps; step {step} is {begins_ps} to {ends_ps}")
        return wrong


def _output(ask: Ask) -> list[int]:
    """Return the tokens that the mock model gives."""
    return ask.expected(load(None, [f"model='{MODEL}'"]))[0]


def _in_order(sched: list[list[int]], admitted: set[int]) -> list[int]:
    return [row[0] for row in sched if row[0] in admitted]


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


def read_run(path: Path) -> Run:
    """Read a journal: plans say who joins, leaves and computes prompts; all others decode in every step."""
    journal = read_journal(path)
    names: dict[int, int] = {}
    known: dict[int, int] = {}  # tokens of prompt and output
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
            step.preempted += [names[handle] for handle, _ in plan.get("preempted", ())]
            step.admitted += [names[handle] for handle, _ in plan.get("admitted", ())]
            for handle in plan.get("leaves", ()):
                decoding.pop(names[handle], None)
            prefills, decode = plan.get("prefills", []), plan.get("decode", False)
            continue
        if decode:
            for number, computed in decoding.items():
                step.sched[number] = 1, computed
        for handle, new_tokens, past_tokens in prefills:
            step.sched[names[handle]] = new_tokens, past_tokens
        for number, (new_tokens, past_tokens) in step.sched.items():
            if past_tokens + new_tokens == known[number]:
                step.tokens.add(number)
                known[number] += 1
                decoding[number] = past_tokens + new_tokens
        for handle, _, _ in expected.events.get("finished", ()):
            del decoding[names[handle]]
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
    record: VllmRecord, step_seconds: float, ask: Callable[[Ask], Stream], worker: Callable[[], Awaitable[None]]
) -> list[Stream]:
    """Send a record's requests, and return their streams once all have ended.

    Args:
        record: says which and when.
        step_seconds: how long a step takes.
        ask: begins a stream.
        worker: returns once a worker has the requests that have been sent before.
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

    async def in_order() -> None:
        await asyncio.sleep(step_seconds / 100)  # else two may overtake each other on their way

    first = [arrival.request for arrival in record.arrivals if arrival.idle and not arrival.step]
    for request in first:
        begin(request)
        await in_order()
    await worker()
    pace.begins(0)
    for arrival in record.arrivals[len(first) :]:
        if arrival.idle:
            await asyncio.gather(*streams)
        await pace.middle_of(arrival.step)
        begin(arrival.request)
        if arrival.idle:
            pace.begins(arrival.step)
        await in_order()
    await asyncio.gather(*streams, *watching)
    return streams
