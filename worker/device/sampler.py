"""How a request wants its words drawn, and what a sequence in logits mode is asked for."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sampler:
    """How a request wants its words drawn; as S-LoRA normalises it.

    Attributes:
        top_k: so many of the likeliest words; 0: all.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, **said: float) -> "Sampler":
        """Return it as the wire has it, where a temperature or a top_p of 0 is not said, and so 1."""
        return cls(
            said["presence_penalty"],
            said["frequency_penalty"],
            said["temperature"] or 1.0,
            said["top_p"] or 1.0,
            int(said["top_k"]),
        )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest word is taken."""
        return self.top_k == 1


GREEDY = Sampler(top_k=1)


class Sampled(Protocol):
    """The words of one sequence in logits mode.

    Attributes:
        length_seed: what the length model draws from.
    """

    length_seed: int

    def tokens(self, first: int, last: int) -> NDArray[np.uint32]:
        """Return the words at output positions `first` to `last - 1`."""
        ...
