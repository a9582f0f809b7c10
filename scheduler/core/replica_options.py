"""How a replica behaves beside its policy."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How a replica behaves beside its policy.

    Attributes:
        strict: S-LoRA's way with a cancelled running request: one more step, then out.
        no_lora: serve every request from the base model and move no adapter (S-LoRA's `--no-lora`).
        min_computed_tokens: prompt tokens that are computed even if the whole prompt is cached: 1, or 0 as in llm-mock.
        max_overtakes: so many sequences may enter past one that waits for its adapter, where the queue lets them.
        look_ahead: of so many waiting sequences, the first in queue order, adapters are loaded ahead.
    """

    strict: bool = False
    no_lora: bool = False
    min_computed_tokens: int = 1
    max_overtakes: int = 0
    look_ahead: int = 0


PLAIN = ReplicaOptions()
"""Of a replica that says nothing else."""
