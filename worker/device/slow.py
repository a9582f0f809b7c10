"""A device that takes a multiple of another one's time for each step: a GPU that is throttled, or shared."""

from collections.abc import Iterable
from fractions import Fraction

from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, Segment
from lorrery.worker.device.cost import StepCost
from lorrery.worker.device.steptime import StepTimeModel


class Slowed:
    """A step-time model, stretched.

    Args:
        step_time: the model.
        factor: above 0; below 1 it is faster.
    """

    def __init__(self, step_time: StepTimeModel, factor: Fraction) -> None:
        self.name = step_time.name
        self._step_time = step_time
        self._factor = factor

    def step_ps(self, batch: Batch) -> int:
        """Return the step's duration, rounded down."""
        return self._stretch(self._step_time.step_ps(batch))

    def step_cost(self, batch: Batch) -> StepCost:
        """Return the step's duration; what it is made of is not told apart."""
        return StepCost(whole=self.step_ps(batch))

    def decode_segment(
        self, num_decodes: int, kv_tokens: int, max_kv_tokens: int, lora: LoraWork = NO_LORA
    ) -> Segment | None:
        """Return the stretched times, where they are whole picoseconds in each step; otherwise None."""
        segment = self._step_time.decode_segment(num_decodes, kv_tokens, max_kv_tokens, lora)
        below = self._factor.denominator
        if segment is None or segment.base_ps % below or segment.slope_ps % below:
            return None
        return Segment(self._stretch(segment.base_ps), self._stretch(segment.slope_ps))

    def _stretch(self, duration_ps: int) -> int:
        return _stretched(duration_ps, self._factor)


class SlowSpells:
    """The times in which a worker is slow, for whoever runs one step after another.

    Args:
        spells: begin, end (None: it stays) and factor of each, in device picoseconds; they do not overlap.
    """

    def __init__(self, spells: Iterable[tuple[int, int | None, Fraction]] = ()) -> None:
        self._spells = tuple(spells)

    def stretch(self, duration_ps: int, boundary_ps: int) -> int:
        """Return how long a step takes that is due to begin at a boundary, rounded down."""
        for from_ps, until_ps, factor in self._spells:
            if from_ps <= boundary_ps and (until_ps is None or boundary_ps < until_ps):
                return _stretched(duration_ps, factor)
        return duration_ps


NEVER_SLOW = SlowSpells()


def _stretched(duration_ps: int, factor: Fraction) -> int:
    return duration_ps * factor.numerator // factor.denominator
