"""What is known of a worker's time."""

import pytest

from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.candidate import PREDICTED
from lorrery.scheduler.core.placements.forecast import ONE, WINDOW_ENDS, WINDOW_PS, Forecast, OutputShare
from lorrery.scheduler.core.plan import Plan, Ran
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.steptime import Pace

PACE = Pace(1_000_000, 10_000, 10, 1_000)
SETTINGS = ReplicaSettings("fcfs", max_total_token_num=100_000, max_req_total_len=10_000)


def member() -> Member:
    made = Member("w", build_replica(SETTINGS), pace=PACE)
    made.predict(OutputShare())
    return made


def figures(one: Member) -> tuple[int, ...]:
    figures = one.candidate
    return figures.slowdown, figures.usual_slowdown, figures.waiting_tokens, figures.output_ratio, figures.prompt_share


def step_ps(one: Member, plan: Plan) -> int:
    """What the pace says of the next step."""
    running = one.replica.running
    decode_ps = running.num_decoding * PACE.sequence_ps + running.kv_tokens * PACE.kv_token_ps if plan.decode else 0
    return PACE.base_ps + decode_ps + sum(chunk.new_tokens for chunk in plan.prefills) * PACE.prompt_token_ps


def run(one: Member, factor: int, *, at_once: bool, requests: int = 12, output: int = 40) -> list[tuple[int, ...]]:
    """Serve requests two by two on a device that takes `factor` times as long as it says; return the figures."""
    at_ps, seen = 0, []
    for number in range(0, requests, 2):
        for handle in (number, number + 1):
            one.submit(Sequence(handle, 100 + handle, output, at_ps), at_ps)
        while isinstance(plan := one.plan(at_ps), Plan):
            seen.append(figures(one))
            left = plan.max_steps
            while left:
                steps, busy_ps = (left if at_once else 1), 0
                for ahead in range(steps):
                    num = one.replica.running.num_decoding if plan.decode else 0
                    busy_ps += factor * (step_ps(one, plan) + ahead * num * PACE.kv_token_ps)
                at_ps, left = at_ps + busy_ps, left - steps
                running = one.replica.running
                over = plan.decode and not left and running.steps_to_length() == steps
                ended = [(sequence.handle, FinishReason.LENGTH) for sequence in running] if over else []
                one.commit(plan, Ran(steps, at_ps, ended, busy_ps=busy_ps))
    return seen


def test_the_slowdown_is_what_steps_took_to_what_the_pace_says():
    for factor in (1, 3):
        one = member()
        run(one, factor, at_once=True)
        assert figures(one)[:2] == (factor * ONE, factor * ONE)


def test_steps_committed_one_by_one_and_at_once_leave_the_same_figures():
    assert run(member(), 2, at_once=True) == run(member(), 2, at_once=False)


def test_a_worker_that_gets_slower_is_known_to_within_two_windows_and_its_usual_pace_stays():
    forecast = Forecast(PACE, OutputShare())
    running = build_replica(SETTINGS).running
    plan = Plan(0, 1)
    per_window = WINDOW_PS // PACE.base_ps
    for factor, windows in ((1, 20), (5, 2)):
        for _ in range(windows):
            forecast.ran(running, plan, Ran(per_window, 0, busy_ps=factor * per_window * PACE.base_ps))
            forecast.batch_changed()
    assert forecast.slowdown == 5 * ONE
    assert ONE < forecast.usual_slowdown < 1.5 * ONE


def test_waiting_tokens_are_those_of_sequences_that_have_come_and_not_begun():
    one = member()
    for handle in range(3):
        one.submit(Sequence(handle, 100, 5), 0)
    assert one.candidate.waiting_tokens == 300
    one.cancel(1, 0)
    one.plan(0)
    assert one.candidate.waiting_tokens == 0
    one.submit(Sequence(9, 50, 5), 10)
    assert one.candidate.waiting_tokens == 50
    one.lose(20)


def test_the_share_of_outputs_is_of_the_last_windows():
    share = OutputShare()
    assert share.ratio == ONE
    for _ in range(3 * WINDOW_ENDS):
        share.ended(50, 100)
    assert share.ratio == ONE // 2
    for _ in range(2 * WINDOW_ENDS):
        share.ended(10, 100)
    assert share.ratio == ONE // 10


@pytest.mark.parametrize("name", PREDICTED)
@pytest.mark.parametrize("pace", [None, PACE])
def test_of_a_member_whose_placement_does_not_predict_nothing_is_kept_and_a_look_says_so(pace: Pace | None, name: str):
    one = Member("w", build_replica(SETTINGS), pace=pace)
    with pytest.raises(
        AttributeError, match=f"^{name} is kept only for a placement that predicts; .*`predicts = True`"
    ):
        getattr(one.candidate, name)
