"""The seam between a batch and the time it takes, and the names under which settings know its models.

Times are integer picoseconds. A model rounds each of its cost coefficients to an integer once, when it is built, so
that sums are exact: a run planned again in the middle of a segment gives bit-equal times.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from worker.device.batch import Batch, Segment
from worker.device.catalogue import Gpu, Model
from worker.device.llm_mock import LlmMock
from worker.device.roofline import Roofline


class StepTimeModel(Protocol):
    """Says how long a step takes."""

    @property
    def name(self) -> str:
        """The name that the settings use."""
        ...

    def step_ps(self, batch: Batch) -> int:
        """Return the step's duration; never negative, never shorter for a larger batch."""
        ...

    def decode_segment(self, num_decodes: int, kv_tokens: int, max_kv_tokens: int) -> Segment | None:
        """Return the times of the steps of a batch of decodes that nothing joins and nothing leaves.

        Step i equals `step_ps(Batch((), num_decodes, kv_tokens + i * num_decodes, max_kv_tokens + i))` exactly.

        Args:
            num_decodes: sequences in the batch.
            kv_tokens: sum of their cached tokens before step 0.
            max_kv_tokens: the largest term of that sum.

        Returns:
            None where the times have no such form: ask `step_ps` step by step.
        """
        ...


def _llm_mock(gpu: Gpu, model: Model, tensor_parallel: int) -> StepTimeModel:
    del gpu, model, tensor_parallel  # seed 001 times every model alike
    return LlmMock()


STEP_TIME_MODELS: Mapping[str, Callable[[Gpu, Model, int], StepTimeModel]] = {
    "roofline": Roofline,
    "llm-mock": _llm_mock,
}
"""Settings name -> builder from (GPU, model, tensor-parallel degree)."""
