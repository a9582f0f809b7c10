"""A replica under any order of submit, cancel, plan, run, commit and worker loss, for every combination.

A lost worker's sequences go to a new replica, as they would to another worker. Whatever happens, every sequence ends
once, with the tokens that it has in truth, and an empty replica holds nothing.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lorrery.scheduler.core.facts import Cancelled, Dropped, Event, Finished
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.validation.policy.drive import Device
from tests.scheduler.core.test_replica import NEVER_FREED_FROM_CANCELLED, POLICIES, build, nothing_is_negative_or_over

POOL, BATCH_TOKENS, MOST = 120, 60, 4
RANKS = {"a0": 1, "a1": 2, "a2": 4}
VERSIONS = {0: 1, 7: 3}  # a later version of an adapter has three times the rank


class ReplicaMachine(RuleBasedStateMachine):
    policy = ""

    def __init__(self) -> None:
        super().__init__()
        self.replica: Replica = build(self.policy, POOL, BATCH_TOKENS, MOST)
        self.lengths: dict[int, int] = {}
        self.alive: dict[int, Sequence] = {}
        self.cancelled: set[int] = set()
        self.device = Device(self.lengths)
        self.plan: Plan | None = None
        self.steps_left = 0
        self.at_ps = 0
        self.until_ps: int | None = None

    @rule(
        prompt=st.integers(1, 18),
        budget=st.integers(1, 12),
        short=st.integers(0, 11),
        adapter=st.sampled_from([None, *RANKS]),
        version=st.sampled_from([*VERSIONS]),
    )
    def submit(self, prompt: int, budget: int, short: int, adapter: str | None, version: int) -> None:
        handle = len(self.lengths)
        tokens = list(range(60))
        sequence = Sequence(handle, prompt, budget, arrived_ps=self.at_ps)
        sequence.adapter = (
            None if adapter is None else Adapter(adapter, VERSIONS[version] * RANKS[adapter], None, version)
        )
        sequence.prompt_token_ids, sequence.output_token_ids = tokens[:prompt], tokens[prompt:]
        sequence.skips_prefix_cache = handle % 3 == 2
        if self.replica.never_fits_reason(sequence) is None:
            self.lengths[handle] = max(1, budget - short)
            self.alive[handle] = sequence
            self.replica.submit(sequence, self.at_ps)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.alive)))
        self.cancelled.add(handle)
        self.replica.cancel(handle, self.at_ps)

    @rule(num_steps=st.integers(1, 6))
    def run(self, num_steps: int) -> None:
        if self.plan is None:
            self.decide()
        if self.plan is None:
            self.at_ps = max(self.at_ps + 500, self.until_ps or 0)
            return
        first = self.steps_left == self.plan.max_steps
        at_ps = self.at_ps if first else self.at_ps - self.plan.wait_ps  # the wait belongs to the first step
        ran = self.device.run(self.plan, at_ps, min(num_steps, self.steps_left), self.plan.until_ps, chunks=first)
        self.at_ps = ran.end_ps
        self.steps_left -= ran.num_steps
        over = bool(ran.finished) or not self.steps_left or ran.end_ps >= (self.plan.until_ps or ran.end_ps + 1)
        self.note(self.replica.commit(self.plan, ran))
        if over:
            self.plan = None

    @rule()
    def lose_the_worker(self) -> None:
        unfinished, events = self.replica.lose(self.at_ps)
        self.note(events)
        assert {sequence.handle for sequence in unfinished} == set(self.alive)
        assert not self.replica.running.adapter_slots
        assert not len(self.replica.running)
        assert not self.replica.kv_tokens
        self.replica = build(self.policy, POOL, BATCH_TOKENS, MOST)
        self.device, self.plan = Device(self.lengths), None
        for sequence in unfinished:
            self.replica.submit(sequence, self.at_ps)

    def decide(self) -> None:
        decision = self.replica.plan(self.at_ps)
        self.note(decision.events)
        self.device.forget(decision.leaves)
        if isinstance(decision, Plan):
            self.plan, self.steps_left = decision, decision.max_steps
        else:
            self.until_ps = decision.until_ps

    def note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                assert event.output_tokens == self.lengths[event.sequence.handle] or event.sequence.aborted
            if isinstance(event, Finished | Cancelled | Dropped):
                del self.alive[event.sequence.handle]  # a second end would be a KeyError

    @invariant()
    def no_budget_is_over(self) -> None:
        nothing_is_negative_or_over(self.replica, POOL, MOST)

    def teardown(self) -> None:
        for _ in range(5_000):
            if not self.alive:
                break
            self.run(6)
        if self.policy not in NEVER_FREED_FROM_CANCELLED:
            assert not self.alive
            while self.replica.ended:  # a step that was decided ahead does not know of them; the one after it does
                self.run(1)
            assert not len(self.replica.running)
            assert not self.replica.kv_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_happens_every_sequence_ends_once_and_nothing_is_left(policy: str) -> None:
    machine = type("Machine", (ReplicaMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=8, stateful_step_count=25, deadline=None))
