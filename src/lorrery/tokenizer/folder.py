"""Reads the configuration beside a tokenizer.json in a Hugging Face folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorrery.service.errors import SettingsError
from lorrery.tokenizer.chat import PLAIN_TEMPLATE

TOKENIZER_FILE = "tokenizer.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_USUAL_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>", "<end_of_turn>", "[SEP]")
"""Names of end-of-sequence tokens in well-known vocabularies, for a folder that does not name its own."""


@dataclass(frozen=True, slots=True)
class Folder:
    """See the module.

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
