"""A tokenizer from a tokenizer.json: the shipped one, or any other by path."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from lorrery.service.errors import SettingsError
from lorrery.tokenizer.base import FIRST_WORD_ID, NUM_WORDS, Detokenizer, Tokenizer
from lorrery.tokenizer.chat import PLAIN_TEMPLATE, ChatTemplate
from lorrery.tokenizer.detokenize import REPLACEMENT, ByteDetokenizer, BytePieces, WindowDetokenizer

TOKENIZER_FILE = "tokenizer.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_USUAL_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>", "<end_of_turn>", "[SEP]")
"""Names of end-of-sequence tokens in well-known vocabularies, for a folder that does not name its own."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Reads the configuration beside a tokenizer.json in a Hugging Face folder.

    Attributes:
        file: the tokenizer.json.
        special_tokens: by their names in tokenizer_config.json and chat templates.
        chat_template: in Jinja's language.
        eos_ids: from the model's configuration; empty: not given.
    """

    file: Path
    special_tokens: Mapping[str, str]
    chat_template: str
    eos_ids: tuple[int, ...]


def read_folder(path: Path) -> Folder:
    """Read the files beside a tokenizer.json; `path` is that file or its folder.

    Raises:
        SettingsError: a file cannot be read.
    """
    try:
        file = path / TOKENIZER_FILE if path.is_dir() else path
    except OSError as error:  # a name that no file can have
        raise SettingsError(f"router.tokenizer: {path}: {error.strerror}") from None
    beside = file.parent
    config = {**_read(beside / "special_tokens_map.json"), **_read(beside / "tokenizer_config.json")}
    special = {name: text for name in _SPECIAL_TOKENS if (text := _content(config.get(name)))}
    return Folder(file, special, _chat_template(beside, config.get("chat_template")), _eos_ids(beside))


def find_eos(folder: Folder, ids: Mapping[str, int]) -> int | None:
    """Return the end-of-sequence token; `ids` is the vocabulary. None: no known one."""
    names = [name for name in (folder.special_tokens.get("eos_token"),) if name]
    found = [ids[name] for name in names if name in ids]
    found += [token_id for token_id in folder.eos_ids if token_id in ids.values()] if not found else []
    found += [ids[name] for name in _USUAL_EOS if name in ids] if not found else []
    return found[0] if found else None


def _chat_template(beside: Path, configured: object) -> str:
    path = beside / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"router.tokenizer: {path}: {error}") from None
    if isinstance(configured, list):  # several, by name
        by_name = {named.get("name"): named.get("template") for named in configured if isinstance(named, dict)}
        configured = by_name.get("default")
    return configured if isinstance(configured, str) else PLAIN_TEMPLATE


def _eos_ids(beside: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        given = _read(beside / name).get("eos_token_id")
        ids = given if isinstance(given, list) else [given]
        if known := tuple(token_id for token_id in ids if isinstance(token_id, int)):
            return known
    return ()


def _content(token: object) -> str | None:
    """Return the text of a special token, given as a string or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"router.tokenizer: {path}: {error}") from None
    if not isinstance(content, dict):
        raise SettingsError(f"router.tokenizer: {path}: it holds no JSON object")
    return content


SHIPPED = Path(__file__).parent / "shipped"
"""The folder of the shipped tokenizer."""
WORDS = Path(__file__).parent / "words.txt"
"""The words of a mock model's output."""
MAX_VOCABULARY = 1 << 20
"""More tokens than any model has.

Prompts of token ids come from the clients' own tokenizers, which the shipped vocabulary does not know, so with it any
such id is accepted where the model's vocabulary is unknown.
"""
# From here on, the milliseconds of an encoding outweigh the 20 us that releasing Python's lock costs.
_LONG_CHARACTERS = 4096


def open_tokenizer(path: Path | None, vocab_size: int | None = None) -> Tokenizer:
    """Open the tokenizer of a tokenizer.json, or of the folder that holds one; None: the shipped one.

    Args:
        path: of the file or folder.
        vocab_size: of the model that the shipped tokenizer stands in for; None: unknown.

    Raises:
        SettingsError: the file cannot be read or is not a tokenizer.
    """
    if path is None:
        return BuiltinTokenizer(vocab_size or MAX_VOCABULARY)  # pyright: ignore[reportReturnType]  see below
    return FileTokenizer(path)  # pyright: ignore[reportReturnType]  word_ids is a cached_property, not a property


class FileTokenizer:
    """The tokenizer of a file, with the configuration in its folder.

    Text is interpreted as by Hugging Face's libraries: the name of a special token, typed into a prompt, is that token.

    Args:
        path: of a tokenizer.json, or of the folder that holds one.

    Attributes:
        model: the library's tokenizer.
        special_ids: see `Tokenizer`.
    """

    def __init__(self, path: Path) -> None:
        folder = read_folder(path)
        try:
            self.model = tokenizers.Tokenizer.from_file(str(folder.file))
        except Exception as error:  # the library raises bare Exception for every error in a file
            raise SettingsError(
                f"router.tokenizer: {folder.file}: {error}; give a tokenizer.json, or the folder that holds one"
            ) from None
        # A file may contain its author's batch settings, which would truncate or pad prompts.
        self.model.no_truncation()
        self.model.no_padding()
        ids = self.model.get_vocab(with_added_tokens=True)
        if not ids:
            raise SettingsError(f"router.tokenizer: {folder.file}: its vocabulary is empty; give another")
        added = self.model.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = 1 + max(ids.values())
        # The file's spelling takes no fewer bytes than the text of the token.
        self.longest_token_bytes = max(len(name.encode()) for name in ids)
        eos_id = find_eos(folder, ids)
        self.eos_id = self._least_seen(ids.values()) if eos_id is None else eos_id
        self._chat = ChatTemplate(folder.chat_template, folder.special_tokens, f"router.tokenizer: {folder.file}")
        self._file = folder.file
        self._pieces: BytePieces | None = None
        if _is_byte_level(self.model):
            self._pieces = BytePieces(
                {token_id: "" if token_id in self.special_ids else name for name, token_id in ids.items()}
            )

    def _least_seen(self, token_ids: Iterable[int]) -> int:
        """Return a token to end sequences in a vocabulary without an end: a special token, or white space."""
        if self.special_ids:
            return min(self.special_ids)
        ordered = sorted(token_ids)
        return next((token_id for token_id in ordered if not self.model.decode([token_id]).strip()), ordered[0])

    @cached_property
    def word_ids(self) -> Sequence[int]:
        """See `Tokenizer.word_ids`.

        Raises:
            SettingsError: no token has text.
        """
        words = WORDS.read_text(encoding="utf-8").split()
        found = word_ids(self.model, words, self.vocab_size, self.special_ids)
        if not found:
            raise SettingsError(f"router.tokenizer: {self._file}: no token has text to see; give another")
        return found

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode_prompt`."""
        return _encode(self.model, text, add_special_tokens=add_special_tokens)

    def encode_stop(self, text: str) -> list[int]:
        """See `Tokenizer.encode_stop`."""
        token_ids = _encode(self.model, text, add_special_tokens=False)
        if self.special_ids.isdisjoint(token_ids):
            return token_ids
        return _encode(self._without_special, text, add_special_tokens=False)

    @cached_property
    def _without_special(self) -> tokenizers.Tokenizer:
        """The same, but to it names of special tokens are text."""
        model = tokenizers.Tokenizer.from_str(self.model.to_str())
        model.encode_special_tokens = True
        return model

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
        """See `Tokenizer.chat_prompt`."""
        given = {**variables, "add_generation_prompt": add_generation_prompt}
        return self._chat.render(messages, most_characters, given, to_be_continued=continue_final_message)

    def name(self, token_id: int) -> str:
        """See `Tokenizer.name`."""
        return self.model.id_to_token(token_id) or ""

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return self.model.decode(token_ids, skip_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """See `Tokenizer.detokenizer`."""
        if self._pieces is not None:
            return ByteDetokenizer(self._pieces)
        return WindowDetokenizer(self.model, self.special_ids)


class BuiltinTokenizer(FileTokenizer):
    """The shipped tokenizer; `build` has its table of ids.

    Args:
        vocab_size: token ids in prompts must be below it.
    """

    def __init__(self, vocab_size: int = MAX_VOCABULARY) -> None:
        super().__init__(SHIPPED)
        assert self._pieces is not None
        self.longest_token_bytes = self._pieces.longest_bytes
        self.vocab_size = vocab_size

    @cached_property
    def word_ids(self) -> Sequence[int]:
        """See `Tokenizer.word_ids`."""
        return range(FIRST_WORD_ID, FIRST_WORD_ID + NUM_WORDS)


def _encode(model: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of `text`; while a long one is encoded, other threads can run.

    The library's `encode` holds Python's lock throughout, its `encode_batch_fast` does not.
    """
    if len(text) < _LONG_CHARACTERS:
        return model.encode(text, add_special_tokens=add_special_tokens).ids
    (encoding,) = model.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding.ids


def _is_byte_level(model: tokenizers.Tokenizer) -> bool:
    """Return whether tokens are spelt bytes, and the decoder does nothing else to the text."""
    decoder = {} if model.decoder is None else json.loads(model.decoder.__getstate__())
    if decoder.get("type") == "Sequence":
        kinds = [part.get("type") for part in decoder.get("decoders", ())]
    else:
        kinds = [decoder.get("type")]
    return kinds == ["ByteLevel"]


def word_ids(model: tokenizers.Tokenizer, words: Iterable[str], num_ids: int, special: frozenset[int]) -> list[int]:
    """Return the tokens for an output, each once, at most one per word; the words' own tokens come first, in order.

    Args:
        model: the vocabulary.
        words: without spaces.
        num_ids: token ids are below it.
        special: tokens without text.
    """
    words = list(words)
    found: dict[int, None] = {}
    for word in words:
        for text in (f" {word}", word):
            token_ids = model.encode(text, add_special_tokens=False).ids
            if len(token_ids) == 1 and token_ids[0] not in special and _whole_word(model, token_ids[0]) == word:
                found[token_ids[0]] = None
                break
    others = [token_id for token_id in range(num_ids) if token_id not in special and token_id not in found]
    _fill(found, (token_id for token_id in others if _whole_word(model, token_id)), len(words))
    if not found:
        _fill(found, _visible(model, others), len(words))
    return list(found)


def _fill(found: dict[int, None], more: Iterator[int], num_wanted: int) -> None:
    while len(found) < num_wanted and (token_id := next(more, None)) is not None:
        found[token_id] = None


def _whole_word(model: tokenizers.Tokenizer, token_id: int) -> str:
    """Return the word that a token is in any context; empty: it is not a word, or only a part of one."""
    one, two = model.decode([token_id]), model.decode([token_id, token_id])
    word = one.strip(" ")
    return word if word.isalpha() and two == f"{one} {word}" and REPLACEMENT not in word else ""


def _visible(model: tokenizers.Tokenizer, token_ids: Iterable[int]) -> Iterator[int]:
    for token_id in token_ids:
        text = model.decode([token_id])
        if text.strip() and text.isprintable() and REPLACEMENT not in text:
            yield token_id
