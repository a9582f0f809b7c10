"""A step time of constants, independent of GPU and model: for stand-ins of an engine that form no batches.

    step = step_ms + (prefill_ms + prefill_token_ms * n, where a step computes n prompt tokens)

So a lone request whose prompt is computed in one step has TTFT = step_ms + prefill_ms + prefill_token_ms * n, and an
inter-token latency of step_ms. Others' prompts lengthen a step that they share, and requests still wait for places and
memory. Adapters cost nothing in a step.
"""

from dataclasses import dataclass
from fractions import Fraction

from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, Segment
from lorrery.worker.device.cost import StepCost

_PS_PER_MS = PS_PER_SECOND // 1000


@dataclass(frozen=True, slots=True)
class StepConstants:
    """The formula's coefficients, in milliseconds.

    Attributes:
        step_ms: above 0.
        prefill_ms: added to a step that computes prompt tokens.
        prefill_token_ms: added for each of them.
    """

    step_ms: float = 10.0
    prefill_ms: float = 0.0
    prefill_token_ms: float = 0.0


DEFAULT = StepConstants()
"""Default of the settings."""


class ConstantSteps:
    """The formula above.

    Args:
        constants: its coefficients.
    """

    name = "constant"
    reads_decode_lengths = False

    def __init__(self, constants: StepConstants) -> None:
        self._step_ps = max(1, _ps(constants.step_ms))
        self._prefill_ps = _ps(constants.prefill_ms)
        self._token_ps = _ps(constants.prefill_token_ms)

    def step_ps(self, batch: Batch) -> int:
        """Return the step's duration."""
        new_tokens = sum(chunk.new_tokens for chunk in batch.prefills)
        return self._step_ps + (self._prefill_ps + self._token_ps * new_tokens if batch.prefills else 0)

    def step_cost(self, batch: Batch) -> StepCost:
        """Return the step's duration, which has no parts."""
        return StepCost(whole=self.step_ps(batch))

    def decode_segment(
        self,
        num_decodes: int,
        kv_tokens: int,
        max_kv_tokens: int,
        lora: LoraWork = NO_LORA,
        *,
        num_held: int = 0,
        longest_grows: bool = True,
    ) -> Segment | None:
        """Return the times of consecutive decode steps: all are equal."""
        del num_decodes, kv_tokens, max_kv_tokens, lora, num_held, longest_grows
        return Segment(self._step_ps, 0)


def _ps(milliseconds: float) -> int:
    return round(Fraction(str(milliseconds)) * _PS_PER_MS)
