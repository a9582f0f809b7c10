"""Text to token ids and back: a built-in vocabulary, or any `tokenizer.json`.

The built-in vocabulary needs no download and makes a mock's output count alike everywhere: ids 3..1907 are 1,905
English words, each with its leading space one token in the usual tokenizers too, so a client that counts the text again
gets the same number. Behind them come the 256 bytes, so any text encodes and round-trips.

| id | piece |
|---|---|
| 0, 1, 2 | `<unk>`, `<s>` (begins a sequence), `</s>` (ends it) |
| 3..1907 | " " + word, in the order of words.txt |
| 1908..2163 | the bytes 0..255 |
"""

import codecs
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lorrery.chassis.errors import SettingsError

BOS_ID = 1
EOS_ID = 2
FIRST_WORD_ID = 3
NUM_WORDS = 1905
# The Unigram model takes the split with the highest sum of scores. One word beats any spelling by bytes, and the names
# of the special tokens, typed into a prompt, lose to their spelling.
_WORD_SCORE, _BYTE_SCORE, _SPECIAL_SCORE = -1.0, -20.0, -1e9
# From here on the milliseconds of an encoding outweigh the 20 us that it costs to do it without Python's lock.
_LONG_CHARACTERS = 4096


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
    """

    vocab_size: int
    longest_token_bytes: int

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt, the beginning-of-sequence token first where the vocabulary has one."""
        ...

    def encode_stop(self, text: str) -> list[int]:
        """Return the token ids of a stop string, without special tokens."""
        ...

    def detokenizer(self) -> Detokenizer:
        """Return the text side of a new sequence."""
        ...


def open_tokenizer(path: Path | None) -> Tokenizer:
    """Return the vocabulary of a `tokenizer.json`, or the built-in one.

    Raises:
        SettingsError: the file cannot be read or is no tokenizer.
    """
    return BuiltinTokenizer() if path is None else FileTokenizer(path)


MAX_VOCABULARY = 1 << 20
"""More tokens than any model has. Prompts of token ids come from the clients' own tokenizers, which the built-in
vocabulary knows nothing of, so with it any such id will do."""


class BuiltinTokenizer:
    """The vocabulary of the table above."""

    def __init__(self) -> None:
        words = resources.files("lorrery.router").joinpath("words.txt").read_text(encoding="utf-8").split()
        byte_names = _byte_names()
        vocabulary = [(name, _SPECIAL_SCORE) for name in ("<unk>", "<s>", "</s>")]
        vocabulary += [(byte_names[ord(" ")] + word, _WORD_SCORE) for word in words]
        vocabulary += [(name, _BYTE_SCORE) for name in byte_names]
        self.vocab_size = MAX_VOCABULARY
        self.num_words = len(words)
        self.longest_token_bytes = max(len(f" {word}".encode()) for word in words)
        # One piece per id. None: part of a character, for `_ByteDetokenizer` to put together.
        self._pieces: list[str | None] = ["", "", "", *(" " + word for word in words)]
        self._first_byte_id = len(self._pieces)
        self._pieces += [chr(byte) if byte < 0x80 else None for byte in range(256)]
        self._model = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0))
        self._model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        self._model.decoder = decoders.ByteLevel()

    def encode_prompt(self, text: str) -> list[int]:
        """See `Tokenizer.encode_prompt`."""
        return [BOS_ID, *_encode(self._model, text)]

    def encode_stop(self, text: str) -> list[int]:
        """See `Tokenizer.encode_stop`."""
        return _encode(self._model, text)

    def detokenizer(self) -> Detokenizer:
        """See `Tokenizer.detokenizer`."""
        return _ByteDetokenizer(self._pieces, self._first_byte_id)


class _ByteDetokenizer:
    """A list look-up per token, and a UTF-8 decoder for characters that are spelt in several byte tokens."""

    __slots__ = ("_decoder", "_first_byte_id", "_pieces")

    def __init__(self, pieces: list[str | None], first_byte_id: int) -> None:
        self._pieces = pieces
        self._first_byte_id = first_byte_id
        self._decoder: codecs.IncrementalDecoder | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        """See `Detokenizer.push`. An id outside the vocabulary reads as U+FFFD."""
        pieces = self._pieces
        text = ""
        for token_id in token_ids:
            piece = pieces[token_id] if token_id < len(pieces) else "\ufffd"
            if piece is None:
                if self._decoder is None:
                    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
                text += self._decoder.decode(bytes((token_id - self._first_byte_id,)))
            elif self._decoder is None:
                text += piece
            else:
                text += self.flush() + piece
        return text

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        if self._decoder is None:
            return ""
        text = self._decoder.decode(b"", final=True)
        self._decoder = None
        return text


class FileTokenizer:
    """The vocabulary of a `tokenizer.json`, with that library's own incremental decoding."""

    def __init__(self, path: Path) -> None:
        try:
            self._model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault of a file
            raise SettingsError(f"router.tokenizer: {path}: {error}") from None
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        # As the file spells them, which takes no fewer bytes than the text they stand for.
        self.longest_token_bytes = max((len(name.encode()) for name in vocabulary), default=1)

    def encode_prompt(self, text: str) -> list[int]:
        """See `Tokenizer.encode_prompt`."""
        return _encode(self._model, text)

    def encode_stop(self, text: str) -> list[int]:
        """See `Tokenizer.encode_stop`."""
        return _encode(self._model, text, add_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """See `Tokenizer.detokenizer`."""
        return _LibraryDetokenizer(self._model)


class _LibraryDetokenizer:
    __slots__ = ("_model", "_stream")

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        self._model = model
        self._stream = decoders.DecodeStream(skip_special_tokens=True)

    def push(self, token_ids: Iterable[int]) -> str:
        """See `Detokenizer.push`."""
        return "".join(self._stream.step(self._model, token_id) or "" for token_id in token_ids)

    def flush(self) -> str:
        """Return nothing: the library drops the bytes of a character that never became whole."""
        return ""


def _encode(model: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of `text`; while a long one is encoded, other threads go on.

    The library's `encode` keeps Python's lock to the end, its `encode_batch_fast` does not.
    """
    if len(text) < _LONG_CHARACTERS:
        return model.encode(text, add_special_tokens=add_special_tokens).ids
    (encoding,) = model.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding.ids


def _byte_names() -> list[str]:
    """Return the character that byte-level vocabularies write for each byte.

    GPT-2's table: a byte that prints in Latin-1 stands for itself, the others take the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    names = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [names.get(byte, chr(byte)) for byte in range(256)]
