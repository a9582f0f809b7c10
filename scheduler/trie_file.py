"""A static prefix trie as a file: JSON with a format version, the node's parents and token ids in node order."""

import json
from pathlib import Path

from lorrery.scheduler.core.prefix_cache.static_trie import StaticTrie
from lorrery.service.errors import FormatError

FORMAT_VERSION = 1


def write_trie(trie: StaticTrie, path: Path) -> None:
    """Write a trie.

    Raises:
        FormatError: the file cannot be written.
    """
    parents, token_ids = trie.nodes()
    content = {"format_version": FORMAT_VERSION, "kind": "static_trie", "parents": parents, "token_ids": token_ids}
    try:
        path.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None


def read_trie(path: Path) -> StaticTrie:
    """Read a trie.

    Raises:
        FormatError: it cannot be read, is no trie, or has an unknown format version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["kind"] != "static_trie":
            raise FormatError(f"{path}: holds {content['kind']!r}, not a static_trie")
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise FormatError(f"{path}: format version {version!r} is not known; this one reads {FORMAT_VERSION}")
        return StaticTrie.of_nodes(content["parents"], content["token_ids"])
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{path}: is not a trie: {error}") from None


def read_corpus(path: Path) -> list[list[int]]:
    """Read prompts, one JSON array of token ids a line.

    Raises:
        FormatError: it cannot be read, or a line is no array of integers.
    """
    prompts: list[list[int]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                prompt = json.loads(line)
                if not isinstance(prompt, list) or not all(isinstance(token_id, int) for token_id in prompt):
                    raise FormatError(f"{path}:{number}: expected a JSON array of token ids")
                prompts.append(prompt)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: {error}") from None
    return prompts
