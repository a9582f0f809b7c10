"""The batch on the device, against a device that keeps one plain record per sequence and runs step by step."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, PrefillWork
from lorrery.worker.device.constant import LlmMock
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.output import Ending, tokens_between
from lorrery.worker.device.roofline import Roofline
from lorrery.worker.device.rows import DeviceSequence
from lorrery.worker.device.steptime import StepTimeModel
from tests.worker.device.known import deployment

LLM_MOCK = LlmMock()


class ReadsLengths(LlmMock):
    """Wants to know how long each decode is, as kernels that run tiles in waves do."""

    reads_decode_lengths = True


ROOFLINE = Roofline(deployment("A100-80-SXM", "Llama-2-7B"))
LAUNCH_BOUND = Roofline(deployment("H100-SXM", "Llama-3-8B", engine="vllm-2023"))
STEP_TIMES: list[StepTimeModel] = [LLM_MOCK, ROOFLINE, LAUNCH_BOUND]

endings = st.builds(Ending, st.integers(1, 30), st.sampled_from(FinishReason)) | st.builds(
    Ending, st.integers(1, 30), st.just(FinishReason.LENGTH), st.just(True)
)


def sequences(handle: int) -> st.SearchStrategy[DeviceSequence]:
    echo = st.none() | st.lists(st.integers(3, 50), min_size=1, max_size=5).map(lambda ids: np.array(ids, np.uint32))
    adapter_ranks = st.sampled_from([("", 0), ("", 0), ("a", 8), ("a@7", 64), ("b", 64), ("c", 8)])
    return st.builds(
        lambda prompt, produced, seed, end, echo, adapter: DeviceSequence(
            handle, prompt, produced, seed, end, echo, *adapter
        ),
        st.integers(1, 60),
        st.integers(0, 8),
        st.integers(0, 2**64 - 1),
        endings,
        echo,
        adapter_ranks,
    )


def whole(sequence: DeviceSequence) -> PrefillWork:
    return PrefillWork(sequence.handle, sequence.prompt_tokens + sequence.produced_tokens, 0, samples=True)


@dataclass
class PlainSequence:
    sequence: DeviceSequence
    cached: int = 0
    output: int = field(init=False)
    decoding: bool = False

    def __post_init__(self) -> None:
        self.output = self.sequence.produced_tokens

    def give_token(self) -> tuple[int | None, bool]:
        """Return (token or None, whether the sequence ends with this step)."""
        end = self.sequence.ending
        if self.output >= end.output_tokens:
            return None, True
        (token,) = tokens_between(self.sequence.seed, self.output, self.output + 1, end, self.sequence.given)
        self.output += 1
        return int(token), self.output == end.output_tokens and not end.extra_step


class PlainGpu:
    def __init__(self) -> None:
        self.batch: dict[int, PlainSequence] = {}

    def work(self, prefills: list[PrefillWork], *, decode: bool) -> Batch:
        kv = [s.cached for s in self.batch.values() if s.decoding] if decode else []
        users: dict[str, tuple[int, int]] = {}
        new_tokens = {w.handle: w.new_tokens for w in prefills}
        for handle, plain in self.batch.items():
            num = new_tokens.get(handle, int(plain.decoding and decode))
            name, rank = plain.sequence.adapter_key, plain.sequence.adapter_rank
            if name and num:
                users[name] = rank, users.get(name, (rank, 0))[1] + num
        lora = LoraWork.of(users.values()) if users else NO_LORA
        return Batch(tuple(prefills), len(kv), sum(kv), max(kv, default=0), lora, tuple(kv) if prefills else ())

    def advance(self, prefills: list[PrefillWork], *, decode: bool):
        chunks = {work.handle: work for work in prefills}
        tokens, finished = [], []
        for handle, plain in list(self.batch.items()):
            if plain.decoding and decode:
                plain.cached += 1
            elif handle in chunks:
                plain.cached = chunks[handle].past_tokens + chunks[handle].new_tokens
                plain.decoding = chunks[handle].samples
                if not plain.decoding:
                    continue
            else:
                continue
            token, ends = plain.give_token()
            if token is not None:
                tokens.append((handle, token))
            if ends:
                finished.append((handle, plain.sequence.ending.reason))
                del self.batch[handle]
        return tokens, finished


class GpuAgainstPlainGpu(RuleBasedStateMachine):
    """Every sequence of joins, leaves, chunks and steps gives the same tokens, ends and work."""

    def __init__(self) -> None:
        super().__init__()
        self.gpu, self.plain, self.next_handle = MockGpu(ReadsLengths()), PlainGpu(), 0

    @rule(data=st.data())
    def join(self, data):
        sequence = data.draw(sequences(self.next_handle))
        self.next_handle += 1
        self.gpu.join(sequence)
        self.plain.batch[sequence.handle] = PlainSequence(sequence)

    @precondition(lambda self: self.plain.batch)
    @rule(data=st.data())
    def leave(self, data):
        handle = data.draw(st.sampled_from(sorted(self.plain.batch)))
        self.gpu.leave(handle)
        del self.plain.batch[handle]

    @rule(data=st.data(), decode=st.booleans(), more=st.integers(0, 3))
    def run(self, data, decode, more):
        prefills = []
        for handle, plain in self.plain.batch.items():
            if plain.decoding or not data.draw(st.booleans()):
                continue
            left = plain.sequence.prompt_tokens + plain.sequence.produced_tokens - plain.cached
            new = data.draw(st.integers(1, left) | st.just(left))
            prefills.append(PrefillWork(handle, new, plain.cached, samples=new == left))
        self.gpu.begin(prefills, decode=decode)
        for _ in range(1 + more):
            work = self.plain.work(prefills, decode=decode)
            assert self.gpu.batch() == work
            assert self.gpu.step_ps() == LLM_MOCK.step_ps(work)
            outcome = self.gpu.advance()
            tokens, finished = self.plain.advance(prefills, decode=decode)
            assert list(zip(outcome.handles.tolist(), outcome.token_ids.tolist(), strict=True)) == tokens
            assert list(outcome.finished) == finished
            prefills = []

    @rule()
    def clear(self):
        self.gpu.clear()
        self.plain.batch.clear()

    @invariant()
    def same_sequences(self):
        assert len(self.gpu) == len(self.plain.batch)
        assert all(handle in self.gpu for handle in self.plain.batch)
        assert self.gpu.kv_tokens == sum(plain.cached for plain in self.plain.batch.values())


TestGpuAgainstPlainGpu = GpuAgainstPlainGpu.TestCase
TestGpuAgainstPlainGpu.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def filled(step_time: StepTimeModel, batch: list[DeviceSequence]) -> MockGpu:
    """All prefilled; those that end with that are gone."""
    gpu = MockGpu(step_time)
    for sequence in batch:
        gpu.join(sequence)
    gpu.begin([whole(sequence) for sequence in batch], decode=True)
    gpu.advance()
    return gpu


def run(gpu: MockGpu, num_steps: int) -> tuple[int, tuple[tuple[int, FinishReason], ...]]:
    """Run so many steps without their tokens; return how long they take, and who ends with the last of them."""
    whole_ps, finished = 0, ()
    while num_steps:
        assert not finished
        steps, total_ps = gpu.run(num_steps)
        assert gpu.total_ps(steps) == total_ps
        whole_ps, num_steps, finished = whole_ps + total_ps, num_steps - steps, gpu.jump(steps)
    return whole_ps, finished


def run_out(gpu: MockGpu) -> list[object]:
    """Everything that is still to come, step by step."""
    seen: list[object] = []
    while len(gpu):
        duration_ps, outcome = gpu.step_ps(), gpu.advance()
        seen.append((duration_ps, outcome.handles.tolist(), outcome.token_ids.tolist(), outcome.finished))
    return seen


batches = st.integers(1, 6).flatmap(lambda n: st.tuples(*(sequences(handle) for handle in range(n)))).map(list)


@pytest.mark.parametrize("step_time", STEP_TIMES)
@settings(deadline=None, max_examples=20)
@given(batch=batches, chunk=st.integers(1, 40), count=st.integers(2, 9), past=st.integers(0, 30), decode=st.booleans())
def test_pieces_of_one_prompt_in_one_go_are_those_one_after_another(step_time, batch, chunk, count, past, decode):
    newcomer = DeviceSequence(99, past + chunk * count + 1, 0, 7, Ending(3, FinishReason.LENGTH))
    jumping, naive = (filled(step_time, batch) for _ in range(2))
    for gpu in (jumping, naive):
        gpu.join(newcomer)
    jumping.begin([PrefillWork(99, chunk, past, samples=False)], decode=decode)
    steps, total_ps = jumping.run(1, None, count)
    ends = []
    for n in range(steps):
        ended_before = ends[-1] if ends else 0
        duration_ps, finished = one_piece(naive, chunk, past + n * chunk, decode)
        assert bool(finished) <= (n == steps - 1)
        ends.append(ended_before + duration_ps)
    assert steps == count or finished
    assert [jumping.total_ps(n) for n in range(1, steps + 1)] == ends
    assert [jumping.steps_to_cover(end_ps, steps) for end_ps in ends] == list(range(1, steps + 1))
    assert [jumping.steps_to_cover(end_ps + 1, steps) for end_ps in ends[:-1]] == list(range(2, steps + 1))
    half = steps // 2
    if half:
        assert not jumping.jump(half)
        assert jumping.total_ps(steps - half) == total_ps - ends[half - 1]
    assert jumping.jump(steps - half) == finished
    assert jumping.kv_tokens == naive.kv_tokens
    jumping.begin([PrefillWork(99, 1, past + steps * chunk, samples=steps == count)], decode=decode)
    naive.begin([PrefillWork(99, 1, past + steps * chunk, samples=steps == count)], decode=decode)
    assert run(jumping, 1) == run(naive, 1)


def one_piece(gpu: MockGpu, chunk: int, past: int, decode: bool) -> tuple[int, tuple[tuple[int, FinishReason], ...]]:
    """Run one step with a piece of the prompt of sequence 99."""
    gpu.begin([PrefillWork(99, chunk, past, samples=False)], decode=decode)
    return run(gpu, 1)


@pytest.mark.parametrize("step_time", STEP_TIMES)
@settings(deadline=None)
@given(batch=batches, data=st.data())
def test_jump_k_is_jump_j_then_jump_k_minus_j(step_time, batch, data):
    one, two, naive = (filled(step_time, batch) for _ in range(3))
    while one.num_decoding:
        steps = one._decoding.steps_to_end
        k = data.draw(st.integers(1, steps))
        j = data.draw(st.integers(0, k))
        duration_ps, finished = run(one, k)
        split_ps, split_finished = 0, ()
        for part in filter(None, (j, k - j)):
            part_ps, split_finished = run(two, part)
            split_ps += part_ps
        naive_ps, naive_finished = 0, ()
        for _ in range(k):
            naive_ps += naive.step_ps()
            naive_finished = naive.advance().finished
        assert duration_ps == split_ps == naive_ps
        assert finished == split_finished == naive_finished
        assert bool(finished) == (k == steps)
        assert one.kv_tokens == two.kv_tokens == naive.kv_tokens
        if data.draw(st.booleans()):
            break
    assert run_out(one) == run_out(two) == run_out(naive)


@settings(deadline=None)
@given(batch=batches, data=st.data())
def test_tokens_are_equal_whichever_way_batched(batch, data):
    def tokens_of(groups: list[list[DeviceSequence]]) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {sequence.handle: [] for sequence in batch}
        gpu = MockGpu(LLM_MOCK)
        for group in groups:
            for sequence in group:
                gpu.join(sequence)
            gpu.begin([whole(sequence) for sequence in group], decode=True)
            for _ in range(3):
                step(gpu, tokens)
        while len(gpu):
            step(gpu, tokens)
        return tokens

    def step(gpu: MockGpu, tokens: dict[int, list[int]]) -> None:
        outcome = gpu.advance()
        for handle, token in zip(outcome.handles.tolist(), outcome.token_ids.tolist(), strict=True):
            tokens[handle].append(token)

    order = data.draw(st.permutations(batch))
    assert tokens_of([[sequence] for sequence in order]) == tokens_of([batch])


def test_kv_length_of_a_decode_is_prompt_and_output_less_the_newest_token():
    sequence = DeviceSequence(1, 10, 0, 5, Ending(100, FinishReason.LENGTH))
    gpu = filled(ROOFLINE, [sequence])
    assert gpu.batch() == Batch((), 1, 10, 10)  # one token of output
    gpu.advance()
    assert gpu.batch() == Batch((), 1, 11, 11)


def test_resumed_sequence_prefills_prompt_and_output():
    gpu = MockGpu(ROOFLINE)
    gpu.join(DeviceSequence(1, 10, 4, 5, Ending(100, FinishReason.LENGTH)))
    gpu.begin([PrefillWork(1, 14, 0, samples=True)], decode=False)
    assert gpu.batch() == Batch((PrefillWork(1, 14, 0, samples=True),))
    outcome = gpu.advance()
    assert outcome.token_ids.tolist() == tokens_between(5, 4, 5, Ending(100, FinishReason.LENGTH)).tolist()
    assert gpu.kv_tokens == 14


def test_sequence_that_had_all_its_tokens_ends_without_another():
    gpu = MockGpu(ROOFLINE)
    gpu.join(DeviceSequence(1, 10, 4, 5, Ending(4, FinishReason.LENGTH)))
    gpu.begin([PrefillWork(1, 14, 0, samples=True)], decode=False)
    outcome = gpu.advance()
    assert outcome.handles.tolist() == []
    assert outcome.finished == ((1, FinishReason.LENGTH),)
    assert len(gpu) == 0


def test_prompt_in_a_prefix_cache_shortens_the_prefill_only():
    gpu = MockGpu(ROOFLINE)
    gpu.join(DeviceSequence(1, 10, 0, 5, Ending(4, FinishReason.LENGTH)))
    gpu.begin([PrefillWork(1, 2, 8, samples=True)], decode=False)
    assert gpu.batch() == Batch((PrefillWork(1, 2, 8, samples=True),))
    gpu.advance()
    assert gpu.kv_tokens == 10


def test_a_prompt_that_is_cached_as_a_whole_has_its_adapter_in_the_step():
    gpu = MockGpu(ROOFLINE)
    gpu.join(DeviceSequence(1, 10, 0, 5, Ending(4, FinishReason.LENGTH), None, "a", 8))
    gpu.begin([PrefillWork(1, 0, 10, samples=True)], decode=False)
    assert gpu.batch().lora == LoraWork(num_adapters=1, rank_sum=8, max_rank=8)


def test_many_early_leavers_leave_nothing_behind():
    gpu = MockGpu(LLM_MOCK)
    for handle in range(1000):
        sequence = DeviceSequence(handle, 5, 0, 1, Ending(10**6, FinishReason.LENGTH))
        gpu.join(sequence)
        gpu.begin([whole(sequence)], decode=True)
        gpu.advance()
        gpu.leave(handle)
    assert gpu.kv_tokens == 0
    assert [*gpu._decoding._last_steps, *gpu._decoding._ending, *gpu._decoding._kv_offsets] == []


@pytest.mark.parametrize(
    ("prefills", "message"),
    [
        ([PrefillWork(7, 10, 0, samples=True)], "sequence 7 is not in the batch"),
        ([PrefillWork(1, 11, 0, samples=True)], "a chunk of 11 after 0 does not follow"),
        ([PrefillWork(1, 9, 0, samples=True)], "samples is True, but 9 of 10"),
        ([PrefillWork(1, 10, 0, samples=False)], "samples is False, but 10 of 10"),
        ([PrefillWork(1, 10, 0, samples=True)] * 2, "two chunks"),
        ([PrefillWork(2, 1, 10, samples=True)], "sequence 2 has 10 of 10 tokens"),
    ],
)
def test_impossible_prefills_are_refused(prefills, message):
    gpu = filled(LLM_MOCK, [DeviceSequence(2, 10, 0, 5, Ending(4, FinishReason.LENGTH))])
    gpu.join(DeviceSequence(1, 10, 0, 5, Ending(4, FinishReason.LENGTH)))
    with pytest.raises(ValueError, match=message):
        gpu.begin(prefills, decode=True)


def test_handles_are_joined_once_and_left_once():
    gpu = filled(LLM_MOCK, [DeviceSequence(2, 10, 0, 5, Ending(4, FinishReason.LENGTH))])
    with pytest.raises(ValueError, match="2 is in the batch already"):
        gpu.join(DeviceSequence(2, 10, 0, 5, Ending(4, FinishReason.LENGTH)))
    gpu.leave(2)
    with pytest.raises(ValueError, match="2 is not in the batch"):
        gpu.leave(2)
    with pytest.raises(ValueError, match="cannot run 0 steps"):
        gpu.jump(0)


@pytest.mark.parametrize("num_done", [0, 1, 4], ids=["in prefill", "first decode", "later"])
@pytest.mark.parametrize(("old", "new"), [(ROOFLINE, LLM_MOCK), (LLM_MOCK, ROOFLINE), (LAUNCH_BOUND, ROOFLINE)])
def test_a_step_that_has_not_begun_takes_the_time_of_the_model_in_use(
    num_done: int, old: StepTimeModel, new: StepTimeModel
) -> None:
    gpu = MockGpu(old)
    sequence = DeviceSequence(1, 40, 0, 5, Ending(20, FinishReason.LENGTH), None, "", 0)
    gpu.join(sequence)
    gpu.begin([whole(sequence)], decode=True)
    for _ in range(num_done):
        gpu.advance()
    assert gpu.step_ps() == old.step_ps(gpu.batch())  # asked, and not begun
    gpu.use(new)
    assert gpu.step_ps() == gpu.run(1)[1] == new.step_ps(gpu.batch()) != old.step_ps(gpu.batch())


@pytest.mark.parametrize(
    ("leaves", "left"),
    [
        ((), LoraWork(2, 64 + 8, 64, 4, 2 * 64 + 2 * 8)),
        ((1,), LoraWork(2, 64 + 8, 64, 3, 64 + 2 * 8)),  # another sequence has that adapter
        ((1, 2), LoraWork(1, 8, 8, 2, 2 * 8)),
        ((3, 4), LoraWork(1, 64, 64, 2, 2 * 64)),
        ((1, 2, 3, 4), NO_LORA),
    ],
)
def test_the_adapters_work_is_that_of_the_adapters_that_are_left(leaves: tuple[int, ...], left: LoraWork) -> None:
    gpu = MockGpu(ROOFLINE)
    of = [
        DeviceSequence(handle, 10, 0, 5, Ending(20, FinishReason.LENGTH), None, *adapter)
        for handle, adapter in enumerate((("a", 64), ("a", 64), ("b", 8), ("b", 8)), start=1)
    ]
    for sequence in of:
        gpu.join(sequence)
    gpu.begin([whole(sequence) for sequence in of], decode=True)
    gpu.advance()
    for handle in leaves:
        gpu.leave(handle)
    assert gpu.batch().lora == left
