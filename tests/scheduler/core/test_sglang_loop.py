"""SGLang's loop: what a step computes, when no prefill is tried, who is retracted, and what is known a step late."""

from dataclasses import replace

from lorrery.scheduler.core.adapters.loads import Tier
from lorrery.scheduler.core.batching.sglang import IDLE_PASS_PS
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.facts import Event, Finished, FirstToken, Preempted
from lorrery.scheduler.core.plan import Idle, Plan
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings, SglangRules
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.validation.policy.drive import Device

RULES = SglangRules(overlap=False)


def build(rules: SglangRules = RULES, **more: object) -> Replica:
    settings = ReplicaSettings(
        "fcfs_tail",
        1000,
        500,
        memory="estimated",
        prefix_cache="radix",
        block_size=1,
        max_num_batched_tokens=16,
        sglang=rules,
    )
    return build_replica(replace(settings, **more), load_ps=lambda adapter, tier: 1_000 if tier is Tier.HOST else 5_000)


class Steps:
    """Runs a replica step by step."""

    def __init__(self, replica: Replica, lengths: dict[int, int] | None = None) -> None:
        self.replica = replica
        self.device = Device(lengths or {})
        self.at_ps = 0
        self.events: list[Event] = []

    def submit(self, handle: int, prompt: int, most: int, *, adapter: Adapter | None = None) -> Sequence:
        one = Sequence(
            handle,
            prompt,
            most,
            self.at_ps,
            adapter,
            prompt_token_ids=[1000 * handle + n for n in range(prompt)],
            output_token_ids=[1000 * handle + 500 + n for n in range(most)],
        )
        self.device.true_lengths.setdefault(handle, most)
        self.replica.submit(one, self.at_ps)
        return one

    def step(self) -> Plan | Idle:
        """Plan and run a step; `events` has what both said."""
        decision = self.replica.plan(self.at_ps)
        self.events = list(decision.events)
        self.device.forget(decision.leaves)
        if isinstance(decision, Plan):
            ran = self.device.run(decision, self.at_ps, 1, None)
            self.at_ps = ran.end_ps
            self.events += self.replica.commit(decision, ran)
        return decision

    def rows(self) -> list[tuple[int, int]]:
        """Run a step; return its prompt rows, handle and new tokens, and (0, sequences) if it decodes."""
        num_decoding = self.replica.running.num_decoding
        decision = self.step()
        assert isinstance(decision, Plan)
        rows = [(chunk.handle, chunk.new_tokens) for chunk in decision.prefills]
        return [*rows, (0, num_decoding)] if decision.decode else rows

    def of_kind(self, kind: type) -> list[int]:
        return [event.sequence.handle for event in self.events if isinstance(event, kind)]  # type: ignore[attr-defined]


def test_prompts_go_before_decodes_and_the_one_that_is_cut_goes_on_first():
    steps = Steps(build())
    steps.submit(1, 10, 9)
    steps.submit(2, 20, 9)
    assert [steps.rows() for _ in range(3)] == [[(1, 10), (2, 6)], [(2, 14)], [(0, 2)]]


def test_decodes_run_beside_chunks_if_they_are_mixed_and_take_part_of_the_budget():
    steps = Steps(build(replace(RULES, enable_mixed_chunk=True)))
    steps.submit(1, 10, 9)
    assert steps.rows() == [(1, 10)]
    steps.submit(2, 20, 9)
    assert [steps.rows() for _ in range(2)] == [[(2, 15), (0, 1)], [(2, 5), (0, 1)]]
    assert [one.handle for one in steps.replica.running] == [1, 2]
    steps.rows()
    assert [one.handle for one in steps.replica.running] == [2, 1]  # the new batch took in the old one


def test_without_chunks_the_first_prompt_may_exceed_the_input_budget():
    steps = Steps(build(replace(RULES, chunked=False, max_prefill_tokens=16)))
    for handle in (1, 2, 3):
        steps.submit(handle, 20 if handle == 1 else 8, 9)
    assert [steps.rows() for _ in range(3)] == [[(1, 20)], [(2, 8)], [(3, 8)]]  # 8 are not less than the 8 left


def test_a_full_batch_makes_no_pass_until_a_sequence_leaves():
    steps = Steps(build(max_num_seqs=2), {1: 3})
    for handle in (1, 2, 3):
        steps.submit(handle, 4, 9)
    assert steps.rows() == [(1, 4), (2, 4)]
    plan = steps.replica.plan(steps.at_ps)
    assert isinstance(plan, Plan)
    assert plan.max_steps == 8  # to the first length; an end comes earlier
    assert not steps.replica.arrival_matters()
    assert [steps.rows() for _ in range(3)] == [[(0, 2)], [(0, 2)], [(3, 4)]]


def test_prefills_keep_their_interval():
    steps = Steps(build(replace(RULES, prefill_decode_interval=2)))
    steps.submit(1, 4, 9)
    steps.rows()
    steps.submit(2, 4, 9)
    assert [steps.rows() for _ in range(3)] == [[(0, 1)], [(0, 1)], [(2, 4)]]


def test_an_interval_with_nothing_to_decode_passes_by_itself():
    steps = Steps(build(replace(RULES, prefill_decode_interval=2)), {1: 1})
    steps.submit(1, 4, 9)
    steps.rows()
    steps.submit(2, 4, 9)
    idle = steps.step()
    assert isinstance(idle, Idle)
    assert idle.until_ps == steps.at_ps + 2 * IDLE_PASS_PS
    steps.at_ps = idle.until_ps
    assert steps.rows() == [(2, 4)]


def test_the_victim_has_the_fewest_output_tokens_then_the_longest_prompt_and_rejoins_at_the_end():
    rules = replace(RULES, schedule_conservativeness=0.01, retract_decode_steps=1)
    steps = Steps(build(rules, max_total_token_num=60, max_num_batched_tokens=60))
    steps.submit(1, 12, 20)
    steps.rows()
    steps.rows()
    steps.submit(2, 10, 20)
    assert steps.rows() == [(2, 10)]
    steps.submit(3, 11, 20)
    assert steps.rows() == [(3, 11)]  # 1 has a token more than the two
    steps.submit(4, 30, 20)
    while not steps.of_kind(Preempted):
        steps.step()
    assert steps.of_kind(Preempted) == [3]
    assert [one.handle for one in steps.replica.queue] == [4, 3]
    assert steps.replica.prefix_cache is not None
    tokens = [*range(3000, 3011), *range(3500, 3520)]
    assert steps.replica.prefix_cache.match(tokens, None) == 11  # none of its output: these pages were needed


def test_a_decode_waits_for_the_adapters_that_a_prefill_has_evicted():
    steps = Steps(build(max_loras=2, max_num_seqs=8))
    steps.submit(1, 4, 9, adapter=Adapter("a", 1))
    plan = steps.step()
    assert isinstance(plan, Plan)
    assert plan.wait_ps == 5_000
    steps.submit(2, 4, 9, adapter=Adapter("b", 1))
    plan = steps.step()
    assert isinstance(plan, Plan)
    assert (plan.wait_ps, plan.adapter_evictions) == (5_000, ("a",))
    plan = steps.step()
    assert isinstance(plan, Plan)
    assert plan.decode
    assert [adapter.key for adapter in plan.adapter_loads] == ["a"]
    assert plan.wait_ps == 1_000  # from host memory


def test_requests_pass_over_one_whose_adapter_has_no_place_and_the_choice_holds():
    steps = Steps(build(max_loras=1))
    steps.submit(1, 4, 9, adapter=Adapter("a", 1))
    steps.rows()
    steps.submit(2, 4, 9, adapter=Adapter("b", 1))
    steps.submit(3, 4, 9, adapter=Adapter("a", 1))
    assert steps.rows() == [(3, 4)]
    plan = steps.replica.plan(steps.at_ps)
    assert isinstance(plan, Plan)
    assert plan.max_steps == 8
    assert steps.replica.arrival_matters()


# --- results that are known a step late -------------------------------------------------------------------------------


def test_an_end_is_told_when_it_happened_and_known_to_the_decision_after_the_next():
    steps = Steps(build(SglangRules(), max_num_seqs=1), {1: 2})
    steps.submit(1, 4, 9)
    steps.submit(2, 4, 9)
    assert steps.rows() == [(1, 4)]
    assert steps.events[-1:] != [FirstToken]
    steps.rows()
    ended_ps = steps.at_ps
    assert steps.rows() == [(0, 1)]  # for nothing
    finished = [event for event in steps.events if isinstance(event, Finished)]
    assert [(one.sequence.handle, one.output_tokens, one.at_ps) for one in finished] == [(1, 2, ended_ps)]
    assert steps.rows() == [(2, 4)]


def test_an_end_by_length_is_foreseen():
    steps = Steps(build(SglangRules()))
    steps.submit(1, 4, 2)
    steps.submit(2, 4, 9)
    steps.rows()
    steps.rows()
    plan = steps.step()
    assert isinstance(plan, Plan)
    assert plan.decode
    assert steps.of_kind(Finished) == [1]
    cache = steps.replica.prefix_cache
    assert cache is not None
    assert cache.match([1000, 1001, 1002, 1003, 1500, 1501], None) == 5  # its last token is not computed


def test_a_step_for_nothing_has_computed_the_last_token():
    steps = Steps(build(SglangRules()), {1: 2})
    steps.submit(1, 4, 9)
    for _ in range(3):
        steps.step()
    cache = steps.replica.prefix_cache
    assert cache is not None
    assert cache.match([1000, 1001, 1002, 1003, 1500, 1501], None) == 6


def test_a_preempted_sequence_loses_the_token_that_no_decision_has_seen():
    rules = SglangRules(schedule_conservativeness=0.01, retract_decode_steps=1)
    late, at_once = (
        Steps(build(one, max_total_token_num=45, max_num_batched_tokens=60))
        for one in (rules, replace(rules, overlap=False))
    )
    produced = []
    for steps in (late, at_once):
        preempted = [steps.submit(handle, prompt, 20) for handle, prompt in ((1, 10), (2, 12), (3, 11))][1]
        while not steps.of_kind(Preempted):
            steps.step()
        assert steps.of_kind(Preempted) == [2]
        produced.append((preempted.produced_tokens, steps.device.produced[1]))
    (seen, others), (all_of_it, others_at_once) = produced
    assert seen == all_of_it - 1
    assert others == others_at_once


def test_a_lost_worker_gives_back_no_sequence_that_has_ended():
    steps = Steps(build(SglangRules()), {1: 1})
    steps.submit(1, 4, 9)
    steps.submit(2, 4, 9)
    steps.rows()
    unfinished, events = steps.replica.lose(steps.at_ps)
    assert [one.handle for one in unfinished] == [2]
    assert [event.sequence.handle for event in events if isinstance(event, Finished)] == [1]


def test_cancelling_what_has_ended_ends_it_once():
    steps = Steps(build(SglangRules()), {1: 1})
    steps.submit(1, 4, 9)
    steps.rows()
    steps.replica.cancel(1, steps.at_ps)
    steps.step()
    assert [type(event) for event in steps.events] == [FirstToken, Finished]
    assert not steps.replica.num_running
