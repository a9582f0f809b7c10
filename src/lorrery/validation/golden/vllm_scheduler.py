"""`vllm_scheduler`: what vLLM's V1 scheduler decides, step by step, against `scheduler.core.replica`.

A record has a configuration, requests with the steps in which they arrive, and the scheduler's decisions in each step.
Here a scripted device gives one token to each scheduled sequence whose input is computed, and ends it where the record
says. All else is the shipped core's: the replica, its queue, batching, memory and prefix cache, under the rules that
the preset `vllm-0.32` has.

The record is replayed twice: once with a plan for every step and each waiting request tried in its turn, and once as
the preset runs: each plan kept for as long as it is valid, one request tried for all that wait for an adapter.
"""

import zlib
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from lorrery.scheduler.core.adapters.loads import AdapterOptions
from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.vllm import Vllm
from lorrery.scheduler.core.facts import Admitted, Cancelled, Event, Finished, Preempted
from lorrery.scheduler.core.memory.on_demand import OnDemandMemory
from lorrery.scheduler.core.plan import Idle, Plan, Ran
from lorrery.scheduler.core.planner import ReplicaOptions
from lorrery.scheduler.core.prefix_cache.changes import BlocksRemoved
from lorrery.scheduler.core.prefix_cache.scheduled_blocks import ScheduledBlockCache
from lorrery.scheduler.core.queues.fifo import Fifo, Priority
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.validation.golden.kind import Mismatch, Record, compare
from lorrery.vocabulary.endings import FinishReason

STEP_PS = 1_000_000
"""Step time of the scripted device: any value will do, since the record counts steps."""
_REASONS = {FinishReason.LENGTH: "length", FinishReason.EOS: "stop"}
_FIELDS = (
    "sched",
    "new",
    "resumed",
    "preempted",
    "finished",
    "waiting",
    "deferred",
    "loras",
    "tokens",
    "free",
    "kv_events",
)


def token_at(stream: int, position: int) -> int:
    """Return the record's token of a stream at a position of its sequence."""
    return 10 + (7919 * stream + 10473 * position) % 31991


class VllmScheduler:
    """The decisions of vLLM's scheduler."""

    name = "vllm_scheduler"

    def detect(self, record: Record) -> bool:
        """Whether the record says that it is of this kind."""
        return record.get("kind") == self.name

    def replay(self, record: Record) -> list[Mismatch]:
        """Drive the replica both ways and compare every step."""
        found: list[Mismatch] = []
        for holds, how in ((False, "plan every step"), (True, "hold plans")):
            run = _Run(record, holds=holds)
            for number, expected in expected_steps(record):
                got = run.step(number)
                for name in _FIELDS:
                    if expected[name] is None or got[name] is None:
                        continue
                    found += compare(f"{how}, step {number}, {name}", expected[name], got[name])
                if found:
                    return found
            found += compare(f"{how}, left_waiting", record["left_waiting"], run.waiting())
            found += compare(f"{how}, prefix_cache", record["prefix_cache"], run.prefix_cache)
        return found


def expected_steps(record: Record) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the record's steps one by one, with their numbers and all fields."""
    number = -1
    waiting: list[int] = []
    computed: dict[int, int] = {}
    kv_events = None if "kv_events" not in record else dict(record["kv_events"])
    for entry in record["steps"]:
        number = entry.get("k", number + 1) - 1
        waiting = entry.get("waiting", waiting)
        for repeat in range(entry.get("n", 1)):
            number += 1
            last = repeat == entry.get("n", 1) - 1
            sched = []
            for row in entry["sched"]:
                request, tokens, before = row if isinstance(row, list) else (row, 1, computed[row])
                sched.append([request, tokens, before if not repeat else computed[request]])
                computed[request] = sched[-1][2] + tokens
            yield (
                number,
                {
                    "sched": sched,
                    "new": entry.get("new", []),
                    "resumed": entry.get("resumed", []),
                    "preempted": entry.get("preempted", []),
                    "finished": entry.get("finished", []),
                    "waiting": waiting,
                    "deferred": entry.get("deferred", []),
                    "loras": entry.get("loras", []),
                    "tokens": entry.get("tokens", 0),
                    "free": entry["free"] if last else None,  # of equal steps the record has that of the last
                    "kv_events": None if kv_events is None else kv_events.get(number, []),
                },
            )


class _Request:
    """A request of the record, as the scripted device knows it: where its output ends, and why."""

    def __init__(
        self, row: Record, tokens: "array[int]", prompt_tokens: int, most: int, adapter: Adapter | None
    ) -> None:
        self.sequence = Sequence(
            row["id"],
            prompt_tokens,
            row["max_tokens"],
            row["id"],
            adapter,
            "",
            tokens[:prompt_tokens],
            tokens[prompt_tokens:],
        )
        self.sequence.priority = row.get("priority", 0)
        self.sequence.cache_salt = row.get("salt", "")
        self.sequence.max_new_tokens = self.sequence.budget_tokens = min(row["max_tokens"], most)
        eos_at = row.get("eos_at", 0)
        stops = 0 < eos_at <= self.sequence.max_new_tokens
        self.num_output = eos_at if stops else self.sequence.max_new_tokens
        self.reason = FinishReason.EOS if stops else FinishReason.LENGTH
        self.output = 0


class _Requests:
    """All requests of a record, with their tokens."""

    def __init__(self, record: Record) -> None:
        self.most = record["config"]["max_model_len"]
        self.by_id: dict[int, _Request] = {}
        for row in record["requests"]:
            prompt = self._prompt(row["id"], row["prompt"])
            tokens = prompt[:]
            for position in range(len(prompt), len(prompt) + min(row["max_tokens"], self.most) + 1):
                tokens.append(token_at(3 * row["id"] + 2, position))
            number = row.get("lora")
            adapter = None if number is None else Adapter(str(number), 8, 0, number=number)
            self.by_id[row["id"]] = _Request(row, tokens, len(prompt), self.most - len(prompt), adapter)

    def _prompt(self, request: int, prompt: Record) -> "array[int]":
        tokens = array("I")
        if "continues" in prompt:
            earlier = self.by_id[prompt["continues"]]
            tokens.extend(earlier.sequence.prompt_token_ids)
            tokens.extend(earlier.sequence.output_token_ids[: earlier.num_output])
            if earlier.reason is FinishReason.EOS:
                tokens[-1] = 2
        for position in range(prompt.get("shared_tokens", 0)):
            tokens.append(token_at(3 * prompt["shared"], position))
        for position in range(len(tokens), len(tokens) + prompt["own_tokens"]):
            tokens.append(token_at(3 * request + 1, position))
        return tokens


class _Run:
    """One replay of a record.

    Args:
        record: to replay.
        holds: whether a plan is kept for as long as it is valid.
    """

    def __init__(self, record: Record, *, holds: bool) -> None:
        config = record["config"]
        self._holds = holds
        self._rows = record["requests"]
        self._requests = _Requests(record).by_id
        cache = ScheduledBlockCache(config["block_size"]) if config["enable_prefix_caching"] else None
        self._memory = OnDemandMemory(
            (config["num_gpu_blocks"] - 1) * config["block_size"],
            block_size=config["block_size"],
            watermark=config["watermark"],
            reserve_full_input=config["scheduler_reserve_full_isl"],
            shared=cache,
        )
        by_priority = config["policy"] == "priority"
        limits = BatchLimits(
            config["max_num_seqs"],
            config["max_num_batched_tokens"],
            partial=config["enable_chunked_prefill"],
            max_active=config["max_num_active_seqs"],
        )
        self._queue = Priority() if by_priority else Fifo(by_adapter=holds)
        self._replica = Replica(
            self._queue,
            Vllm(
                limits,
                long_prefill_tokens=config["long_prefill_token_threshold"] or None,
                adaptive=config["long_prefill_token_threshold_adaptive"],
                by_priority=by_priority,
            ),
            self._memory,
            prefix_cache=cache,
            adapters=Residency(AdapterOptions(max_loras=config["max_loras"], blocking=True)),
            options=ReplicaOptions(
                max_overtakes=None, no_lora=config["max_loras"] is None, async_scheduling=config["async_scheduling"]
            ),
        )
        self._cache = cache
        self._called_at = -2
        self._blocks: dict[int, int] = {}  # by hash, in order of their first event
        if cache is not None and "kv_events" in record:
            cache.note_changes()
        self._is_ahead = config["async_scheduling"]
        self._ended: list[Finished] = []  # not noticed yet
        self._input_ps = 0
        self._decision: Plan | Idle | None = None
        self._left = 0
        self._order: list[int] = []
        self._aborted: set[int] = set()
        self._unfinished: set[int] = set()
        self._deferred: set[int] = set()
        self.prefix_cache = dict.fromkeys(record["prefix_cache"], 0)
        self._caches = cache is not None

    def waiting(self) -> list[int]:
        """Return the ids of the waiting requests, in order."""
        return [sequence.handle for sequence in self._queue if sequence.handle not in self._aborted]

    def step(self, number: int) -> dict[str, Any]:
        """Run one step of the record; return what it has of it."""
        replica, at_ps = self._replica, number * STEP_PS
        # With async scheduling a step is decided when the one before it begins.
        input_ps = self._input_ps - 1 if self._is_ahead else at_ps
        self._input_ps = at_ps
        inputs = self._is_ahead and any(
            row["step"] == number + 1 or number in (row.get("abort_before", 0) - 1, row.get("abort_during"))
            for row in self._rows
        )
        for row in self._rows:
            if row["step"] == number:
                self._requests[row["id"]].sequence.arrived_ps = at_ps
                replica.submit(self._requests[row["id"]].sequence, input_ps)
                self._unfinished.add(row["id"])
                inputs = True
        got: dict[str, Any] = {
            "new": [], "resumed": [], "preempted": [], "sched": [], "finished": [], "loras": [], "tokens": 0
        }  # fmt: skip
        for row in self._rows:
            if row.get("abort_before") == number and row["id"] in self._unfinished:
                replica.cancel(row["id"], input_ps)
                self._abort(row["id"], got)
                inputs = True
        called = bool(self._unfinished)
        decision = self._decision
        if decision is None or not self._holds or inputs:
            decision = self._decision = replica.plan(at_ps)
            self._left = decision.max_steps if isinstance(decision, Plan) else 0
            self._note(decision.events, got)
        else:
            assert isinstance(decision, Plan)
            replica.make_room(decision)
        # With async scheduling the output of the step before, if there is one, is read next, and events are published.
        got["kv_events"] = self._kv_events() if self._called_at == number - 1 or not self._is_ahead else []
        if called:
            self._called_at = number
        if isinstance(decision, Plan):
            self._sched(decision, got)
        for row in self._rows:
            if row.get("abort_during") == number and row["id"] in self._unfinished:
                replica.cancel(row["id"], at_ps + (-1 if self._is_ahead else 1))
                self._abort(row["id"], got)
                inputs = True
        self._note(self._ended, got)
        self._ended = []
        if isinstance(decision, Plan):
            events = self._run(decision, at_ps + STEP_PS, got)
            if self._is_ahead:
                self._ended = [event for event in events if isinstance(event, Finished)]
            self._note([event for event in events if event not in self._ended], got)
            self._left -= 1
        if not self._left or got["finished"] or self._ended or inputs:
            self._decision = None
        if not self._unfinished:
            self._ended = []
            self._called_at = -2
        got["waiting"] = self.waiting()
        got["deferred"] = None if self._holds else sorted(self._deferred)
        got["free"] = self._memory.free_blocks(replica.running)
        return got

    def _note(self, events: Iterable[Event], got: dict[str, Any]) -> None:
        for event in events:
            if isinstance(event, Admitted):
                sequence = event.sequence
                got["new" if event.first else "resumed"].append(sequence.handle)
                self._order.append(sequence.handle)
                self._deferred.discard(sequence.handle)
                if self._caches:
                    kind = "preempted_" if sequence.num_requeues else ""
                    self.prefix_cache[f"{kind}requests"] += 1
                    self.prefix_cache[f"{kind}queries"] += sequence.input_tokens
                    self.prefix_cache[f"{kind}hits"] += sequence.cached_tokens
            elif isinstance(event, Preempted):
                got["preempted"].append(event.sequence.handle)
                self._order.remove(event.sequence.handle)
            elif isinstance(event, Finished) and event.sequence.handle not in self._aborted:
                got["finished"].append([event.sequence.handle, _REASONS[event.reason]])
                self._unfinished.discard(event.sequence.handle)
                if event.sequence.handle in self._order:
                    self._order.remove(event.sequence.handle)
            elif isinstance(event, Cancelled) and event.sequence.handle not in self._aborted:
                self._abort(event.sequence.handle, got)
        for sequence in self._replica.take_preempted_ended():
            got["preempted"].append(sequence.handle)
            self._order.remove(sequence.handle)
        passed_over = {sequence.handle for sequence in self._replica.passed_over}
        self._deferred |= passed_over - self._aborted

    def _kv_events(self) -> list[list[Any]]:
        """Return the changes of the cache since the last call, as the record has them."""
        events: list[list[Any]] = []
        for change in () if self._cache is None else self._cache.take_changes():
            numbers = [self._number(block_hash) for block_hash in change.hashes]
            if isinstance(change, BlocksRemoved):
                events += [[number] for number in numbers]
                continue
            parent = None if change.parent_hash is None else self._number(change.parent_hash)
            tokens = zlib.crc32(b"".join(change.keys))
            adapter, salt = change.adapter, change.cache_salt if change.parent_hash is None else ""
            keys = ([] if adapter is None else [f"adapter-{adapter.adapter_id}"]) + ([salt] if salt else [])
            events.append([numbers, parent, tokens, None if adapter is None else adapter.number, keys or None])
        return events

    def _number(self, block_hash: int) -> int:
        return self._blocks.setdefault(block_hash, len(self._blocks))

    def _abort(self, request: int, got: dict[str, Any]) -> None:
        self._aborted.add(request)
        self._unfinished.discard(request)
        got["finished"].append([request, "abort"])
        self._deferred.discard(request)
        if request in self._order:
            self._order.remove(request)

    def _sched(self, plan: Plan, got: dict[str, Any]) -> None:
        running = self._replica.running
        chunks = {chunk.sequence.handle: chunk for chunk in plan.prefills}
        for request in self._order:
            sequence = self._requests[request].sequence
            if request in running.held:
                continue
            if request in chunks:
                got["sched"].append([request, chunks[request].new_tokens, chunks[request].past_tokens])
            elif plan.decode and request not in running.prefilling:
                computed = sequence.input_tokens + sequence.output_tokens_at(running.decode_step) - 1
                got["sched"].append([request, 1, computed])
        adapters = {self._requests[row[0]].sequence.adapter for row in got["sched"]}
        got["loras"] = sorted(int(adapter.adapter_id) for adapter in adapters if adapter is not None)
        got["tokens"] = sum(row[1] for row in got["sched"])

    def _run(self, plan: Plan, end_ps: int, got: dict[str, Any]) -> list[Event]:
        """Give each scheduled sequence its token, if its input is computed, and end those that have all."""
        unfinished = {chunk.sequence.handle for chunk in plan.prefills if not chunk.samples}
        ended: list[tuple[int, FinishReason]] = []
        for request, _, _ in got["sched"]:
            one = self._requests[request]
            if request in unfinished or request in self._aborted or one.output == one.num_output:
                continue
            one.output += 1
            if one.output == one.num_output:
                ended.append((request, one.reason))
        return self._replica.commit(plan, Ran(1, end_ps, tuple(ended)))
