"""Sampling parameters: nine with defaults, normalisation, limits and messages as in S-LoRA, and a few of vLLM's.

Rules and texts follow S-LoRA's sampling parameters (S-LoRA/S-LoRA at c1ddf48, Apache-2.0), so its users get the values
and errors they know. Values are normalised *before* they are checked: without `do_sample` an invalid temperature, top_p
or top_k is accepted, because greedy decoding does not use it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lorrery.service.errors import InvalidRequest

# Below this, sampling is greedy (S-LoRA's _SAMPLING_EPS).
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request; `top_k` -1 means all tokens.

    Attributes:
        min_new_tokens: EOS, stop strings and stop tokens apply only after this many tokens.
        stop_token_ids: tokens that end the output and are part of it.
        include_stop_sequence: whether the text includes the stop string that ends it.
        signed_penalties: whether penalties are in OpenAI's range, -2 to 2.
    """

    do_sample: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    max_new_tokens: int = 16
    stop_sequences: tuple[str, ...] = ()
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop_sequence: bool = False
    signed_penalties: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest, of normalised parameters."""
        return self.top_k == 1

    def effective(self) -> dict[str, bool | float | int]:
        """Return the S-LoRA parameters that normalisation may change, by name, with their effective values."""
        return {name: getattr(self, name) for name in _NORMALISED}


_NORMALISED = (
    *("do_sample", "presence_penalty", "frequency_penalty", "temperature", "top_p", "top_k"),
    *("ignore_eos", "max_new_tokens"),
)
_SIGNED_PENALTY = 2.0


def read_sampling(given: Mapping[str, Any]) -> SamplingParams:
    """Build normalised and checked parameters from the client's values.

    Args:
        given: by name; missing names take defaults. `stop_sequences` is a string or a list of strings; duplicates are
            dropped.

    Raises:
        InvalidRequest: an unknown name, a value out of range (the first one in S-LoRA's order of checks), or an empty
        stop string, which S-LoRA drops silently.
    """
    values = dict(given)
    stop_sequences = values.pop("stop_sequences", None) or ()
    if isinstance(stop_sequences, str):
        stop_sequences = (stop_sequences,)
    for name in values:
        if name not in SamplingParams.__slots__:
            raise InvalidRequest(f"unknown sampling parameter {name}", field=name)
    stop_sequences = tuple(stop_sequences)
    params = normalise(SamplingParams(**values, stop_sequences=tuple(dict.fromkeys(stop_sequences))))
    check(params)
    if "" in stop_sequences:
        field = f"stop_sequences[{stop_sequences.index('')}]"
        raise InvalidRequest(
            f"{field} is empty; a stop string has at least 1 character; leave it out", field=field, value="", limit=1
        )
    return params


def normalise(params: SamplingParams) -> SamplingParams:
    """Return the parameters in canonical form, in which greedy decoding has one representation."""
    if not params.do_sample:
        params = replace(params, temperature=1.0, top_p=1.0, top_k=1)
    if 0.0 <= params.temperature < _GREEDY_BELOW:
        params = replace(params, temperature=1.0, top_k=1)
    return params


def check(params: SamplingParams) -> None:
    """Check ranges, in S-LoRA's order. NaN is out of every range.

    Raises:
        InvalidRequest: a value out of range.
    """
    for name in ("presence_penalty", "frequency_penalty"):
        if params.signed_penalties:
            if not -_SIGNED_PENALTY <= getattr(params, name) <= _SIGNED_PENALTY:
                raise _out_of_range(params, name, "must be in [-2, 2], got {}")
        elif not getattr(params, name) >= 0.0:
            raise _out_of_range(params, name, "must >= 0.0, got {}")
    if not params.temperature > 0.0:
        raise _out_of_range(params, "temperature", "must > 0.0, got {}")
    if not 0.0 < params.top_p <= 1.0:
        raise _out_of_range(params, "top_p", "must in (0.0, 1.0], got {}")
    if params.top_k < -1 or params.top_k == 0:
        raise _out_of_range(params, "top_k", "must be -1 (disable), or at least 1, got {}.")
    if params.max_new_tokens < 1:
        raise _out_of_range(params, "max_new_tokens", "must be at least 1 , got {}.")
    if params.min_new_tokens < 0:
        raise _out_of_range(params, "min_new_tokens", "must be at least 0, got {}")


def check_least(params: SamplingParams) -> None:
    """Check that `min_new_tokens` can be reached.

    Raises:
        InvalidRequest: it exceeds `max_new_tokens`.
    """
    if params.min_new_tokens > params.max_new_tokens:
        raise InvalidRequest(
            f"min_new_tokens is {params.min_new_tokens}; max_new_tokens is {params.max_new_tokens}; ask for fewer",
            field="min_new_tokens",
            value=params.min_new_tokens,
            limit=params.max_new_tokens,
        )


def _out_of_range(params: SamplingParams, name: str, rule: str) -> InvalidRequest:
    value = getattr(params, name)
    return InvalidRequest(f"{name} {rule.format(value)}", field=name, value=value)
