"""A request's sampling parameters for words, and the words of a sequence in logits mode."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sampler:
    """A request's sampling parameters, as S-LoRA normalises them.

    Attributes:
        top_k: number of likeliest words to draw from; 0: all.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, **said: float) -> "Sampler":
        """Convert the wire's values, where 0 for temperature or top_p means not set, and so 1."""
        return cls(
            said["presence_penalty"],
            said["frequency_penalty"],
            said["temperature"] or 1.0,
            said["top_p"] or 1.0,
            int(said["top_k"]),
        )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest word is always taken."""
        return self.top_k == 1


GREEDY = Sampler(top_k=1)


class Sampled(Protocol):
    """The words of one sequence in logits mode.

    Attributes:
        length_seed: seed for the length model.
    """

    length_seed: int

    def tokens(self, first: int, last: int) -> NDArray[np.uint32]:
        """Return the words at output positions `first` to `last - 1`."""
        ...
