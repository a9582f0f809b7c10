"""What a plan promises for as long as it holds: nobody else could start, and a long prompt goes on unasked."""

from dataclasses import replace
from typing import ClassVar

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait, decodes_on
from lorrery.scheduler.core.batching.chunked import Chunked
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.memory.peak import PeakMemory
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Sequence
from lorrery.validation.policy.drive import Device, World, jump, step_by_step


@settings(max_examples=60, deadline=None)
@example(batching="mixed", pool=85, batch_tokens=22, requests=[(1, 20)] * 4 + [(20, 2)])  # memory runs out meanwhile
@given(
    batching=st.sampled_from(["continuous", "mixed", "chunked", "prefill_first"]),
    pool=st.integers(60, 150),
    batch_tokens=st.integers(20, 24),
    requests=st.lists(st.tuples(st.sampled_from([1, 9, 20]), st.integers(2, 20)), min_size=1, max_size=9),
)
def test_whether_the_head_could_start_stays_as_it_is_while_a_plan_holds(
    batching: str, pool: int, batch_tokens: int, requests: list[tuple[int, int]]
) -> None:
    chosen = ReplicaSettings("fcfs", pool, 40, batching, max_num_seqs=6, max_num_batched_tokens=batch_tokens)
    replica, device, at_ps = build_replica(chosen), Device({}), 0
    for handle, (prompt, output) in enumerate(requests):
        device.true_lengths[handle] = output
        replica.submit(Sequence(handle, prompt, output), at_ps)
    num_promised, is_blocked = 0, False
    while isinstance(plan := replica.plan(at_ps), Plan):
        if num_promised:
            assert replica.is_blocked == is_blocked, f"{num_promised} steps before the end of the first plan"
        else:
            num_promised, is_blocked = plan.max_steps, replica.is_blocked
        num_promised -= 1
        ran = device.run(plan, at_ps, 1, None)
        replica.commit(plan, ran)
        at_ps = ran.end_ps


def test_a_long_prompt_goes_on_unasked_only_where_the_way_to_batch_says_that_it_needs_not_be() -> None:
    class OfAUser:
        """Chunked prefill in plain Python: of compiled classes none can be derived."""

        decodes_on: ClassVar[bool] = True

        def __init__(self, limits: BatchLimits) -> None:
            self.inner = Chunked(limits)
            self.advanced = self.inner.advanced
            self.emptied = self.inner.emptied
            self.arrivals_matter = self.inner.arrivals_matter

        @property
        def limits(self) -> BatchLimits:
            return self.inner.limits

        def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
            return self.inner.choose(context, at_ps)

    class Alternating(OfAUser):
        """Sets its budget before each choice, and does not say again what its base says."""

        def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
            self.inner.limits = replace(self.limits, max_prompt_tokens=60 - self.limits.max_prompt_tokens)
            return super().choose(context, at_ps)

    assert decodes_on(OfAUser(BatchLimits(4, 20)))
    world = World([(0, Sequence(1, 400, 4), 4), (3_000, Sequence(2, 300, 4, arrived_ps=3_000), 4)])
    stepped, jumped = (
        drive(Replica(Fifo(), Alternating(BatchLimits(4, 20)), PeakMemory(2_000)), world.anew())
        for drive in (step_by_step, jump)
    )
    assert jumped == stepped


def test_a_long_prompt_goes_on_unasked_only_once_it_has_given_back_what_it_showed_ahead() -> None:
    tokens = list(range(160))
    settings = ReplicaSettings(
        policy="fcfs",
        batching="chunked",
        max_total_token_num=13 * 16,  # the blocks that both need
        max_req_total_len=200,
        max_num_seqs=4,
        max_num_batched_tokens=6,
        memory="paged",
        block_size=16,
        watermark=0.0,
        prefix_cache="blocks",
        share_within_plan=True,
    )
    num_preempted = 0
    for at_ps in range(28_000, 70_000, 1_000):
        first = Sequence(1, 160, 30, prompt_token_ids=tokens)
        second = Sequence(2, 160, 5, arrived_ps=at_ps, prompt_token_ids=tokens)
        world = World([(0, first, 30), (at_ps, second, 5)])
        stepped, jumped = (drive(build_replica(settings), world.anew()) for drive in (step_by_step, jump))
        assert jumped == stepped, at_ps
        assert ("admitted", 144) in {(entry[0], entry[-1]) for entry in stepped}
        num_preempted += any(entry[0] == "preempted" for entry in stepped)
    assert num_preempted
