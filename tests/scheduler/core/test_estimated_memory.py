"""SGLang's memory rule: the ratio, and what pages are free."""

import pytest

from lorrery.scheduler.core.memory.estimated import EstimatedMemory, NewTokenRatio
from lorrery.scheduler.core.replica_settings import SglangRules
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


def test_the_ratio_falls_step_by_step_to_its_least_and_starts_again_when_idle():
    ratio = NewTokenRatio(SglangRules(new_token_ratio_decay_steps=10))
    assert ratio.current == 0.7
    ratio.decay(5)
    assert ratio.current == pytest.approx(0.7 - 5 * 0.0602)
    ratio.decay(100)
    assert ratio.current == 0.7 * 0.14
    ratio.reset()
    assert ratio.current == 0.7


def test_the_ratio_is_the_same_float_however_many_steps_are_counted_at_once():
    at_once, one_by_one = NewTokenRatio(), NewTokenRatio()
    at_once.decay(377)
    for _ in range(377):
        one_by_one.decay(1)
    assert at_once.current == one_by_one.current


def test_a_retraction_sets_the_ratio_by_those_who_stay_and_the_next_step_lifts_one_below_the_least():
    ratio = NewTokenRatio()
    ratio.retracted(2, 10, 99)
    assert ratio.current == 0.5
    ratio.retracted(1, 200, 99)
    assert ratio.current == 1.0
    ratio.retracted(1, 0, 999)
    assert ratio.current == 0.02
    ratio.decay(1)
    assert ratio.current == 0.7 * 0.14


def decoding(memory: EstimatedMemory, running: Running, handle: int, prompt: int, most: int) -> Sequence:
    one = Sequence(handle, prompt, most)
    running.admit(one)
    memory.admitted(one)
    memory.extend(one, prompt)
    running.join(one)
    memory.joined(one)
    return one


def test_pages_are_taken_chunk_by_chunk_and_by_the_step_that_needs_them():
    memory, running = EstimatedMemory(40, page_size=4), Running()
    one = Sequence(1, 10, 20)
    running.admit(one)
    memory.admitted(one)
    assert memory.free_tokens(running) == 40
    memory.extend(one, 5)
    assert memory.free_tokens(running) == 32
    memory.extend(one, 10)
    running.join(one)
    memory.joined(one)
    assert (memory.free_tokens(running), memory.decode_tokens(running)) == (28, 0)
    running.decode_step += 2
    assert (memory.free_tokens(running), memory.decode_tokens(running)) == (28, 4)


def test_running_sequences_are_thought_to_use_their_share_and_those_without_an_end_all():
    memory, running = EstimatedMemory(1000), Running()
    decoding(memory, running, 1, 10, 101)
    assert memory.expected_tokens(running) == 100 * 0.7
    decoding(memory, running, 2, 10, 51).ignore_eos = True
    assert memory.expected_tokens(running) == 100 * 0.7 + 50


def test_what_is_about_to_end_keeps_its_pages_and_takes_no_more():
    memory, running = EstimatedMemory(40, page_size=4), Running()
    one = decoding(memory, running, 1, 8, 3)
    assert memory.decode_tokens(running) == 4
    memory.stop_growing(one, running)
    running.hold(one)
    assert (memory.free_tokens(running), memory.decode_tokens(running)) == (32, 0)
    running.leave(one)
    memory.left(one)
    assert memory.free_tokens(running) == 40


def test_a_request_that_no_empty_pool_would_admit_is_refused():
    memory = EstimatedMemory(100)
    assert memory.can_ever_hold(Sequence(1, 50, 48)) is None
    assert "max_total_token_num is 100" in str(memory.can_ever_hold(Sequence(1, 50, 49)))
