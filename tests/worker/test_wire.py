"""Messages to records and back."""

import numpy as np
import pytest

from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import types_pb2
from lorrery.vocabulary.endings import FinishReason
from lorrery.worker import wire
from lorrery.worker.device.answers import Answers
from lorrery.worker.device.batch import PrefillWork, StepOutcome
from lorrery.worker.device.output import Ending, LognormalLength, sequence_seed
from lorrery.worker.pacer import StepReport
from tests.worker.fake_scheduler import from_u32, join, prefill_plan, u32

ANSWERS = Answers("Llama-2-7B", LognormalLength(20.0, 0.0))


def test_plan_is_read_whole():
    message = prefill_plan(3, 77, join(5, 10, 8), max_steps=4, decode=True)
    message.until_ps = 99
    message.leaves_u32 = u32(1, 2)
    message.adapter_loads.add(adapter_id="a", rank=8, version=4)
    message.joins[0].adapter.version = 4
    message.adapter_evictions.append("b")
    plan = wire.read_plan(message, ANSWERS, 0)
    assert (plan.plan_id, plan.start_ps, plan.max_steps, plan.until_ps, plan.decode) == (3, 77, 4, 99, True)
    assert (plan.leaves, plan.adapter_loads, plan.adapter_evictions) == ((1, 2), ("a@4",), ("b",))
    assert plan.prefills == (PrefillWork(5, 10, 0, samples=True),)
    (sequence,) = plan.joins
    assert (sequence.handle, sequence.prompt_tokens, sequence.produced_tokens) == (5, 10, 0)
    assert sequence.seed == sequence_seed("Llama-2-7B", "lora-0", 5)
    assert (sequence.adapter_key, sequence.adapter_rank) == ("lora-0@4", message.joins[0].adapter.rank)
    assert sequence.ending == Ending(8, FinishReason.LENGTH)


def test_absent_bound_is_none():
    assert wire.read_plan(pb.Plan(plan_id=1, max_steps=1), ANSWERS, 0).until_ps is None


@pytest.mark.parametrize(
    ("sampling", "ending"),
    [
        ({"ignore_eos": False}, Ending(20, FinishReason.EOS)),
        ({"ignore_eos": False, "true_output_tokens": 7}, Ending(7, FinishReason.EOS)),
        ({"ignore_eos": True, "true_output_tokens": 7}, Ending(50, FinishReason.LENGTH)),
        # An empty stop sequence stops nothing.
        ({"ignore_eos": True, "stop_sequences_u32": [b""]}, Ending(50, FinishReason.LENGTH)),
    ],
)
def test_end_follows_from_the_sampling(sampling, ending):
    plan = wire.read_plan(prefill_plan(1, 0, join(5, 10, 50, **sampling)), ANSWERS, 0)
    assert plan.joins[0].ending == ending


def test_step_is_told_in_little_endian_arrays():
    outcome = StepOutcome(
        np.array([7, 9], np.uint32), np.array([300, 2], np.uint32), ((9, FinishReason.EOS), (4, FinishReason.LENGTH))
    )
    step = wire.step_done(StepReport(3, 10, 20, outcome, hand_back=True)).step
    assert (step.plan_id, step.start_ps, step.end_ps, step.hand_back) == (3, 10, 20, True)
    assert step.handles_u32 == bytes([7, 0, 0, 0, 9, 0, 0, 0])
    assert from_u32(step.token_ids_u32) == [300, 2]
    assert from_u32(step.finished_handles_u32) == [9, 4]
    assert from_u32(step.finish_reasons_u32) == [1, 3]


def test_reasons_are_the_wires():
    for reason in FinishReason:
        assert types_pb2.FinishReason.Name(reason) == f"FINISH_REASON_{reason.name}"


def test_arrays_that_do_not_fit_are_refused():
    uneven = prefill_plan(1, 0, join(5, 10, 8))
    uneven.prefill_samples_u32 = b""
    with pytest.raises(ValueError, match="prefill arrays"):
        wire.read_plan(uneven, ANSWERS, 0)
    with pytest.raises(ValueError, match="multiple of element size"):
        wire.read_plan(pb.Plan(plan_id=1, max_steps=1, leaves_u32=b"abc"), ANSWERS, 0)


def test_echo_without_its_prompt_is_refused():
    answers = Answers("Llama-2-7B", LognormalLength(20.0, 0.0), "echo")
    with pytest.raises(ValueError, match="sequence 5: 0 prompt token ids of 10"):
        wire.read_plan(prefill_plan(1, 0, join(5, 10, 8)), answers, 0)
