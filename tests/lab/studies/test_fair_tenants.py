"""A greedy tenant hardly moves the others under counters with places kept free, and a lot without."""

from lab.studies.fair_tenants import POLICIES, SECONDS, measure

FIRST_COME, _, BOUNDED = POLICIES


def test_ten_times_its_share_moves_the_others_p99_by_less_than_a_fifth() -> None:
    at_share, greedy = (measure(BOUNDED, times, SECONDS) for times in (1, 10))
    assert greedy.others_ttft_p99_ms < 1.2 * at_share.others_ttft_p99_ms
    assert greedy.greedy_ttft_p99_ms > 100 * greedy.others_ttft_p99_ms
    assert measure(FIRST_COME, 10, 60).others_ttft_p99_ms > 10 * at_share.others_ttft_p99_ms
