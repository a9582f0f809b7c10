"""`router_loop`: S-LoRA's continuous-batching loop step by step, against `scheduler.core.replica` in strict mode.

The record has the external events (which requests arrive and leave when, and which token ends a sequence), and the
actions of the original's loop in each call of its body. Here a scripted device replaces the GPU: it runs the plans, and
ends a sequence where `worker.device.output` says, given the record's end-of-sequence token. All else is the shipped
core's: the replica, its loop, its queue.

The record is replayed twice: once with a plan for every step, which is the plainest possible driver, and once with each
decision kept for as long as it is valid, or until an event that may change it. Both must give the record's steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lorrery.scheduler.core.adapters.loads import AdapterOptions
from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.slora_loop import IDLE_POLL_PS, MAX_WAIT_STEPS, SloraLoop
from lorrery.scheduler.core.facts import AdaptersKept, Event, Finished
from lorrery.scheduler.core.memory.peak import PeakMemory
from lorrery.scheduler.core.plan import Idle, Plan, Ran
from lorrery.scheduler.core.planner import ReplicaOptions
from lorrery.scheduler.core.protocols import Queue
from lorrery.scheduler.core.queues.few_adapters import Cluster
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.queues.vtc_fair import VtcFair
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.validation.golden.kind import Mismatch, Record, compare
from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.output import Ending, LlmMockLength, Sampling, ending

STEP_PS = 30_000_000_000
"""Step time of the scripted device: any value will do, since the record counts steps."""


QUEUES: dict[str, Callable[[Record], Queue]] = {
    "slora": lambda config: Fifo(strict=True),
    "vtc_fair": lambda config: VtcFair(strict=True),
    "cluster": lambda config: Cluster(config["batch_num_adapters"], strict=True),
}
"""The record's policies."""


class SloraRouterLoop:
    """The loop under one of S-LoRA's policies.

    Args:
        policy: a key of `QUEUES`.
    """

    def __init__(self, policy: str) -> None:
        self.name = f"router_loop/{policy}"
        self._policy = policy

    def detect(self, record: Record) -> bool:
        """Whether the record has the steps of a loop under this policy."""
        return record.keys() >= {"events", "steps", "total_steps"} and record.get("policy") == self._policy

    def replay(self, record: Record) -> list[Mismatch]:
        """Drive the loop both ways and compare every step."""
        found = compare("config.max_wait_tokens", record["config"]["max_wait_tokens"], MAX_WAIT_STEPS)
        for holds, how in ((False, "plan every step"), (True, "hold plans")):
            driver = _Driver(record, holds=holds)
            number = 0
            for merged in record["steps"]:
                for _ in range(merged["n"]):
                    found += _compare_step(f"{how}, step {number}", merged, driver.step(number))
                    number += 1
                # The wait counter is given only for the last of the merged steps.
                found += compare(f"{how}, step {number - 1}, hwt", merged["hwt"], driver.wait_steps)
            found += compare(f"{how}, total_steps", record["total_steps"], number)
            found += compare(f"{how}, left_waiting", record["left_waiting"], driver.waiting_ids())
        return found


@dataclass(slots=True)
class _Step:
    """Actions of one call of the loop's body."""

    ops: list[list[Any]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    run: list[str] | None = None
    wait: int = 0


def _compare_step(where: str, expected: Record, got: _Step) -> list[Mismatch]:
    return [
        *compare(f"{where}, ops", expected["ops"], got.ops),
        # The order within one step is not specified: all of them end at the same boundary.
        *compare(f"{where}, finished", sorted(expected["finished"]), sorted(got.finished)),
        *compare(f"{where}, run", expected["run"], got.run),
        *compare(f"{where}, wait", expected["wait"], got.wait),
    ]


class _ScriptedDevice:
    """Runs plans, and ends each sequence at the record's output token."""

    def __init__(self) -> None:
        self._ends: dict[int, Ending] = {}
        self._output_tokens: dict[int, int] = {}

    def expect(self, handle: int, max_new_tokens: int, eos_at: int, *, ignore_eos: bool) -> None:
        """Set where a sequence ends: at the record's end-of-sequence token (0: there is none), or at its length."""
        sampling = Sampling(
            seed=0, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos or eos_at == 0, true_output_tokens=eos_at
        )
        self._ends[handle] = ending(0, sampling, 0, np.empty(0, np.uint32), LlmMockLength())

    def accept(self, decision: Plan | Idle) -> None:
        """Apply a decision's changes to the batch."""
        for sequence in decision.leaves:
            del self._output_tokens[sequence.handle]
        if isinstance(decision, Plan):
            for sequence in decision.joins:
                self._output_tokens[sequence.handle] = 0

    def run_step(self, plan: Plan, at_ps: int) -> Ran:
        """Give one token to every sequence of the step."""
        stepping = list(self._output_tokens) if plan.decode else [chunk.sequence.handle for chunk in plan.prefills]
        finished: list[tuple[int, FinishReason]] = []
        for handle in stepping:
            self._output_tokens[handle] += 1
            end = self._ends[handle]
            if self._output_tokens[handle] == end.output_tokens:
                finished.append((handle, end.reason))
                del self._output_tokens[handle]
        return Ran(1, at_ps + STEP_PS, finished)


class _Driver:
    """Calls the loop once per step, after the record's events for that step."""

    def __init__(self, record: Record, *, holds: bool) -> None:
        config = record["config"]
        limits = BatchLimits(config["running_max_req_size"], config["batch_max_tokens"])
        self._loop = SloraLoop(limits, strict=True, prefetch=config["prefetch"])
        self._replica = Replica(
            QUEUES[record["policy"]](config),
            self._loop,
            PeakMemory(config["max_total_tokens"], keep_refused=record["policy"] == "cluster"),
            adapters=Residency(AdapterOptions(blocking=True, keep_unused=False)),
            options=ReplicaOptions(strict=True, no_lora=config["no_lora"]),
        )
        self._device = _ScriptedDevice()
        self._holds = holds
        self._lora_ranks: dict[str, int] = record["lora_ranks"]
        self._events: list[list[Any]] = list(record["events"])
        self._handles: dict[str, int] = {}
        self._ids: list[str] = []
        self._at_ps = 0
        self._unseen: list[str] = []  # submitted since the last plan
        self._decision: Plan | Idle = Idle(until_ps=0)
        self._steps_left = 0

    @property
    def wait_steps(self) -> int:
        """The loop's count of decode steps since the last prefill."""
        return self._loop.wait_steps

    def waiting_ids(self) -> list[str]:
        """Ids of the waiting requests, in order."""
        return [self._ids[sequence.handle] for sequence in self._replica.queue] + self._unseen

    def step(self, number: int) -> _Step:
        """Apply the events due before this step, then run the loop's body once."""
        heeded = self._apply_events(number)
        if heeded or not self._holds or self._is_over():
            self._decide()
        done = self._run(self._decision) if isinstance(self._decision, Plan) else _Step()
        if not self._replica.num_running:
            self._at_ps += IDLE_POLL_PS  # whenever nothing runs, the original sleeps before the next call
        done.run = [self._ids[sequence.handle] for sequence in self._replica.running] or None
        done.wait = len(self.waiting_ids())
        return done

    def _is_over(self) -> bool:
        """Whether the last decision is no longer valid."""
        if isinstance(self._decision, Plan):
            return self._steps_left == 0
        return self._decision.until_ps is not None and self._at_ps >= self._decision.until_ps

    def _decide(self) -> None:
        self._decision = self._replica.plan(self._at_ps)
        self._unseen.clear()
        self._device.accept(self._decision)
        if isinstance(self._decision, Plan):
            self._steps_left = self._decision.max_steps

    def _run(self, plan: Plan) -> _Step:
        # A plan's loads happen before its first step.
        first = self._steps_left == plan.max_steps
        done = _Step(ops=list(self._ops(plan, first=first)))
        ran = self._device.run_step(plan, self._at_ps)
        self._at_ps = ran.end_ps
        self._steps_left = 0 if ran.finished else self._steps_left - 1
        for event in self._replica.commit(plan, ran):
            self._note(event, done)
        return done

    def _ops(self, plan: Plan, *, first: bool) -> Iterator[list[Any]]:
        if plan.adapter_loads and first:
            yield ["load", [adapter.adapter_id for adapter in plan.adapter_loads]]
        if plan.adapter_prefetches and first:
            yield ["prefetch", [adapter.adapter_id for adapter in plan.adapter_prefetches]]
        if plan.decode:
            yield ["decode", [self._ids[sequence.handle] for sequence in self._replica.running]]
        else:
            yield ["prefill", [self._ids[chunk.sequence.handle] for chunk in plan.prefills]]

    def _note(self, event: Event, done: _Step) -> None:
        if isinstance(event, Finished):
            done.finished.append(self._ids[event.sequence.handle])
        elif isinstance(event, AdaptersKept):
            done.ops.append(["offload_except", list(event.adapter_keys)])

    def _apply_events(self, number: int) -> bool:
        """Apply the events due before this step; return whether any of them requires a new plan."""
        heeded = False
        for event in self._events:
            if event[0] != number:
                continue
            match event[1:]:
                case ["add", request_id, adapter_id, input_len, max_new_tokens, ignore_eos, eos_at]:
                    handle = self._name(request_id)
                    adapter = None if adapter_id is None else Adapter(adapter_id, self._lora_ranks[adapter_id])
                    self._device.expect(handle, max_new_tokens, eos_at, ignore_eos=ignore_eos)
                    sequence = Sequence(handle, input_len, max_new_tokens, self._at_ps, adapter)
                    heeded |= self._replica.arrival_matters()
                    self._replica.submit(sequence, self._at_ps)
                    self._unseen.append(request_id)
                case ["abort", request_id]:
                    if request_id in self._handles:
                        heeded = True
                        self._replica.cancel(self._handles[request_id], self._at_ps)
                case _:
                    raise ValueError(f"no such event: {event}")
        return heeded

    def _name(self, request_id: str) -> int:
        handle = len(self._ids)
        self._ids.append(request_id)
        self._handles[request_id] = handle
        return handle
