"""Static batching on the device: what has ended keeps its place until it is told to leave."""

from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.batch import NO_LORA, LoraWork, PrefillWork
from lorrery.worker.device.constant import LlmMock
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.output import Ending
from lorrery.worker.device.rows import DeviceSequence


def test_a_held_sequence_weighs_on_every_step_but_gives_no_token() -> None:
    gpu = MockGpu(LlmMock())
    for handle, prompt, output in ((1, 5, 2), (2, 3, 4)):
        gpu.join(DeviceSequence(handle, prompt, 0, handle, Ending(output, FinishReason.LENGTH)))
    gpu.begin([PrefillWork(1, 5, 0, True), PrefillWork(2, 3, 0, True)], decode=False, hold=True)
    assert gpu.advance().finished == ()
    gpu.begin((), decode=True, hold=True)
    assert gpu.advance().finished == ((1, FinishReason.LENGTH),)
    assert (gpu.num_unended, len(gpu), 1 in gpu) == (1, 2, True)
    assert gpu.kv_tokens == 6 + 4
    batch = gpu.batch()
    assert (batch.num_decodes, batch.decode_kv_tokens, batch.max_decode_kv_tokens) == (2, 10, 6)
    outcome = gpu.advance()
    assert outcome.handles.tolist() == [2]
    assert gpu.kv_tokens == 6 + 5
    assert gpu.advance().finished == ((2, FinishReason.LENGTH),)
    assert (gpu.num_unended, len(gpu)) == (0, 2)
    for handle in (1, 2):
        gpu.leave(handle)
    assert (len(gpu), gpu.kv_tokens) == (0, 0)


def test_a_held_sequence_weighs_with_its_adapter_until_it_leaves() -> None:
    gpu = MockGpu(LlmMock())
    ending_after = {1: 2, 2: 4}
    for handle, (adapter_key, rank) in {1: ("a", 8), 2: ("b", 16)}.items():
        ending = Ending(ending_after[handle], FinishReason.LENGTH)
        gpu.join(DeviceSequence(handle, 3, 0, handle, ending, adapter_key=adapter_key, adapter_rank=rank))
    gpu.begin([PrefillWork(handle, 3, 0, True) for handle in (1, 2)], decode=False, hold=True)
    gpu.advance()
    gpu.begin((), decode=True, hold=True)
    assert gpu.advance().finished == ((1, FinishReason.LENGTH),)
    assert gpu.batch().lora == LoraWork.of([(8, 1), (16, 1)])
    gpu.leave(1)
    assert gpu.batch().lora == LoraWork.of([(16, 1)])
    gpu.leave(2)
    assert gpu.batch().lora == NO_LORA
