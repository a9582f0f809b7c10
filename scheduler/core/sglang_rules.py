"""SGLang's own settings, by its names (sgl-project/sglang 0.5.23: srt/server_args.py, and srt/environ.py)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SglangRules:
    """Settings of SGLang's scheduler that no other engine has; lengths in tokens.

    Attributes:
        max_prefill_tokens: input tokens of a prefill without chunks; its first prompt may be longer.
        chunked: whether prompts are computed in chunks, of the step's token budget.
        enable_mixed_chunk: whether decodes run beside chunks.
        schedule_conservativeness: factor on `init_new_token_ratio`.
        init_new_token_ratio: what share of its remaining tokens a running sequence is first thought to use.
        min_new_token_ratio_factor: the least such share, as a share of the first.
        new_token_ratio_decay_steps: decode steps in which the ratio falls from first to least.
        retract_decode_steps: decode steps that a retraction makes room for.
        clip_max_new_tokens: most new tokens that count as needed by one sequence.
        in_batch_check_threshold: most cached tokens of a waiting sequence that may be put behind others.
        in_batch_deprioritize_threshold: leading tokens that it then shares with one before it in the queue.
        prefill_max_requests: sequences in one prefill; None: no limit.
        prefill_decode_interval: decode steps after each prefill; 0: none are required.
        lora_drain_wait_threshold: wait in device picoseconds after which an adapter may make others drain; 0: never.
        pinned_loras: keys of adapters that keep their place once they have one.
        overlap: whether a step is planned while the one before it runs (`core.overlap`).
    """

    max_prefill_tokens: int = 16384
    chunked: bool = True
    enable_mixed_chunk: bool = False
    schedule_conservativeness: float = 1.0
    init_new_token_ratio: float = 0.7
    min_new_token_ratio_factor: float = 0.14
    new_token_ratio_decay_steps: int = 600
    retract_decode_steps: int = 20
    clip_max_new_tokens: int = 4096
    in_batch_check_threshold: int = 32
    in_batch_deprioritize_threshold: int = 32
    prefill_max_requests: int | None = None
    prefill_decode_interval: int = 0
    lora_drain_wait_threshold: int = 0
    pinned_loras: frozenset[str] = frozenset()
    overlap: bool = True


DEFAULT = SglangRules()
