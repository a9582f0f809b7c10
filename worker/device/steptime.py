"""The seam between a batch and its duration: step-time models by their names, a worker's pace, and slow devices.

Times are integer picoseconds. A model rounds each of its cost coefficients to an integer once, when it is built, so
that sums are exact: a run planned again in the middle of a segment gives bit-equal times.
"""

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple, Protocol

from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, PrefillChunk, Segment, StepCost
from lorrery.worker.device.constant import ConstantSteps, LlmMock
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.fitted import Fitted
from lorrery.worker.device.naive import NaiveRoofline
from lorrery.worker.device.roofline import Roofline
from lorrery.worker.device.table import ProfileTable


class StepTimeModel(Protocol):
    """Computes the duration of steps.

    A model whose attribute `reads_decode_lengths` is false gets no `Batch.decode_lengths`. Two methods are optional:
    `saw_kv_tokens(kv_tokens)` is called after steps have run, with the decodes' KV tokens in the last of them.
    `piece_ends_ps(first, max_steps, duration_ps)` returns the ends of steps, from the start of the first, that compute
    one prompt chunk by chunk (`chunk_run`): at most `max_steps`, and none after one that ends `duration_ps` after the
    start.
    """

    @property
    def name(self) -> str:
        """Its name in the settings."""
        ...

    def step_ps(self, batch: Batch) -> int:
        """Return the step's duration; never negative, and (by formula) never shorter for a larger batch."""
        ...

    def step_cost(self, batch: Batch) -> StepCost:
        """Return the step's duration by part; the parts add up to `step_ps` exactly."""
        ...

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
        """Return the times of the steps of a batch of decodes without joins and leaves.

        Step i equals, exactly, `step_ps(Batch((), num_decodes, kv_tokens + i * (num_decodes - num_held), m, lora))`
        with m = `max_kv_tokens` + i, or, if the longest does not grow, m = `max_kv_tokens`.

        Args:
            num_decodes: sequences in the batch.
            kv_tokens: sum of their cached tokens before step 0.
            max_kv_tokens: the largest term of that sum.
            lora: their adapters' work in each step.
            num_held: those of them that have ended and do not grow (static batching).
            longest_grows: whether the longest is none of those.

        Returns:
            None if the times have no such form: call `step_ps` step by step.
        """
        ...


def _llm_mock(deployment: Deployment) -> StepTimeModel:
    del deployment  # the formula does not depend on the model
    return LlmMock()


def _constant(deployment: Deployment) -> StepTimeModel:
    return ConstantSteps(deployment.constants)


STEP_TIME_MODELS: Mapping[str, Callable[[Deployment], StepTimeModel]] = {
    "roofline": Roofline,
    "naive-roofline": NaiveRoofline,
    "llm-mock": _llm_mock,
    "constant": _constant,
    "table": ProfileTable,
    "fitted": Fitted,
}
"""Settings name -> builder."""


_FEW, _MANY = 1, 65
"""Decoding sequences."""
_LITTLE_KV, _MUCH_KV = 8_192, 65_536
_SHORT, _LONG = 512, 2_560
"""Prompts, in tokens."""


class Pace(NamedTuple):
    """A worker's speed in four numbers, which it announces to its scheduler for predictive placements.

        step = base + sequence x decoding sequences + kv_token x their KV tokens + prompt_token x prompt tokens

    Each coefficient, in picoseconds, is a slope of the step-time model between two batches of ordinary size, so the sum
    is right for ordinary batches and some tens of percent off elsewhere: it leaves out attention over long prompts, for
    one. A real engine would time the same batches at its start, as vLLM does to size its KV cache. The measured steps
    then correct it (`scheduler.core.placements.forecast`).
    """

    base_ps: int
    sequence_ps: int
    kv_token_ps: int
    prompt_token_ps: int


def pace_of(step_time: StepTimeModel) -> Pace:
    """Return the coefficients of a step-time model."""

    def decode(num: int, kv_tokens: int) -> int:
        return step_time.step_ps(Batch((), num, kv_tokens, kv_tokens // num))

    def prefill(tokens: int) -> int:
        return step_time.step_ps(Batch((PrefillChunk(tokens, 0, True),), 0, 0, 0))

    few = decode(_FEW, _LITTLE_KV)
    sequence_ps = max(decode(_MANY, _LITTLE_KV) - few, 0) // (_MANY - _FEW)
    kv_token_ps = max(decode(_MANY, _MUCH_KV) - decode(_MANY, _LITTLE_KV), 0) // (_MUCH_KV - _LITTLE_KV)
    prompt_token_ps = max(prefill(_LONG) - prefill(_SHORT), 0) // (_LONG - _SHORT)
    base_ps = max(few - sequence_ps * _FEW - kv_token_ps * _LITTLE_KV, 1)
    return Pace(base_ps, sequence_ps, kv_token_ps, prompt_token_ps)


class Slowed:
    """A step-time model, stretched by a factor, as of a GPU that is throttled or shared.

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

    A slow device takes a multiple of the normal time for each step; a frozen one begins no step for a while, as a GPU
    that hangs.

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
