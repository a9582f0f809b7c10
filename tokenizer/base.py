"""The interface of a tokenizer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

BOS_ID, EOS_ID, FIRST_WORD_ID, NUM_WORDS = 1, 2, 3, 1905
"""Ids of the shipped tokenizer, see `build`; a mock model's output uses them too."""


class TextTooLongError(Exception):
    """A conversation's text has more characters than the caller takes."""


class Detokenizer(Protocol):
    """Text of one growing sequence."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens add; an incomplete character is held back."""
        ...

    def flush(self) -> str:
        """Return the text still held back, at the end of the sequence."""
        ...


class Tokenizer(Protocol):
    """A vocabulary.

    Attributes:
        vocab_size: token ids in prompts must be below it.
        longest_token_bytes: largest number of text bytes of a token, except one for unknown words.
        eos_id: ends a sequence.
    """

    vocab_size: int
    longest_token_bytes: int
    eos_id: int

    @property
    def word_ids(self) -> Sequence[int]:
        """The tokens of a mock model's output, without duplicates, at most `NUM_WORDS`; all but `eos_id`."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the beginning-of-sequence token first if the vocabulary has one."""
        ...

    def encode_stop(self, text: str) -> list[int]:
        """Return the token ids of a text without the special tokens that frame a prompt."""
        ...

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        most_characters: int,
        /,
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """Render a conversation as one text, by the chat template.

        Args:
            messages: each with `role` and `content`, and whatever else the template reads.
            most_characters: of the text; rendering stops when it has more.
            add_generation_prompt: append the beginning of the assistant's turn.
            variables: further ones of the template.

        Raises:
            InvalidRequest: the template rejects the messages, or fails on them.
            TextTooLongError: the text has more than `most_characters`.
        """
        ...

    def encode_chat(self, text: str) -> list[int]:
        """Return the token ids of a text from `chat_prompt`, which already has its special tokens."""
        ...

    def name(self, token_id: int) -> str:
        """Return the vocabulary's spelling of a token; empty if there is no such id."""
        ...

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for a new sequence."""
        ...
