"""The seam between a batch and its duration, and the names of the models in the settings.

Times are integer picoseconds. A model rounds each of its cost coefficients to an integer once, when it is built, so
that sums are exact: a run planned again in the middle of a segment gives bit-equal times.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, Segment, StepCost
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
