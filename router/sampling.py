"""The nine sampling parameters: defaults, normalisation, limits and messages as in S-LoRA.

Rules and texts follow S-LoRA's sampling parameters (S-LoRA/S-LoRA at c1ddf48, Apache-2.0), so that its users meet the
values and errors they know. Values are normalised *before* they are checked: without `do_sample` a bad temperature,
top_p or top_k is forgiven, because greedy decoding never looks at it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lorrery.chassis.errors import InvalidRequest

# Below this, sampling is greedy (S-LoRA's _SAMPLING_EPS).
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks of the sampler; `top_k` -1 means all tokens."""

    do_sample: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    max_new_tokens: int = 16
    stop_sequences: tuple[str, ...] = ()

    def effective(self) -> dict[str, bool | float | int]:
        """Return the values that count, by name; stop sequences are left out, as they never change."""
        values = asdict(self)
        del values["stop_sequences"]
        return values


def read_sampling(given: Mapping[str, Any]) -> SamplingParams:
    """Build normalised, checked parameters from those that a client gave.

    Args:
        given: by name; a name left out takes its default. `stop_sequences` is one string or a list of them; empty
            strings are dropped.

    Raises:
        InvalidRequest: an unknown name, or a value out of range; the first one in S-LoRA's order of checks.
    """
    values = dict(given)
    stop_sequences = values.pop("stop_sequences", None) or ()
    if isinstance(stop_sequences, str):
        stop_sequences = (stop_sequences,)
    for name in values:
        if name not in SamplingParams.__slots__:
            raise InvalidRequest(f"unknown sampling parameter {name}")
    params = normalise(SamplingParams(**values, stop_sequences=tuple(stop for stop in stop_sequences if stop)))
    check(params)
    return params


def normalise(params: SamplingParams) -> SamplingParams:
    """Return the parameters in the form in which greedy decoding is always spelt alike."""
    if not params.do_sample:
        params = replace(params, temperature=1.0, top_p=1.0, top_k=1)
    if 0.0 <= params.temperature < _GREEDY_BELOW:
        params = replace(params, temperature=1.0, top_k=1)
    return params


def check(params: SamplingParams) -> None:
    """Check ranges, in S-LoRA's order. A NaN is in no range.

    Raises:
        InvalidRequest: a value out of range.
    """
    if not params.presence_penalty >= 0.0:
        raise InvalidRequest(f"presence_penalty must >= 0.0, got {params.presence_penalty}")
    if not params.frequency_penalty >= 0.0:
        raise InvalidRequest(f"frequency_penalty must >= 0.0, got {params.frequency_penalty}")
    if not params.temperature > 0.0:
        raise InvalidRequest(f"temperature must > 0.0, got {params.temperature}")
    if not 0.0 < params.top_p <= 1.0:
        raise InvalidRequest(f"top_p must in (0.0, 1.0], got {params.top_p}")
    if params.top_k < -1 or params.top_k == 0:
        raise InvalidRequest(f"top_k must be -1 (disable), or at least 1, got {params.top_k}.")
    if params.max_new_tokens < 1:
        raise InvalidRequest(f"max_new_tokens must be at least 1 , got {params.max_new_tokens}.")
