"""Step times by constants, independent of GPU and model: of stand-ins for an engine, and llm-mock's."""

from dataclasses import dataclass
from fractions import Fraction

from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, Segment, StepCost

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
    """A step time of constants, for stand-ins of an engine that form no batches.

        step = step_ms + (prefill_ms + prefill_token_ms * n, where a step computes n prompt tokens)

    So a lone request whose prompt is computed in one step has TTFT = step_ms + prefill_ms + prefill_token_ms * n, and
    an inter-token latency of step_ms. Others' prompts lengthen a step that they share, and requests still wait for
    places and memory. Adapters cost nothing in a step.

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


# The seed's constants: 312 TFLOPS times 1500, and 120 / 2000 s.
UNIT_PS = round(PS_PER_SECOND / (312 * 1500))
"""Cost of one (sequence x token x new token); the rounding is 6.4e-8 of it."""
OVERHEAD_PS = PS_PER_SECOND * 120 // 2000


class LlmMock:
    """llm-mock's step time (github.com/dongmingli-Ben/llm-mock, the project's seed 001).

        step [s] = b * max(len) * max(len - first_new) / (FLOPS * SCALE) + OVERHEAD / OVERHEAD_SCALE

    over the b sequences of the batch, where len counts a sequence's tokens including this step's, and first_new those
    already computed: the whole batch pays for its longest member and for its largest amount of new work. A prefill
    chunk has len = past + new and first_new = past; a decode has len = cached + 1 and first_new = cached. An empty step
    costs the constant alone. The formula is far from a real GPU's (a 2,000-token prompt takes 8.6 s); it is kept
    because its charts are.
    """

    name = "llm-mock"
    reads_decode_lengths = False

    def step_ps(self, batch: Batch) -> int:
        """Return the step's duration."""
        num_sequences = batch.num_decodes + len(batch.prefills)
        longest = batch.max_decode_kv_tokens + 1 if batch.num_decodes else 0
        most_new = 1 if batch.num_decodes else 0
        for chunk in batch.prefills:
            longest = max(longest, chunk.past_tokens + chunk.new_tokens)
            most_new = max(most_new, chunk.new_tokens)
        return num_sequences * longest * most_new * UNIT_PS + OVERHEAD_PS

    def step_cost(self, batch: Batch) -> StepCost:
        """Return the step's duration by part: the formula's constant, and the rest, which it does not divide."""
        return StepCost(host=OVERHEAD_PS, whole=self.step_ps(batch) - OVERHEAD_PS)

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
        """Return the times of consecutive decode steps: the longest sequence grows by one token a step."""
        del kv_tokens, lora, num_held  # only the longest sequence counts, and adapters cost nothing
        if num_decodes == 0:
            return Segment(OVERHEAD_PS, 0)
        slope_ps = num_decodes * UNIT_PS if longest_grows else 0
        return Segment(num_decodes * (max_kv_tokens + 1) * UNIT_PS + OVERHEAD_PS, slope_ps)
