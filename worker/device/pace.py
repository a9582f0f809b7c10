"""A worker's speed in four numbers, which it announces to its scheduler for predictive placements.

    step = base + sequence x decoding sequences + kv_token x their tokens in the KV cache + prompt_token x prompt tokens

Each coefficient is a slope of the step-time model between two batches of ordinary size, so the sum is right for
ordinary batches and some tens of percent off elsewhere: it leaves out attention over long prompts, for one. A real
engine would time the same batches at its start, as vLLM does to size its KV cache. The measured steps then correct it
(`scheduler.core.placements.forecast`).
"""

from typing import NamedTuple

from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.steptime import StepTimeModel

_FEW, _MANY = 1, 65
"""Decoding sequences."""
_LITTLE_KV, _MUCH_KV = 8_192, 65_536
_SHORT, _LONG = 512, 2_560
"""Prompts, in tokens."""


class Pace(NamedTuple):
    """The coefficients of the module's sum, in picoseconds."""

    base_ps: int
    sequence_ps: int
    kv_token_ps: int
    prompt_token_ps: int


def pace_of(step_time: StepTimeModel) -> Pace:
    """Return the coefficients of a step-time model."""

    def decode(num: int, kv_tokens: int) -> int:
        return step_time.step_ps(Batch((), num, kv_tokens, kv_tokens // num))

    def prefill(tokens: int) -> int:
        return step_time.step_ps(Batch((PrefillChunk(tokens, 0, True),), 0, 0, 0))

    few = decode(_FEW, _LITTLE_KV)
    sequence_ps = max(decode(_MANY, _LITTLE_KV) - few, 0) // (_MANY - _FEW)
    kv_token_ps = max(decode(_MANY, _MUCH_KV) - decode(_MANY, _LITTLE_KV), 0) // (_MUCH_KV - _LITTLE_KV)
    prompt_token_ps = max(prefill(_LONG) - prefill(_SHORT), 0) // (_LONG - _SHORT)
    base_ps = max(few - sequence_ps * _FEW - kv_token_ps * _LITTLE_KV, 1)
    return Pace(base_ps, sequence_ps, kv_token_ps, prompt_token_ps)
