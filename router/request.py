"""What the router knows about one request, in its own types.

A request keeps everything that is needed to ask for it again elsewhere: prompt, settings, and a seed that the router
draws where the client gave none. Together with the tokens received so far that is all that a resumption carries.
"""

from dataclasses import dataclass

from lorrery.router.keys import ApiKey
from lorrery.router.sampling import SamplingParams
from lorrery.tokenizer.base import EOS_ID
from lorrery.vocabulary.finish_reason import FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request consumed, as its scheduler says; seconds are device seconds."""

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
    """How a sequence ended; `stop_sequence`: the one that its text has come to."""

    reason: FinishReason
    usage: Usage
    stop_sequence: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a scheduler gets it.

    Attributes:
        prompt_token_ids_u32: little-endian unsigned 32-bit integers; never empty.
        stop_token_sequences: the stop strings in the tokenizer's own spelling, for the worker.
        seed: 64 bits; equal seeds give equal tokens.
        true_output_tokens: a trace's true output length, which no scheduling decision sees; 0: unknown.
        eos_id: the token that ends a sequence.
        key: whose quotas it counts against; None: nobody's.
        top_logprobs: how many alternatives to each token its messages have; None: no log-probabilities at all.
    """

    request_id: str
    adapter_id: str
    tenant_id: str
    prompt_token_ids_u32: bytes
    sampling: SamplingParams
    stop_token_sequences: tuple[tuple[int, ...], ...]
    seed: int
    true_output_tokens: int = 0
    eos_id: int = EOS_ID
    key: ApiKey | None = None
    top_logprobs: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids_u32) // 4
