"""How `pets` cuts what waits into batches, and by which profile."""

import itertools
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.build import TABLES_PACKAGE, Devices
from lorrery.scheduler.core.queues.pets import MIN_WAITING, DeviceProfile, MeasuredProfile, Pets, _cut
from lorrery.service.files.reading import read_tables
from tests.scheduler.core.queues.one_queue import LengthProfile, replica_of, request, try_once


@given(costs=st.lists(st.integers(1, 9), min_size=1, max_size=7), fixed=st.integers(0, 12))
def test_the_cut_is_as_cheap_as_the_best_of_all_cuts(costs: list[int], fixed: int) -> None:
    costs.sort()

    def cost(piece: list[int]) -> int:
        return fixed + len(piece) * piece[-1]

    cut = _cut(costs, lambda end: [cost(costs[first:end]) for first in range(end)])
    assert list(itertools.chain(*cut)) == costs
    best = inf
    for ends in itertools.product((False, True), repeat=len(costs) - 1):
        bounds = [0, *(index + 1 for index, end in enumerate(ends) if end), len(costs)]
        best = min(best, sum(cost(costs[low:high]) for low, high in itertools.pairwise(bounds)))
    assert sum(cost(piece) for piece in cut) == best


def test_pets_takes_the_short_prompts_together_once_enough_wait() -> None:
    for num_waiting, entered in ((MIN_WAITING, [0, 1]), (MIN_WAITING + 2, [1, 3])):
        replica = replica_of(Pets(LengthProfile()), pool=1000, places=2)
        for handle in range(num_waiting):
            replica.submit(request(handle, prompt=3 if handle % 2 else 300), 0)
        assert try_once(replica) == entered


class CountingProfile(LengthProfile):
    num_calls = 0

    def prefill(self, num_sequences: int, tokens: int) -> int:
        self.num_calls += 1
        return super().prefill(num_sequences, tokens)


def test_the_programs_run_again_once_their_input_is_another() -> None:
    profile = CountingProfile()
    queue = Pets(profile)
    waiting = [request(handle, prompt=100 + handle) for handle in range(MIN_WAITING + 2)]
    for sequence in waiting:
        queue.append(sequence, 0)

    def calls_of_a_pass() -> int:
        before = profile.num_calls
        replica = replica_of(queue, pool=50)  # nobody fits
        assert try_once(replica) == []
        return profile.num_calls - before

    assert calls_of_a_pass() > 0
    assert calls_of_a_pass() == 0
    queue.append(request(99, prompt=90), 0)
    assert calls_of_a_pass() > 0
    assert queue.cancel(99) is not None
    assert calls_of_a_pass() > 0
    # One that was preempted waits again: it is the same sequence, and its input is longer by what it had produced.
    waiting[0].requeue(2, 0)
    assert calls_of_a_pass() > 0
    assert calls_of_a_pass() == 0


def test_a_measured_profile_looks_up_as_slora_does() -> None:
    known = {(2, 32): 1.0, (4, 32): 3.0, (2, 64): 2.0}
    profile = MeasuredProfile(lambda num, tokens, rank: known.get((num, tokens), 0) + rank if num < 5 else None)
    assert profile.prefill(1, 10) == profile.prefill(2, 32) == 1.0
    assert profile.prefill(3, 20) == 2.0
    assert profile.prefill(2, 33) == 2.0
    assert profile.prefill(0, 33) == 0
    assert profile.prefill(6, 32) == profile.prefill(5, 32) == profile.prefill(2, 1025) == inf
    assert profile.adapter(8, 2, 32) == 8.0
    assert profile.adapter(0, 2, 32) == profile.adapter(8, 0, 32) == 0
    assert profile.adapter(8, 6, 32) == inf


def test_the_devices_profile_grows_with_rank_number_and_length() -> None:
    profile = Devices(read_tables(TABLES_PACKAGE)).profile("A100-80-SXM", "Llama-2-7B", 1, "roofline")
    assert isinstance(profile, DeviceProfile)
    assert 0 < profile.prefill(1, 100) < profile.prefill(4, 100) < profile.prefill(4, 900)
    assert 0 == profile.adapter(0, 4, 100) < profile.adapter(8, 4, 100) < profile.adapter(64, 4, 100)
    # a few per cent of the prefill, as measured (Punica; S-LoRA's no_lora_compute runs)
    assert 0.005 < profile.adapter(16, 1, 1024) / profile.prefill(1, 1024) < 0.1
