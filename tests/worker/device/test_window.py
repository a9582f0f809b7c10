"""Layers with a sliding window: a sequence's further tokens cost nothing there, in time or in memory."""

from dataclasses import replace
from itertools import pairwise

import pytest

from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.catalogue.entries import build_model
from lorrery.worker.device.catalogue.hardware import CatalogueError
from lorrery.worker.device.deployment import kv_bytes_per_token
from lorrery.worker.device.roofline import Roofline
from tests.worker.device.known import CATALOGUE, decodes, deployment

FULL = CATALOGUE.model("Llama-3-8B")
HALF = replace(FULL, window_layers=16, window=128)


def step(model, **changes) -> Roofline:
    return Roofline(replace(deployment("H100-SXM", "Llama-3-8B", 1, "present-day"), model=model, **changes))


def test_a_window_that_holds_every_token_changes_nothing():
    wide = replace(FULL, window_layers=16, window=1_000_000)
    for chunk in (PrefillChunk(700, 0, samples=True), PrefillChunk(64, 9000, samples=True)):
        assert step(wide).step_ps(Batch((chunk,))) == step(FULL).step_ps(Batch((chunk,)))


def test_longer_contexts_cost_half_as_much_where_half_of_the_layers_have_a_window():
    def growth(model) -> int:
        return step(model).step_ps(decodes(8, 9000)) - step(model).step_ps(decodes(8, 1000))

    assert growth(HALF) == pytest.approx(growth(FULL) / 2, rel=1e-4)
    # A decode reads the window's tokens in the others.
    windows = step(HALF).step_ps(decodes(8, 1000)) - step(replace(HALF, window=1)).step_ps(decodes(8, 1000))
    assert windows == pytest.approx(growth(HALF) / 8000 * 127, rel=0.02)  # and nothing for the longest


def test_attention_to_a_window_never_takes_longer_and_grows_with_the_prompt():
    full, half = step(FULL), step(HALF)
    times = [half.step_ps(Batch((PrefillChunk(tokens, 0, samples=True),))) for tokens in range(64, 9000, 64)]
    assert all(later >= earlier for earlier, later in pairwise(times))
    for tokens in (16, 128, 1000, 8000):
        prompt = Batch((PrefillChunk(tokens, 0, samples=True),))
        assert half.step_ps(prompt) <= full.step_ps(prompt)


def test_pieces_of_a_prompt_in_one_go_are_those_one_by_one():
    model, kv_tokens = step(HALF), 5 * 700
    first = Batch((PrefillChunk(512, 0, samples=False),), 5, kv_tokens, 700)
    ends = model.piece_ends_ps(first, 8, None)
    total = 0
    for number, end_ps in enumerate(ends):
        piece = PrefillChunk(512, 512 * number, samples=False)
        total += model.step_ps(Batch((piece,), 5, kv_tokens + 5 * number, 700 + number))
        assert end_ps == total


def test_layers_with_a_window_hold_no_kv_cache_to_speak_of():
    assert kv_bytes_per_token(HALF) * 2 == kv_bytes_per_token(FULL)


def test_work_counts_the_window_alone():
    def flops(model, tokens: int) -> float:
        return step(model).step_cost(decodes(4, tokens)).flops

    more = flops(HALF, 5000) - flops(HALF, 1000)
    assert more == pytest.approx((flops(FULL, 5000) - flops(FULL, 1000)) / 2)


@pytest.mark.parametrize("given", [{"window_layers": 2}, {"window": 5}, {"window_layers": 3, "window": 5}])
def test_windows_are_given_whole(given):
    entry = {
        "name": "X", "num_layers": 2, "hidden": 64, "num_heads": 1, "num_kv_heads": 1, "head_size": 64, "ffn": 64,
        "vocabulary": 9,
    }  # fmt: skip
    with pytest.raises(CatalogueError, match="window_layers is"):
        build_model({**entry, **given}, "here")
