"""What every step-time model keeps: closed forms are exact, and more work never takes less time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.device.batch import Batch, PrefillChunk
from worker.device.catalogue import find_gpu, find_model
from worker.device.llm_mock import LlmMock
from worker.device.roofline import Roofline
from worker.device.steptime import STEP_TIME_MODELS, StepTimeModel

MODELS: list[StepTimeModel] = [
    LlmMock(),
    Roofline(find_gpu("A100-80-SXM"), find_model("Llama-2-7B")),
    Roofline(find_gpu("A10G"), find_model("Qwen2.5-7B"), 2),
    Roofline(find_gpu("H100-NVL"), find_model("Mixtral-8x7B"), 4),
]

tokens = st.integers(0, 5000)
chunks = st.builds(PrefillChunk, st.integers(1, 3000), tokens, st.booleans())


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    kv = draw(st.lists(tokens, max_size=6))
    return Batch(tuple(draw(st.lists(chunks, max_size=5))), len(kv), sum(kv), max(kv, default=0))


def test_settings_names_build_the_model_of_that_name():
    for name, build in STEP_TIME_MODELS.items():
        assert build(find_gpu("A100-80-SXM"), find_model("Llama-2-7B"), 1).name == name


@pytest.mark.parametrize("model", MODELS)
@settings(deadline=None)
@given(kv=st.lists(tokens, min_size=1, max_size=300), steps=st.integers(0, 2000))
def test_segment_is_the_step_time_bit_for_bit(model, kv, steps):
    num, total, longest = len(kv), sum(kv), max(kv)
    segment = model.decode_segment(num, total, longest)
    assert segment is not None
    later = Batch((), num, total + steps * num, longest + steps)
    assert segment.step_ps(steps) == model.step_ps(later)
    again = model.decode_segment(num, later.decode_kv_tokens, later.max_decode_kv_tokens)
    assert again is not None
    assert again.step_ps(0) == segment.step_ps(steps)
    assert segment.total_ps(steps) + again.total_ps(7) == segment.total_ps(steps + 7)


@pytest.mark.parametrize("model", MODELS)
@settings(deadline=None)
@given(batch=batches(), chunk=chunks)
def test_a_further_chunk_never_shortens_a_step(model, batch, chunk):
    larger = Batch((*batch.prefills, chunk), batch.num_decodes, batch.decode_kv_tokens, batch.max_decode_kv_tokens)
    assert model.step_ps(larger) >= model.step_ps(batch)


@pytest.mark.parametrize("model", MODELS)
@settings(deadline=None)
@given(batch=batches(), kv=tokens)
def test_a_further_decode_never_shortens_a_step(model, batch, kv):
    larger = Batch(
        batch.prefills, batch.num_decodes + 1, batch.decode_kv_tokens + kv, max(batch.max_decode_kv_tokens, kv)
    )
    assert model.step_ps(larger) >= model.step_ps(batch)


@pytest.mark.parametrize("model", MODELS)
@settings(deadline=None)
@given(batch=batches(), chunk=chunks, new=st.integers(0, 500), past=st.integers(0, 500))
def test_a_longer_chunk_or_more_context_never_shortens_a_step(model, batch, chunk, new, past):
    def step_ps(last: PrefillChunk) -> int:
        return model.step_ps(
            Batch((*batch.prefills, last), batch.num_decodes, batch.decode_kv_tokens, batch.max_decode_kv_tokens)
        )

    longer = PrefillChunk(chunk.new_tokens + new, chunk.past_tokens + past, samples=True)
    assert step_ps(longer) >= step_ps(chunk)
