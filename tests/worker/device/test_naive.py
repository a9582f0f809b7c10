"""The napkin's roofline: what bounds a step, and where it has a closed form."""

import pytest

from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.naive import NaiveRoofline
from lorrery.worker.device.roofline import Roofline
from tests.worker.device.known import CATALOGUE, deployment

LLAMA = CATALOGUE.model("Llama-2-7B")


def test_a_single_decode_reads_every_weight_once():
    naive = NaiveRoofline(deployment("A100", "Llama-2-7B"))
    weights = 2 * (LLAMA.layer_parameters + LLAMA.head_parameters)
    cost = naive.step_cost(Batch((), 1, 0, 0))
    assert cost.memory == cost.total_ps == pytest.approx((weights + 524_288) / 2039e9 * 1e12, rel=1e-6)


def test_a_long_prompt_computes():
    naive = NaiveRoofline(deployment("A100", "Llama-2-7B"))
    batch = Batch((PrefillChunk(4096, 0, samples=True),))
    cost = naive.step_cost(batch)
    flops = 2 * LLAMA.layer_parameters * 4096 + 2 * LLAMA.head_parameters + 4 * 32 * 4096 * 4096**2 / 2
    assert cost.compute == cost.total_ps == pytest.approx(flops / 312e12 * 1e12, rel=1e-3)


@pytest.mark.parametrize("batch", [Batch((), 8, 8000, 1000), Batch((PrefillChunk(700, 0, samples=True),))])
def test_it_is_a_lower_bound(batch):
    known = deployment("A100", "Llama-2-7B", 2)
    assert NaiveRoofline(known).step_ps(batch) < Roofline(known).step_ps(batch)


def test_segments_end_where_the_bound_would_change():
    naive = NaiveRoofline(deployment("A100", "Llama-3-8B"))
    assert naive.decode_segment(8, 8000, 1000).num_steps == NEVER
    # 512 short sequences compute first, and will be bound by memory later.
    segment = naive.decode_segment(512, 0, 0)
    last, beyond = segment.num_steps - 1, segment.num_steps
    assert segment.step_ps(last) == naive.step_ps(Batch((), 512, 512 * last, last))
    assert segment.step_ps(beyond) < naive.step_ps(Batch((), 512, 512 * beyond, beyond))


def test_an_empty_batch_takes_no_time():
    assert NaiveRoofline(deployment("A100", "Llama-3-8B")).step_ps(Batch()) == 0
