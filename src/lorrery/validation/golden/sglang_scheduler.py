"""`sglang_scheduler`: SGLang's own scheduler, iteration by iteration, against `scheduler.core.replica`.

A record has the requests with the iterations in which they arrive, and what each iteration did. A scripted device runs
the plans and ends each sequence where the record says. All else is the shipped core's.

The record is replayed twice: with a plan for every step, and with each plan kept for as long as it is valid, or until
an arrival that may change it. Both must give the record's iterations.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from lorrery.scheduler.core.adapters.loads import AdapterOptions
from lorrery.scheduler.core.adapters.slots import AdapterSlots
from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait
from lorrery.scheduler.core.batching.sglang import Sglang
from lorrery.scheduler.core.facts import Event, Finished, Preempted
from lorrery.scheduler.core.memory.estimated import EstimatedMemory
from lorrery.scheduler.core.plan import Idle, Plan, Ran
from lorrery.scheduler.core.planner import ReplicaOptions
from lorrery.scheduler.core.prefix_cache.radix import RadixCache
from lorrery.scheduler.core.queues.sglang import LongestPrefix, Rejoining
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import SglangRules
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.validation.golden.kind import Mismatch, Record, Skip, compare
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND

STEP_PS: Final = PS_PER_SECOND
"""An iteration takes a second: by that the record counts waits."""
SEGMENT_TOKENS: Final = 100_000
"""Token ids per segment."""
OUTPUTS: Final = 10_000
"""The segment of request r's output is this plus r."""

EOS_TOKEN_ID: Final = 0


class SglangScheduler:
    """Every iteration of the event loop."""

    name = "sglang_scheduler"

    def detect(self, record: Record) -> bool:
        """Whether the record is of this kind, by its own field."""
        return record.get("kind") == self.name

    def replay(self, record: Record) -> list[Mismatch] | Skip:
        """Drive the replica both ways and compare every iteration."""
        if record["tie_ambiguous"]:
            return Skip("a tie was decided by Python's hash seed")
        found: list[Mismatch] = []
        for holds, how in ((False, "plan every step"), (True, "hold plans")):
            driver = _Driver(record, holds=holds)
            for number, expected in enumerate(iterations(record)):
                found += _compare(f"{how}, iteration {number}", expected, driver.iterate(number))
                if found:
                    return found  # all that follows differs too
            found += compare(f"{how}, requests left", 0, driver.num_left)
        return found


def iterations(record: Record) -> Iterator[Mapping[str, Any]]:
    """Yield one row per iteration; of merged ones, figures only for the last."""
    state: dict[str, Any] = {"waiting": [], "draining": {}}
    for merged in record["iterations"]:
        num = merged.get("n", 1)
        state |= {name: merged[name] for name in ("waiting", "draining") if name in merged}
        row = {"x": [], "d": [], "retracted": [], "evicted": 0, "finished": [], "loads": []}
        row |= {name: value for name, value in merged.items() if name != "n"} | state
        for left in range(num - 1, -1, -1):
            yield {name: value for name, value in row.items() if not left or name not in ("avail", "ratio")}


def _compare(where: str, expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[Mismatch]:
    return [one for name in expected for one in compare(f"{where}, {name}", expected[name], got[name])]


class _Watched(Sglang):
    """The way to batch, and which sequences its last step decodes."""

    rows: tuple[int, ...] = ()

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Choose."""
        choice = super().choose(context, at_ps)
        decodes = isinstance(choice, Step) and choice.decode
        self.rows = tuple([sequence.handle for sequence in context.running]) if decodes else ()
        return choice


class _Driver:
    """Calls the replica once per iteration, after the arrivals before it. A request's handle is its id."""

    def __init__(self, record: Record, *, holds: bool) -> None:
        config = record["config"]
        self._holds = holds
        self._requests: list[list[Any]] = sorted(record["requests"], key=lambda row: row[1])
        self._next = 0
        self._adapters = {name: Adapter(name, rank=1) for name in config["adapters"]}
        self._outputs: dict[int, int] = {}
        self._ended: set[int] = set()
        self._ends: dict[int, tuple[int, FinishReason]] = {}
        self._page_size = config["page_size"]
        self._cache = RadixCache(self._page_size) if config["radix_cache"] else None
        rules = _rules(config)
        max_loras = config["max_loras_per_batch"]
        self._slots = AdapterSlots(AdapterOptions(max_loras=max_loras), pinned=rules.pinned_loras)
        self._memory = EstimatedMemory(
            config["max_total_tokens"], page_size=self._page_size, shared=self._cache, rules=rules
        )
        limits = BatchLimits(config["max_running_requests"], config["chunked_prefill_size"] or 0)
        self._batching = _Watched(limits, rules, max_loras=max_loras, idle_pass_ps=STEP_PS)
        self._replica = Replica(
            LongestPrefix() if config["schedule_policy"] == "lpm" else Rejoining(),
            self._batching,
            self._memory,
            prefix_cache=self._cache,
            adapters=self._slots,
            options=ReplicaOptions(no_lora=max_loras is None, overlap=config["overlap"]),
        )
        self._at_ps = 0
        self._unseen: list[int] = []  # submitted since the last plan
        self._decision: Plan | Idle = Idle(until_ps=0)
        self._steps_left = 0

    @property
    def num_left(self) -> int:
        """Requests that have not ended."""
        return len(self._requests) - len(self._ended)

    def iterate(self, number: int) -> dict[str, Any]:
        """Hand in the arrivals of an iteration, run it, and return its row."""
        num_evictions = 0 if self._cache is None else self._cache.num_evictions
        row: dict[str, Any] = {"x": [], "d": [], "retracted": [], "finished": [], "loads": [], "k": "idle"}
        if self._hand_in(number) or not self._holds or self._is_over():
            self._decide(row)
        if isinstance(self._decision, Plan):
            self._run(self._decision, row)
        self._at_ps += STEP_PS
        drain = self._batching.drain
        return row | {
            "waiting": [sequence.handle for sequence in self._replica.queue] + self._unseen,
            "draining": {} if drain is None else {str(key): name for key, name in drain.draining.items()},
            "evicted": 0 if self._cache is None else (self._cache.num_evictions - num_evictions) * self._page_size,
            "avail": self._memory.free_tokens(self._replica.running),
            "evictable": self._memory.evictable_tokens(),
            "ratio": round(self._memory.ratio.current, 6),
        }

    def _is_over(self) -> bool:
        """Whether the last decision is no longer valid."""
        if isinstance(self._decision, Plan):
            return self._steps_left == 0
        return self._decision.until_ps is not None and self._at_ps >= self._decision.until_ps

    def _decide(self, row: dict[str, Any]) -> None:
        self._slots.last_loads.clear()
        self._decision = self._replica.plan(self._at_ps)
        self._unseen.clear()
        self._steps_left = self._decision.max_steps if isinstance(self._decision, Plan) else 0
        events = self._decision.events
        row["retracted"] = [event.sequence.handle for event in events if isinstance(event, Preempted)]
        row["finished"] = _finished(events)
        for event in events:
            if isinstance(event, Preempted):  # what was not seen of it is lost
                self._outputs[event.sequence.handle] = event.sequence.produced_tokens
                self._ended.discard(event.sequence.handle)
        row["loads"] = [[key, before[0] if before else ""] for key, *before in self._slots.last_loads]

    def _run(self, plan: Plan, row: dict[str, Any]) -> None:
        decodes = list(self._batching.rows)
        row["x"] = [[chunk.handle, chunk.past_tokens, chunk.new_tokens] for chunk in plan.prefills]
        row["d"] = decodes
        row["k"] = ("mixed" if decodes else "prefill") if plan.prefills else "decode"
        ended: list[tuple[int, FinishReason]] = []
        for handle in [*(chunk.handle for chunk in plan.prefills if chunk.samples), *decodes]:
            if handle in self._ended:
                continue
            self._outputs[handle] += 1
            num_tokens, reason = self._ends[handle]
            if self._outputs[handle] == num_tokens:
                ended.append((handle, reason))
                self._ended.add(handle)
        self._steps_left = 0 if ended else self._steps_left - 1
        events = self._replica.commit(plan, Ran(1, self._at_ps + STEP_PS, ended))
        row["finished"] = sorted(row["finished"] + _finished(events))

    def _hand_in(self, number: int) -> bool:
        """Submit the arrivals before an iteration; return whether one of them may change the plan."""
        heeded = False
        while self._next < len(self._requests) and self._requests[self._next][1] == number:
            handle, _, prompt, _, max_new_tokens, eos_at, ignore_eos, name = self._requests[self._next]
            self._next += 1
            token_ids = [part * SEGMENT_TOKENS + token for part, at, num in prompt for token in range(at, at + num)]
            first = (OUTPUTS + handle) * SEGMENT_TOKENS
            output_ids = list(range(first, first + max_new_tokens))
            if eos_at and not ignore_eos and eos_at <= max_new_tokens:
                output_ids[eos_at - 1] = EOS_TOKEN_ID
            adapter = None if name is None else self._adapters[name]
            sequence = Sequence(
                handle,
                len(token_ids),
                max_new_tokens,
                self._at_ps,
                adapter,
                prompt_token_ids=token_ids,
                output_token_ids=output_ids,
            )
            sequence.ignore_eos = bool(ignore_eos)
            stops = eos_at and not ignore_eos and eos_at <= max_new_tokens
            self._ends[handle] = (eos_at, FinishReason.STOP) if stops else (max_new_tokens, FinishReason.LENGTH)
            self._outputs[handle] = 0
            self._replica.submit(sequence, self._at_ps)
            self._unseen.append(handle)
            idle = isinstance(self._decision, Idle)
            heeded = idle or self._replica.arrival_matters(adapter) or heeded
        return heeded


def _finished(events: Iterable[Event]) -> list[int]:
    return sorted(event.sequence.handle for event in events if isinstance(event, Finished))


def _rules(config: Mapping[str, Any]) -> SglangRules:
    return SglangRules(
        chunked=config["chunked_prefill_size"] is not None,
        prefill_decode_interval=config["prefill_decode_interval"] or 0,
        lora_drain_wait_threshold=config["lora_drain_wait_threshold"] * PS_PER_SECOND,
        pinned_loras=frozenset(config["pinned_loras"]),
        **{
            name: config[name]
            for name in (
                "max_prefill_tokens",
                "enable_mixed_chunk",
                "schedule_conservativeness",
                "init_new_token_ratio",
                "min_new_token_ratio_factor",
                "new_token_ratio_decay_steps",
                "retract_decode_steps",
                "clip_max_new_tokens",
                "in_batch_check_threshold",
                "in_batch_deprioritize_threshold",
                "prefill_max_requests",
            )
        },
    )
