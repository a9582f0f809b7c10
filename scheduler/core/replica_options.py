"""Options of a replica that do not belong to its policy."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options of a replica that do not belong to its policy.

    Attributes:
        strict: S-LoRA's handling of a cancelled running request: one more step, then out.
        takes_all: let a request that could never fit wait for ever, as vLLM does, instead of refusing it.
        no_lora: serve every request from the base model and move no adapter (S-LoRA's `--no-lora`).
        min_computed_tokens: prompt tokens that are computed even if the whole prompt is cached: 1, or 0 as in llm-mock.
        max_overtakes: how many sequences may overtake one that waits for its adapter, if the queue allows it; None: any
            number.
        look_ahead: number of waiting sequences, first in queue order, whose adapters are loaded ahead.
        async_scheduling: whether a step is decided while the one before it runs (vLLM, with `memory.on_demand`): events
            during that step have effect one step later. A sequence that it ends keeps what it holds meanwhile, and
            takes part once more unless its length is what ended it.
        overlap: whether a step's result is known one decision late, see `core.overlap`.
    """

    strict: bool = False
    takes_all: bool = False
    no_lora: bool = False
    min_computed_tokens: int = 1
    max_overtakes: int | None = 0
    look_ahead: int = 0
    async_scheduling: bool = False
    overlap: bool = False


PLAIN = ReplicaOptions()
"""The defaults."""
