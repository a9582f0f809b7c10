"""Slow and frozen devices.

A slow device takes a multiple of the normal time for each step, as a GPU that is throttled or shared; a frozen one
begins no step for a while, as a GPU that hangs.
"""

from collections.abc import Callable, Iterable
from fractions import Fraction

from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, Segment, StepCost
from lorrery.worker.device.steptime import StepTimeModel


class Slowed:
    """A step-time model, stretched by a factor.

    Args:
        step_time: the model.
        factor: above 0; below 1 it is faster.
    """

    def __init__(self, step_time: StepTimeModel, factor: Fraction) -> None:
        self.name = step_time.name
        self.reads_decode_lengths = bool(getattr(step_time, "reads_decode_lengths", True))
        self.saw_kv_tokens: Callable[[int], None] | None = getattr(step_time, "saw_kv_tokens", None)
        self._step_time = step_time
        self._factor = factor

    def step_ps(self, batch: Batch) -> int:
        """Return the step's duration, rounded down."""
        return self._stretch(self._step_time.step_ps(batch))

    def step_cost(self, batch: Batch) -> StepCost:
        """Return the step's duration, without a division into parts."""
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
        """Return the stretched times, if they are whole picoseconds in each step; otherwise None."""
        segment = self._step_time.decode_segment(
            num_decodes, kv_tokens, max_kv_tokens, lora, num_held=num_held, longest_grows=longest_grows
        )
        below = self._factor.denominator
        if segment is None or segment.base_ps % below or segment.slope_ps % below:
            return None
        return Segment(self._stretch(segment.base_ps), self._stretch(segment.slope_ps), segment.num_steps)

    def _stretch(self, duration_ps: int) -> int:
        return _stretched(duration_ps, self._factor)


class Spells:
    """The times in which a worker is slow or frozen, for callers that run single steps.

    Args:
        slow: begin, end and factor of each, in device picoseconds; they do not overlap.
        frozen: begin and end of each; no step begins in between.
    """

    def __init__(self, slow: Iterable[tuple[int, int, Fraction]] = (), frozen: Iterable[tuple[int, int]] = ()) -> None:
        self._slow = tuple(slow)
        self._frozen = sorted(frozen)

    @property
    def slows(self) -> bool:
        """Whether there is a step that takes longer, or less long, than it would."""
        return bool(self._slow)

    def stretch(self, duration_ps: int, boundary_ps: int) -> int:
        """Return the duration of a step due to begin at a boundary, rounded down."""
        for from_ps, until_ps, factor in self._slow:
            if from_ps <= boundary_ps < until_ps:
                return _stretched(duration_ps, factor)
        return duration_ps

    def thaw_ps(self, boundary_ps: int) -> int:
        """Return when a step due at a boundary may begin; `ENDLESS` is an end like any other."""
        for from_ps, until_ps in self._frozen:
            if from_ps <= boundary_ps < until_ps:
                boundary_ps = until_ps
        return boundary_ps


NO_SPELLS = Spells()


def _stretched(duration_ps: int, factor: Fraction) -> int:
    return duration_ps * factor.numerator // factor.denominator
