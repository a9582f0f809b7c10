"""What one step asks of a GPU, and what consecutive steps of a fixed batch cost.

These records are all that a step-time model sees: counts and lengths, never requests. `scheduler.core` may build them
too (a policy that estimates, a simulator that jumps).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A run of prompt tokens of one sequence, computed in one step.

    Attributes:
        new_tokens: tokens computed in this step; 0 only where a prefix cache held the whole prompt.
        past_tokens: tokens of the same sequence already in the KV cache (cached prefix, earlier chunks).
        samples: whether the chunk ends the prompt, so that the step gives the sequence a token.
    """

    new_tokens: int
    past_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work.

    A decode of a sequence whose prompt has p tokens and that has produced j >= 1 of its own finds p + j - 1 tokens in
    the KV cache: the newest token is this step's input, and joins the cache during the step.

    Attributes:
        prefills: prompt chunks.
        num_decodes: sequences past their prompt that get one token.
        decode_kv_tokens: sum over the decodes of the tokens already in the KV cache before the step.
        max_decode_kv_tokens: the largest term of that sum; 0 without decodes.
    """

    prefills: tuple[PrefillChunk, ...] = ()
    num_decodes: int = 0
    decode_kv_tokens: int = 0
    max_decode_kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Times of consecutive decode steps of one batch: step i (from 0) takes `base_ps + i * slope_ps`."""

    base_ps: int
    slope_ps: int

    def step_ps(self, index: int) -> int:
        """Return how long step `index` takes."""
        return self.base_ps + index * self.slope_ps

    def total_ps(self, num_steps: int) -> int:
        """Return how long the first `num_steps` steps take together."""
        return num_steps * self.base_ps + self.slope_ps * (num_steps * (num_steps - 1) // 2)
