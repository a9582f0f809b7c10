from lorrery.scheduler.core.acceptance import LONGEST_PS, SHORTEST_PS, ClusterRules, DrainRate
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_facts import Refused
from lorrery.scheduler.core.placements.by_load import LeastLoaded
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.units import PS_PER_SECOND as S


def test_those_refused_since_the_last_end_are_told_to_come_one_after_another() -> None:
    rate = DrainRate()
    assert rate.retry_ps(0) is None
    assert rate.step_ps(0) == 0
    for second in range(5):
        rate.ended(second * S)
    assert [rate.retry_ps(4 * S) for _ in range(3)] == [S, 2 * S, 3 * S]
    assert rate.step_ps(4 * S) == S
    rate.ended(5 * S)
    assert rate.retry_ps(5 * S) == S


def test_a_queue_that_drains_no_more_lets_wait_longer_and_no_answer_is_absurd() -> None:
    rate = DrainRate()
    rate.ended(0)
    rate.ended(0)
    assert rate.retry_ps(0) == SHORTEST_PS
    assert rate.retry_ps(10 * S) == 20 * S
    assert rate.retry_ps(10**6 * S) == LONGEST_PS
    assert rate.step_ps(10**6 * S) == LONGEST_PS


def test_a_full_queue_says_when_to_try_again() -> None:
    core = ClusterCore(LeastLoaded(), ClusterRules(max_waiting_requests=4))
    sequences = [Sequence(handle, 5, 5) for handle in range(4)]
    for sequence in sequences:
        assert core.submit(sequence, 0) == []
    for second, sequence in enumerate(sequences[:2]):
        core.cancel(sequence, 2 * second * S)
        core.ended(sequence, 0, 2 * second * S)
    assert [core.submit(Sequence(handle, 5, 5), 2 * S) for handle in (4, 5)] == [[], []]
    (refused,) = core.submit(Sequence(9, 5, 5), 2 * S)
    assert isinstance(refused, Refused)
    assert refused.refusal.retry_ps == 2 * S
    assert refused.refusal.retry_step_ps == 2 * S
