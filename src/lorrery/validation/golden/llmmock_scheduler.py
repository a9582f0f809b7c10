"""`llmmock_scheduler`: whole runs of llm-mock on a virtual clock, against the shipped replica and mock GPU.

The replica has the queue `fcfs`, the way to batch `llm_mock`, no memory rule and the pruned trie; the GPU has the
original's step time and output lengths. Ours counts integer picoseconds, so times are compared to 1e-6 relative, counts
and the order of the ends exactly. Each record is replayed with a plan for every step, and once with each plan kept for
as long as it is valid.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.whole_prompts import LlmMock
from lorrery.scheduler.core.facts import Admitted, Finished, FirstToken
from lorrery.scheduler.core.memory.base import UnlimitedMemory
from lorrery.scheduler.core.plan import Plan, Ran
from lorrery.scheduler.core.planner import ReplicaOptions
from lorrery.scheduler.core.prefix_cache import StaticTrie
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Sequence
from lorrery.validation.golden.kind import Mismatch, Record, compare, compare_close
from lorrery.vocabulary.units import NEVER, PS_PER_SECOND
from lorrery.worker.device.constant import LlmMock as LlmMockStepTime
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.output import LlmMockLength, Sampling, ending
from lorrery.worker.device.rows import DeviceSequence

TIME_TOLERANCE = 1e-6
FILLER_TOKEN_ID = 9
"""Stands for the part of a prompt that the record omits."""
MAX_NEW_TOKENS = 1 << 20
"""llm-mock has no limit."""


class LlmMockScheduler:
    """Arrivals, and when each request got its first output and ended."""

    name = "llmmock_scheduler"

    def detect(self, record: Record) -> bool:
        """Whether the record has the requests of a run and its results."""
        return record.keys() >= {"batch_size", "cache", "requests", "result"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Run it both ways."""
        found: list[Mismatch] = []
        for holds, how in ((False, "plan every step"), (True, "hold plans")):
            run = _Run(record, holds=holds)
            run.to_the_end()
            found += _compare_run(f"{how}, ", record, run)
        return found


@dataclass(slots=True)
class _Outcome:
    first_new_token: int = 0
    decode_length: int = 0
    tokens: int = 0
    told_tokens: int = 0
    messages: int = 0
    first_output_ps: int = 0
    finish_ps: int = 0


@dataclass(slots=True)
class _Counts:
    steps: int = 0
    empty_steps: int = 0
    ended: list[str] = field(default_factory=list)


def _compare_run(how: str, record: Record, run: "_Run") -> list[Mismatch]:
    found = compare(f"{how}steps", record["steps"], run.counts.steps)
    found += compare(f"{how}empty_steps", record["empty_steps"], run.counts.empty_steps)
    last_ps = max(outcome.finish_ps for outcome in run.outcomes)
    found += compare_close(f"{how}last_finish_s", record["last_finish_s"], last_ps / PS_PER_SECOND, TIME_TOLERANCE)
    results: Mapping[str, Mapping[str, Any]] = record["result"]
    # The order of ends within one step is not specified.
    finish_s = [results[request_id]["finish_s"] for request_id in run.counts.ended]
    found += compare(f"{how}order of ends", sorted(finish_s), finish_s)
    for (request_id, *_), got in zip(record["requests"], run.outcomes, strict=True):
        expected, where = results[request_id], f"{how}{request_id}, "
        for name, count in (
            ("first_new_token_idx", got.first_new_token),
            ("decode_length", got.decode_length),
            ("tokens", got.tokens),
            ("tokens", got.told_tokens),
            ("messages", got.messages),
        ):
            found += compare(where + name, expected[name], count)
        for name, at_ps in (("first_output_s", got.first_output_ps), ("finish_s", got.finish_ps)):
            found += compare_close(where + name, expected[name], at_ps / PS_PER_SECOND, TIME_TOLERANCE)
    return found


class _Run:
    """One run; a request's handle is its index in the record."""

    def __init__(self, record: Record, *, holds: bool) -> None:
        cache = record["cache"]
        self._replica = Replica(
            Fifo(),
            LlmMock(BatchLimits(record["batch_size"], NEVER)),
            UnlimitedMemory(),
            prefix_cache=StaticTrie.build(cache["prompts"], cache["max_edges"]) if cache["enabled"] else None,
            options=ReplicaOptions(min_computed_tokens=0),
        )
        self._gpu = MockGpu(LlmMockStepTime())
        self._holds = holds
        self._ids: list[str] = []
        self._coming: list[tuple[int, Sequence]] = []
        self.outcomes: list[_Outcome] = []
        self.counts = _Counts()
        for request_id, arrival_s, token_ids, num_tokens in record["requests"]:
            handle, at_ps = len(self._ids), round(arrival_s * PS_PER_SECOND)
            prompt = token_ids + [FILLER_TOKEN_ID] * (num_tokens - len(token_ids))
            sequence = Sequence(handle, num_tokens, MAX_NEW_TOKENS, at_ps, prompt_token_ids=prompt)
            self._ids.append(request_id)
            self._coming.append((at_ps, sequence))
            self.outcomes.append(_Outcome())

    def to_the_end(self) -> None:
        """Run until no request is left and none will arrive."""
        at_ps = 0
        while True:
            self._hand_in(at_ps)
            decision = self._replica.plan(at_ps)
            if isinstance(decision, Plan):
                at_ps = self._run(decision)
            elif self._coming:
                at_ps = self._coming[0][0]
            else:
                return

    def _hand_in(self, at_ps: int) -> None:
        while self._coming and self._coming[0][0] <= at_ps:
            self._replica.submit(self._coming[0][1], self._coming.pop(0)[0])

    def _run(self, plan: Plan) -> int:
        """Run a plan for as long as it is valid; return when it ended."""
        self._join(plan)
        at_ps = plan.at_ps
        for _ in range(plan.max_steps if self._holds else 1):
            at_ps += self._gpu.step_ps()
            outcome = self._gpu.advance()
            self.counts.steps += 1
            self.counts.empty_steps += not plan.prefills and not plan.decode
            for handle in outcome.handles:
                self.outcomes[handle].tokens += 1
                self.outcomes[handle].messages += 1
            for handle, _ in outcome.finished:
                self.outcomes[handle].messages += handle not in outcome.handles
                self.outcomes[handle].finish_ps = at_ps
                self.counts.ended.append(self._ids[handle])
            ended = list(outcome.finished)
            silent = frozenset(handle for handle, _ in ended) - frozenset(outcome.handles.tolist())
            for event in self._replica.commit(plan, Ran(1, at_ps, ended, silent)):
                if isinstance(event, FirstToken):
                    self.outcomes[event.sequence.handle].first_output_ps = event.at_ps
                elif isinstance(event, Finished):
                    self.outcomes[event.sequence.handle].told_tokens = event.output_tokens
            heeded = self._coming and self._coming[0][0] <= at_ps and self._replica.arrival_matters()
            if ended or heeded:
                break
        return at_ps

    def _join(self, plan: Plan) -> None:
        for event in plan.events:
            if isinstance(event, Admitted):
                self.outcomes[event.sequence.handle].first_new_token = event.sequence.cached_tokens
        for sequence in plan.joins:
            sampling = Sampling(seed=0, max_new_tokens=MAX_NEW_TOKENS)
            end = ending(0, sampling, sequence.prompt_tokens, np.empty(0, np.uint32), LlmMockLength())
            self.outcomes[sequence.handle].decode_length = end.output_tokens
            self._gpu.join(DeviceSequence(sequence.handle, sequence.prompt_tokens, 0, seed=0, ending=end))
        self._gpu.begin(plan.prefills, decode=plan.decode)
