"""Text of a growing sequence, token by token: the text returned so far is always a prefix of the whole text.

A character whose bytes the end of a sequence cuts is left out, as in vLLM.

Byte-level vocabularies (GPT-2, Llama 3, Qwen, the shipped one) are a table of bytes and a UTF-8 decoder: one look-up
per token. In others (WordPiece, SentencePiece) the text of a token depends on its predecessors, so the last few tokens
are decoded with and without the new one.
"""

import codecs
from collections.abc import Iterable

import tokenizers

REPLACEMENT = "\ufffd"
_MAX_WINDOW = 64
"""After this many tokens without a complete character, the text is taken as it is."""


class BytePieces:
    """The text of each token of a byte-level vocabulary.

    Args:
        names: spelling of tokens in the vocabulary, by id; an empty one has no text.

    Attributes:
        texts: by id; None: not whole characters, see `partial`.
        partial: the bytes of those.
        longest_bytes: of one token.
    """

    def __init__(self, names: dict[int, str]) -> None:
        byte_of = {name: byte for byte, name in enumerate(byte_names())}
        self.texts: list[str | None] = [""] * (1 + max(names, default=-1))
        self.partial: dict[int, bytes] = {}
        self.longest_bytes = 1
        for token_id, name in names.items():
            try:
                content = bytes([byte_of[char] for char in name])
            except KeyError:  # an added token is its own text
                content = name.encode()
            self.longest_bytes = max(self.longest_bytes, len(content))
            try:
                self.texts[token_id] = content.decode()
            except UnicodeDecodeError:
                self.texts[token_id], self.partial[token_id] = None, content


class ByteDetokenizer:
    """A list look-up per token, and a UTF-8 decoder for characters that span several tokens."""

    __slots__ = ("_decoder", "_pieces")

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._decoder: codecs.IncrementalDecoder | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        """See `Detokenizer.push`. An id beyond the vocabulary reads as U+FFFD."""
        texts = self._pieces.texts
        text = ""
        for token_id in token_ids:
            piece = texts[token_id] if token_id < len(texts) else REPLACEMENT
            if piece is None:
                if self._decoder is None:
                    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
                text += self._decoder.decode(self._pieces.partial[token_id])
            elif self._decoder is None or not piece:
                text += piece
            else:
                text += self._decoder.decode(b"", final=True) + piece
                self._decoder = None
        return text


class WindowDetokenizer:
    """Decodes the tokens of the last text again with each new one; the addition is the new text."""

    __slots__ = ("_before", "_model", "_num_read", "_special", "_window")

    def __init__(self, model: tokenizers.Tokenizer, special: frozenset[int]) -> None:
        self._model = model
        self._special = special
        self._window: list[int] = []
        # The first `_num_read` of them have been returned, and remain as context; `_before` is their text.
        self._num_read, self._before = 0, ""

    def push(self, token_ids: Iterable[int]) -> str:
        """See `Detokenizer.push`."""
        text = ""
        for token_id in token_ids:
            if token_id in self._special:
                continue
            self._window.append(token_id)
            new = self._new_text()
            if new and (not new.endswith(REPLACEMENT) or len(self._window) > _MAX_WINDOW):
                text += self._take(new)
        return text

    def _new_text(self) -> str:
        return self._model.decode(self._window, skip_special_tokens=True)[len(self._before) :]

    def _take(self, new: str) -> str:
        del self._window[: self._num_read]
        self._num_read, self._before = len(self._window), self._model.decode(self._window, skip_special_tokens=True)
        return new


def byte_names() -> list[str]:
    """Return the character that byte-level vocabularies write for each byte.

    GPT-2's table: a byte printable in Latin-1 maps to itself, the others to the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    names = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [names.get(byte, chr(byte)) for byte in range(256)]
