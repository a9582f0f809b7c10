"""What a tokenizer can do."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

BOS_ID, EOS_ID, FIRST_WORD_ID, NUM_WORDS = 1, 2, 3, 1905
"""Of the shipped tokenizer, see `build`; a mock model's output is in these terms too."""


class Detokenizer(Protocol):
    """Text of one growing sequence."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens add; what is not yet a whole character waits."""
        ...

    def flush(self) -> str:
        """Return what still waits, at the end of the sequence."""
        ...


class Tokenizer(Protocol):
    """A vocabulary.

    Attributes:
        vocab_size: token ids in prompts must be below it.
        longest_token_bytes: no token stands for more bytes of text than this, one for unknown words aside.
        eos_id: ends a sequence.
    """

    vocab_size: int
    longest_token_bytes: int
    eos_id: int

    @property
    def word_ids(self) -> Sequence[int]:
        """The tokens that a mock model's outputs consist of, each once, at most `NUM_WORDS`; all but `eos_id`."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt, the beginning-of-sequence token first where the vocabulary has one."""
        ...

    def encode_stop(self, text: str) -> list[int]:
        """Return the token ids of a text without the special tokens that frame a prompt."""
        ...

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: object
    ) -> str:
        """Return a conversation as one text, by the chat template.

        Args:
            messages: each with `role` and `content`, and what else the template reads.
            add_generation_prompt: end with what begins the assistant's turn.
            variables: further ones of the template.

        Raises:
            InvalidRequest: the template refuses them, or fails on them.
        """
        ...

    def encode_chat(self, text: str) -> list[int]:
        """Return the token ids of a text of `chat_prompt`, which has its special tokens already."""
        ...

    def name(self, token_id: int) -> str:
        """Return how the vocabulary spells a token; empty: it has none of this id."""
        ...

    def detokenizer(self) -> Detokenizer:
        """Return the text side of a new sequence."""
        ...
