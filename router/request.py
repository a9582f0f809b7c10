"""One request in the router's own types.

A request keeps everything needed to submit it again elsewhere: prompt, sampling parameters, and a seed, which the
router draws if the client gave none. A resumption sends these and the tokens received so far, nothing else.
"""

from dataclasses import dataclass

from lorrery.router.access import ApiKey
from lorrery.router.sampling import SamplingParams
from lorrery.service.telemetry.output_groups import OutputGroup
from lorrery.tokenizer.base import EOS_ID
from lorrery.vocabulary.endings import FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request consumed, as reported by its scheduler; seconds are device seconds."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    worker_id: str = ""
    num_requeues: int = 0
    adapter_load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended; `stop_sequence`: the stop string that ended its text, if any."""

    reason: FinishReason
    usage: Usage
    stop_sequence: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it is sent to a scheduler.

    Attributes:
        prompt_token_ids_u32: little-endian unsigned 32-bit integers; empty only if it is only counted.
        stop_token_sequences: the stop strings in the tokenizer's own tokenisation, for the worker.
        seed: 64 bits; equal seeds give equal tokens.
        true_output_tokens: a trace's true output length, hidden from all scheduling decisions; 0: unknown.
        priority: 32 bits, signed; a lower one is earlier under `scheduler.policy = "priority"`.
        cache_salt: prompts with different ones share no cached prefix.
        output_token_ids_u32: the whole output with its end, if the request says what it is; empty: the model's own.
        eos_id: the token that ends a sequence.
        key: the API key whose quotas it counts against; None: no quotas.
        skips_prefix_cache: whether every position of its prompt has to be computed.
        group: the client's request that it is one of several outputs of; None: it is the only one.
        top_logprobs: number of alternatives to each token in its messages; None: no log-probabilities.
        only_counted_tokens: what it counts with against its key's quotas, without being generated; None: it is.
    """

    request_id: str
    adapter_id: str
    tenant_id: str
    prompt_token_ids_u32: bytes
    sampling: SamplingParams
    stop_token_sequences: tuple[tuple[int, ...], ...]
    seed: int
    true_output_tokens: int = 0
    priority: int = 0
    cache_salt: str = ""
    output_token_ids_u32: bytes = b""
    eos_id: int = EOS_ID
    key: ApiKey | None = None
    top_logprobs: int | None = None
    skips_prefix_cache: bool = False
    group: OutputGroup | None = None
    only_counted_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids_u32) // 4
