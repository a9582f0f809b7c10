"""Step times of constants."""

from hypothesis import given
from hypothesis import strategies as st

from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.constant import ConstantSteps, StepConstants

MS = PS_PER_SECOND // 1000
MODEL = ConstantSteps(StepConstants(step_ms=20.0, prefill_ms=80.0, prefill_token_ms=0.25))


def test_a_lone_prompt_takes_the_step_its_overhead_and_its_tokens():
    assert MODEL.step_ps(Batch((PrefillChunk(100, 0, True),))) == (20 + 80 + 25) * MS


def test_decodes_take_the_same_however_many_and_long_they_are():
    assert MODEL.step_ps(Batch((), 1, 10, 10)) == MODEL.step_ps(Batch((), 64, 64_000, 2_000)) == 20 * MS


def test_a_cached_prompt_costs_the_overhead_alone_and_no_step_takes_no_time():
    assert MODEL.step_ps(Batch((PrefillChunk(0, 100, True),))) == 100 * MS
    assert MODEL.step_ps(Batch()) == 20 * MS
    assert ConstantSteps(StepConstants(step_ms=1e-12)).step_ps(Batch()) == 1


@given(st.integers(1, 300), st.integers(1, 10**6), st.integers(0, 50))
def test_a_segment_is_its_steps_and_the_parts_add_up(num_decodes: int, kv_tokens: int, step: int):
    segment = MODEL.decode_segment(num_decodes, kv_tokens, kv_tokens)
    assert segment is not None
    batch = Batch((), num_decodes, kv_tokens + step * num_decodes, kv_tokens + step)
    assert segment.base_ps + step * segment.slope_ps == MODEL.step_ps(batch)
    assert MODEL.step_cost(batch).total_ps == MODEL.step_ps(batch)
