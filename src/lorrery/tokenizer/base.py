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
        """Return the text that these tokens add.

        Special tokens have none. An incomplete character is held back until it is complete, or certain never to be; one
        that the end of the sequence cuts is no text, as in vLLM.
        """
        ...


class Tokenizer(Protocol):
    """A vocabulary.

    Attributes:
        vocab_size: token ids in prompts must be below it.
        longest_token_bytes: largest number of text bytes of a token, except one for unknown words.
        eos_id: ends a sequence.
        special_ids: tokens that are no text of an output.
    """

    vocab_size: int
    longest_token_bytes: int
    eos_id: int
    special_ids: frozenset[int]

    @property
    def word_ids(self) -> Sequence[int]:
        """The tokens of a mock model's output, without duplicates, at most `NUM_WORDS`; all but `eos_id`."""
        ...

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt; the name of a special token in it is that token.

        Args:
            text: of the prompt.
            add_special_tokens: whether tokens that frame a prompt are added, such as the one that begins a sequence.
        """
        ...

    def encode_stop(self, text: str) -> list[int]:
        """Return the token ids of a text of an output, which has no special tokens; their names are plain text."""
        ...

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        most_characters: int,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str:
        """Render a conversation as one text, by the chat template; it has its special tokens.

        Args:
            messages: each with `role` and `content`, a text or a list of texts, and whatever else the template reads.
            most_characters: of the text; rendering stops when it has more.
            add_generation_prompt: append the beginning of the assistant's turn.
            continue_final_message: end with the content of the last message, without what the template puts after it.
            variables: further ones of the template.

        Raises:
            InvalidRequest: the template rejects the messages, or fails on them.
            TextTooLongError: the text has more than `most_characters`.
        """
        ...

    def name(self, token_id: int) -> str:
        """Return the vocabulary's spelling of a token; empty if there is no such id."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones by their names; ids outside the vocabulary have none."""
        ...

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for a new sequence."""
        ...
