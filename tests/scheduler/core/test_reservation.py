"""The peak reservation against its definition, step by step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.scheduler.core.memory import reservation as reservation_module
from lorrery.scheduler.core.memory.peak import MOST_UNASKED, RunningPeak
from lorrery.scheduler.core.memory.reservation import PeakReservation
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from tests.scheduler.core.oracle.reservation import IndexedReservation

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


def test_a_prompt_in_prefill_is_late_by_those_ahead_of_it_too() -> None:
    running = Running()
    for handle, prompt in ((1, 10), (2, 20)):
        running.admit(Sequence(handle, prompt, 5))
    kept = RunningPeak().of(running, least_chunk=4)
    # The prompts take 3 and 8 steps, and hold their length and a token; 5 - 2 tokens are left after the next one.
    by_hand = reservation([(11, 3 + 2), (21, 3 + 7)])
    assert [kept.peak_with(1, left, 0) for left in range(12)] == [by_hand.peak_with(1, left, 0) for left in range(12)]


changes = st.lists(
    st.tuples(st.sampled_from(["come", "come", "go", "step"]), st.integers(0, 400), st.integers(1, 60)), max_size=40
)


@settings(max_examples=50)
@pytest.mark.parametrize("width", [2, reservation_module.WIDTH])
@given(changes=changes, candidate=entries, pool=st.integers(5, 4000))
def test_what_is_kept_up_answers_as_what_is_made_anew(
    width: int, changes: list[tuple[str, int, int]], candidate: tuple[int, int], pool: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reservation_module, "WIDTH", width)
        kept, step = PeakReservation(), 0
        present: list[tuple[int, int]] = []  # (F, h)
        for what, number, held in changes:
            for one in range(held % 7 + 1):  # several at once, so that blocks fill, part and merge
                if what == "come":
                    present.append(((number * (one + 1)) % 401 + step, held - step))
                    kept.add(*present[-1])
                elif what == "go" and present:
                    kept.remove(*present.pop((number + one) % len(present)))
            if what == "step":
                step += min([number % 30, *(finish - step for finish, _ in present)])
            present.sort(reverse=True)
            anew = IndexedReservation([finish for finish, _ in present], [held for _, held in present])
            limit = max(1, min((finish - step for finish, _ in present), default=9))
            for reserved in (kept, kept.copy(), PeakReservation([f for f, _ in present], [h for _, h in present])):
                assert len(reserved) == len(anew)
                assert reserved.peak_with(*candidate, step) == anew.peak_with(*candidate, step)
                peak_now = anew.peak_with(*candidate, step)
                for most in (pool, peak_now, peak_now - 1):
                    assert reserved.has_room(*candidate, most, step) == (peak_now <= most)
                    answers = [r.steps_until_at_most(*candidate, most, step, limit) for r in (reserved, anew)]
                    assert answers[0] == answers[1]


def test_only_one_that_is_there_can_go() -> None:
    kept = reservation([(3, 5), (4, 5)])
    with pytest.raises(ValueError, match="no sequence"):
        kept.remove(5, 5)


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
    running, peak_of = Running(), RunningPeak()
    for handle, (prompt, budget) in enumerate(present):
        running.join(Sequence(handle, prompt, budget))
    limit = running.steps_to_length()
    kept = peak_of.of(running, None)
    answer = kept.steps_until_at_most(*candidate, pool, running.decode_step, limit)
    for step in range(1, answer + 1):
        running.decode_step += 1
        peak_now = RunningPeak().of(running, None).peak_with(*candidate, running.decode_step)
        assert peak_of.of(running, None) is kept
        assert step == limit or kept.peak_with(*candidate, step) == peak_now
        fits = peak_now <= pool
        assert fits == (step == answer) or step == limit


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["admit", "join", "leave", "hold", "ask", "rest"]), st.integers(0, 99)), max_size=60
    )
)
def test_the_batchs_reservation_follows_whoever_comes_and_goes(events: list[tuple[str, int]]) -> None:
    running, peak_of = Running(), RunningPeak()
    sequences: dict[int, Sequence] = {}
    for handle, (what, number) in enumerate(events):
        chosen = list(sequences.values())[number % len(sequences)] if sequences else None
        if what == "admit":
            sequences[handle] = Sequence(handle, number + 1, 200 + number)
            running.admit(sequences[handle])
        elif what == "join" and chosen is not None and chosen.handle in running.prefilling:
            running.join(chosen)
            peak_of.joined(chosen)
        elif what == "leave" and chosen is not None:
            running.leave(sequences.pop(chosen.handle))
            peak_of.left(chosen)
        elif what == "hold" and chosen is not None and chosen in list(running):
            running.hold(chosen)
        elif what == "rest":
            for _ in range(MOST_UNASKED):  # changes that nobody asks after
                passer = Sequence(1000, 5, 200)
                running.join(passer)
                peak_of.joined(passer)
                running.leave(passer)
                peak_of.left(passer)
            running.decode_step += 1
        else:
            step = running.decode_step
            assert peak_of.of(running, None).peak_with(9, number, step) == peak(
                [
                    (9, number),
                    *((s.input_tokens + s.output_tokens_at(step), s.finish_step - 1 - step) for s in running),
                    *((s.input_tokens + 1, s.budget_tokens - 2) for s in running.prefilling.values()),
                ]
            )
