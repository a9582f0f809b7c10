"""Rules of vLLM's step that the recorded cases do not show: what the settings around it do."""

from lorrery.scheduler.core.acceptance import LengthCheck
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.facts import Admitted, Preempted
from lorrery.scheduler.core.plan import Idle, Plan, Ran
from lorrery.scheduler.core.refusals import RefusalReason
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.scheduler.replicas import cluster_rules
from lorrery.service.settings.cluster import load

STEP_PS = 1_000


def replica(pool_tokens: int = 160, **settings: object) -> Replica:
    more = {"block_size": 16, "watermark": 0.0, "max_num_seqs": 8, "max_num_batched_tokens": 64, "blocking_loads": True}
    chosen = {"policy": "fcfs", "batching": "vllm", "memory": "on_demand", **more, **settings}
    return build_replica(ReplicaSettings(max_total_token_num=pool_tokens, max_req_total_len=pool_tokens, **chosen))


def run(one: Replica, steps: int = 1, at_ps: int = 0) -> list[list[int]]:
    """Run steps without an end; return what each has scheduled, by handle."""
    scheduled: list[list[int]] = []
    for number in range(steps):
        decision = one.plan(at_ps + number * STEP_PS)
        assert isinstance(decision, Plan)
        chunks = [chunk.handle for chunk in decision.prefills]
        decoding = [sequence.handle for sequence in one.running] if decision.decode else []
        scheduled.append(sorted([*chunks, *decoding]))
        one.commit(decision, Ran(1, at_ps + (number + 1) * STEP_PS))
    return scheduled


def test_what_can_never_fit_is_named_or_waits_for_ever() -> None:
    too_long = Sequence(1, 161, 10)
    assert "max_total_token_num is 160" in (replica().never_fits_reason(too_long) or "")
    waits = replica(refuse_never_fits=False)
    assert waits.never_fits_reason(too_long) is None
    waits.submit(too_long, 0)
    waits.submit(Sequence(2, 8, 10), 0)
    assert isinstance(waits.plan(0), Idle)
    assert waits.num_waiting == 2


def test_a_lower_priority_goes_first_and_is_preempted_last() -> None:
    one = replica(pool_tokens=64, policy="priority")
    for handle, priority in ((1, 5), (2, 0)):
        sequence = Sequence(handle, 31, 40, arrived_ps=handle)
        sequence.priority = priority
        one.submit(sequence, 0)
    decision = one.plan(0)
    assert [event.sequence.handle for event in decision.events if isinstance(event, Admitted)] == [2, 1]
    assert isinstance(decision, Plan)
    one.commit(decision, Ran(1, STEP_PS))
    run(one, at_ps=STEP_PS)
    decision = one.plan(2 * STEP_PS)  # a third block for each: there are four
    assert [event.sequence.handle for event in decision.events if isinstance(event, Preempted)] == [1]


def test_any_number_overtake_one_without_a_place_for_its_adapter_unless_a_bound_is_set() -> None:
    adapters = {name: Adapter(name, 8, 0) for name in "ab"}
    for bound, entered in ((None, [0, *range(2, 7)]), (2, [0, 2, 3]), (0, [0])):
        one = replica(max_loras=1, max_overtakes=bound)
        for handle in range(7):
            one.submit(Sequence(handle, 4, 8, adapter=adapters["b" if handle == 1 else "a"]), 0)
        assert run(one) == [entered]


def test_an_arrival_during_a_step_waits_for_one_more_if_steps_are_decided_ahead() -> None:
    for ahead, begins in ((False, 2), (True, 3)):
        one = replica(async_scheduling=ahead)
        one.submit(Sequence(1, 8, 20), 0)
        run(one)
        one.submit(Sequence(2, 8, 20), STEP_PS + 1)
        scheduled = run(one, 4, at_ps=STEP_PS)
        assert [2 in step for step in scheduled] == [number >= begins - 1 for number in range(4)]


def test_what_may_wait_for_ever_is_let_in_at_the_door() -> None:
    fields = ["model='Llama-2-7B'", "scheduler.max_total_token_num=4000", "scheduler.max_req_total_len=4000"]
    for refuse, reason in (("true", RefusalReason.NEVER_FITS), ("false", None)):
        rules = cluster_rules(load(None, [*fields, f"scheduler.refuse_never_fits={refuse}"]))
        refusal = LengthCheck(rules).refuse(Sequence(1, 2000, 2000), accepted_before=False)
        assert (None if refusal is None else refusal.reason) == reason
