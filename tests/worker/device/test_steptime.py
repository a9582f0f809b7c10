"""What every step-time model keeps: closed forms are exact, and more work never takes less time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, PrefillChunk
from lorrery.worker.device.catalogue.architecture import precision
from lorrery.worker.device.constant import LlmMock
from lorrery.worker.device.fitted import Fitted
from lorrery.worker.device.lora import LoraKernels
from lorrery.worker.device.naive import NaiveRoofline
from lorrery.worker.device.profile import read_profile
from lorrery.worker.device.roofline import Roofline
from lorrery.worker.device.steps import read_steps
from lorrery.worker.device.steptime import STEP_TIME_MODELS, StepTimeModel
from tests.worker.device.known import deployment

STEP_LOG = read_steps(
    ["step_ms,prefill_tokens,decode_seqs,decode_kv_tokens,prefill_attn_pairs"]
    + ["20,100,0,0,5000", "21,100,0,0,15000", "40,300,0,0,45000"]
    + [f"{9 + num % 2 + num / 10 + kv / 4e3},0,{num},{num + kv},0" for num in (1, 2, 3, 40) for kv in (100, 900)]
)

CLOSED: list[StepTimeModel] = [
    LlmMock(),
    Roofline(deployment("A100-80-SXM", "Llama-2-7B", engine="present-day")),
    Roofline(deployment("A10G", "Qwen2.5-7B", 2, lora=LoraKernels("all-linear", "batch"))),
    Roofline(deployment("H100-NVL", "Mixtral-8x7B", 4, lora=LoraKernels("qkvo", 64, 1.5, sharded=True))),
    Roofline(deployment("B200", "Qwen3-32B", 4, engine="present-day", precision=precision("fp8", "fp8"))),
]
FITTED: StepTimeModel = Fitted(deployment("A100-80-SXM", "Llama-2-7B", steps=STEP_LOG))
PIECEWISE: list[StepTimeModel] = [
    NaiveRoofline(deployment("A100-80-SXM", "Llama-2-7B")),
    NaiveRoofline(deployment("L4", "Qwen3-30B-A3B", 4)),
    Roofline(deployment("H100-SXM", "Llama-3-8B", engine="vllm-2023")),
]
UNIFIED: list[StepTimeModel] = [
    Roofline(deployment("RTX-4090", "Llama-3-8B", engine="vllm-kernels")),
    Roofline(deployment("H100-SXM", "Llama-2-70B", 8, engine="present-day-unified")),
]
FORMULAS = CLOSED + PIECEWISE + UNIFIED

tokens = st.integers(0, 5000)
chunks = st.builds(PrefillChunk, st.integers(1, 3000), tokens, st.booleans())
# Adapters of a batch: rank and tokens.
adapters = st.lists(st.tuples(st.sampled_from([8, 16, 32, 64, 128]), st.integers(1, 600)), max_size=40)


def batch_of(prefills: list[PrefillChunk], kv: list[int], lora: LoraWork = NO_LORA) -> Batch:
    return Batch(tuple(prefills), len(kv), sum(kv), max(kv, default=0), lora, tuple(kv))


prefill_lists = st.lists(chunks, max_size=5)
kv_lists = st.lists(tokens, max_size=40)


# Each example goes through every model: drawing one costs more than all of them together.
def not_shorter(larger: Batch, smaller: Batch) -> None:
    for model in FORMULAS:
        assert model.step_ps(larger) >= model.step_ps(smaller) * (1 - 1e-9), model


def test_settings_names_build_the_model_of_that_name():
    profile = read_profile(["phase,batch_size,kv_len,prefill_chunk,step_ms", "decode,1,10,,5", "prefill,,,10,6"])
    for name, build in STEP_TIME_MODELS.items():
        assert build(deployment("A100-80-SXM", "Llama-2-7B", profile=profile, steps=STEP_LOG)).name == name


@settings(deadline=None)
@given(kv=st.lists(tokens, min_size=1, max_size=300), steps=st.integers(0, 2000), adapters=adapters)
def test_segment_is_the_step_time_bit_for_bit(kv, steps, adapters):
    num, total, longest, lora = len(kv), sum(kv), max(kv), LoraWork.of(adapters)
    later = Batch((), num, total + steps * num, longest + steps, lora)
    for model in [*CLOSED, FITTED]:
        segment = model.decode_segment(num, total, longest, lora)
        assert segment is not None, model
        assert segment.step_ps(steps) == model.step_ps(later), model
        again = model.decode_segment(num, later.decode_kv_tokens, later.max_decode_kv_tokens, lora)
        assert again is not None, model
        assert again.step_ps(0) == segment.step_ps(steps), model
        assert segment.total_ps(steps) + again.total_ps(7) == segment.total_ps(steps + 7), model


@settings(deadline=None)
@given(
    kv=st.lists(tokens, min_size=1, max_size=100),
    held=st.lists(tokens, min_size=1, max_size=100),
    steps=st.integers(0, 2000),
    adapters=adapters,
)
def test_segment_with_held_sequences_is_the_step_time_while_one_of_them_is_the_longest_or_none(
    kv, held, steps, adapters
):
    num, total, lora = len(kv) + len(held), sum(kv) + sum(held), LoraWork.of(adapters)
    grows = max(kv) >= max(held)
    longest = max(*kv, *held)
    if not grows:
        steps = min(steps, longest - max(kv) - 1)
    later = Batch((), num, total + steps * len(kv), longest + steps * grows, lora)
    for model in [*CLOSED, FITTED, *PIECEWISE]:
        segment = model.decode_segment(num, total, longest, lora, num_held=len(held), longest_grows=grows)
        assert segment is not None, model
        if steps < segment.num_steps:
            assert segment.step_ps(steps) == model.step_ps(later), model


@settings(deadline=None)
@given(kv=st.lists(tokens, min_size=1, max_size=500), steps=st.integers(0, 2000), adapters=adapters)
def test_a_segment_is_exact_to_its_last_step(kv, steps, adapters):
    num, total, longest, lora = len(kv), sum(kv), max(kv), LoraWork.of(adapters)
    later = Batch((), num, total + steps * num, longest + steps, lora)
    for model in PIECEWISE:
        segment = model.decode_segment(num, total, longest, lora)
        assert segment is not None, model
        if steps < segment.num_steps:
            assert segment.step_ps(steps) == model.step_ps(later), model
        if segment.num_steps < NEVER:
            beyond = segment.num_steps
            later = Batch((), num, total + beyond * num, longest + beyond, lora)
            assert segment.step_ps(beyond) < model.step_ps(later), model


@settings(deadline=None)
@given(prefills=prefill_lists, kv=kv_lists, adapters=adapters)
def test_parts_add_up_to_the_step(prefills, kv, adapters):
    batch = batch_of(prefills, kv, LoraWork.of(adapters))
    for model in FORMULAS:
        assert model.step_cost(batch).total_ps == model.step_ps(batch), model


@settings(deadline=None)
@given(prefills=prefill_lists, kv=kv_lists, chunk=chunks)
def test_a_further_chunk_never_shortens_a_step(prefills, kv, chunk):
    not_shorter(batch_of([*prefills, chunk], kv), batch_of(prefills, kv))


@settings(deadline=None)
@given(prefills=prefill_lists, kv=kv_lists, another=tokens)
def test_a_further_decode_never_shortens_a_step(prefills, kv, another):
    not_shorter(batch_of(prefills, [*kv, another]), batch_of(prefills, kv))


@settings(deadline=None)
@given(prefills=prefill_lists, kv=kv_lists, chunk=chunks, new=st.integers(0, 500), past=st.integers(0, 500))
def test_a_longer_chunk_or_more_context_never_shortens_a_step(prefills, kv, chunk, new, past):
    longer = PrefillChunk(chunk.new_tokens + new, chunk.past_tokens + past, samples=True)
    not_shorter(batch_of([*prefills, longer], kv), batch_of([*prefills, chunk], kv))


@settings(deadline=None)
@given(prefills=prefill_lists, kv=st.lists(tokens, min_size=1, max_size=40), more=st.integers(1, 500))
def test_more_context_of_a_decode_never_shortens_a_step(prefills, kv, more):
    not_shorter(batch_of(prefills, [kv[0] + more, *kv[1:]]), batch_of(prefills, kv))


@settings(deadline=None)
@given(prefills=prefill_lists, kv=st.lists(tokens, min_size=1, max_size=40), adapters=adapters, data=st.data())
def test_an_adapter_or_a_token_or_a_rank_more_never_shortens_a_step(prefills, kv, adapters, data):
    smaller = batch_of(prefills, kv, LoraWork.of(adapters))
    one_more = [*adapters, data.draw(st.tuples(st.integers(1, 256), st.integers(1, 600)))]
    not_shorter(batch_of(prefills, kv, LoraWork.of(one_more)), smaller)
    if adapters:
        (rank, num), *rest = adapters
        more_rank, more_num = data.draw(st.integers(0, 64)), data.draw(st.integers(0, 64))
        larger = LoraWork.of([(rank + more_rank, num + more_num), *rest])
        not_shorter(batch_of(prefills, kv, larger), smaller)


@settings(deadline=None)
@given(prefills=prefill_lists, kv=kv_lists)
def test_no_adapters_cost_exactly_nothing(prefills, kv):
    batch = batch_of(prefills, kv)
    assert batch.lora == LoraWork.of([])
    for model in FORMULAS:
        assert model.step_cost(batch).lora == 0, model
        assert model.step_ps(batch) == model.step_ps(batch_of(prefills, kv, LoraWork())), model
