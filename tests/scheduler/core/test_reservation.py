"""The peak reservation against its definition, step by step."""

from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.memory.reservation import PeakReservation, RunningPeak
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence

entries = st.tuples(st.integers(1, 20), st.integers(0, 15))


def peak(held_and_left: list[tuple[int, int]]) -> int:
    most = held_so_far = 0
    for count, (held, left) in enumerate(sorted(held_and_left, key=lambda entry: -entry[1]), start=1):
        held_so_far += held
        most = max(most, left * count + held_so_far)
    return most


def reservation(held_and_left: list[tuple[int, int]]) -> PeakReservation:
    ordered = sorted(held_and_left, key=lambda entry: -entry[1])
    return PeakReservation([left for _, left in ordered], [held for held, _ in ordered])


@given(present=st.lists(entries, max_size=8), first=entries, second=entries)
def test_peak_with_one_more_and_after_adding_it(
    present: list[tuple[int, int]], first: tuple[int, int], second: tuple[int, int]
) -> None:
    reserved = reservation(present)
    assert reserved.peak_with(*first, 0) == peak([*present, first])
    more = reserved.with_more([first], 0)
    assert (len(more), len(reserved)) == (len(present) + 1, len(present))
    assert more.peak_with(*second, 0) == peak([*present, first, second])


@given(present=st.lists(entries, max_size=8), candidate=entries)
def test_peaks_of_future_steps_equal_stepping_there(present: list[tuple[int, int]], candidate: tuple[int, int]) -> None:
    steps = range(min((left for _, left in present), default=3) + 1)
    ahead = [reservation(present).peak_with(*candidate, step) for step in steps]
    assert ahead == [peak([*((h + k, left - k) for h, left in present), candidate]) for k in steps]


@given(
    present=st.lists(st.tuples(st.integers(1, 20), st.integers(2, 30)), min_size=1, max_size=6),
    candidate=st.tuples(st.integers(1, 20), st.integers(1, 30)),
    pool=st.integers(5, 200),
)
def test_steps_until_fits_is_the_first_step_at_which_the_candidate_fits(
    present: list[tuple[int, int]], candidate: tuple[int, int], pool: int
) -> None:
    running = Running()
    for handle, (prompt, budget) in enumerate(present):
        running.join(Sequence(handle, prompt, budget))
    limit = running.steps_to_length()
    peak_of = RunningPeak()
    kept = peak_of.of(running)
    answer = kept.steps_until_at_most(*candidate, pool, running.decode_step, limit)
    for step in range(1, answer + 1):
        running.advance(1)
        peak_now = PeakReservation(*running.reservations()).peak_with(*candidate, running.decode_step)
        assert peak_of.of(running) is kept
        assert step == limit or kept.peak_with(*candidate, step) == peak_now
        fits = peak_now <= pool
        assert fits == (step == answer) or step == limit
