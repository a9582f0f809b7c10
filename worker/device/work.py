"""A mock GPU's prefill work in a step, and the result of the step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.batch import PrefillChunk
from lorrery.worker.device.output import TokenIds


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class PrefillWork(PrefillChunk):
    """A prompt chunk, and its sequence's handle."""

    handle: int

    def __init__(self, handle: int, new_tokens: int, past_tokens: int, samples: bool) -> None:
        self.handle = handle
        self.new_tokens = new_tokens
        self.past_tokens = past_tokens
        self.samples = samples


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class StepOutcome:
    """The result of one step, in batch order (the order of joining).

    Attributes:
        handles: shape (num_tokens,), sequences that got a token.
        token_ids: shape (num_tokens,), those tokens.
        finished: (handle, reason) of the sequences that ended with this step; a few without a token.
    """

    handles: NDArray[np.uint32]
    token_ids: TokenIds
    finished: tuple[tuple[int, FinishReason], ...]

    def __init__(
        self, handles: NDArray[np.uint32], token_ids: TokenIds, finished: tuple[tuple[int, FinishReason], ...]
    ) -> None:
        self.handles = handles
        self.token_ids = token_ids
        self.finished = finished
