"""The tokenizer in the forms that gateways need: a folder on this machine, or an archive of its files."""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from lorrery.tokenizer.file import SHIPPED

CHUNK_BYTES = 1 << 20
_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model"),
)
"""Files of a tokenizer; its folder may be a model's, which has weights too."""
_YEAR_ZERO = (1980, 1, 1, 0, 0, 0)
"""Fixed time stamp, so that equal files make equal archives."""


def tokenizer_folder(setting: Path | None) -> Path:
    """Return the folder of the tokenizer that `router.tokenizer` names; unset: the shipped one's."""
    if setting is None:
        return SHIPPED.resolve()
    return (setting if setting.is_dir() else setting.parent).resolve()


async def archive(folder: Path) -> bytes:
    """Return a zip archive of a tokenizer's files.

    Raises:
        OSError: a file cannot be read.
    """
    return await asyncio.to_thread(_archive, folder)


def chunks(content: bytes) -> Iterator[tuple[bytes, str]]:
    """Yield an archive in chunks, the last with the SHA-256 of the whole in hexadecimal."""
    for begin in range(0, len(content), CHUNK_BYTES):
        last = begin + CHUNK_BYTES >= len(content)
        yield content[begin : begin + CHUNK_BYTES], hashlib.sha256(content).hexdigest() if last else ""


def _archive(folder: Path) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as files:
        for name in _NAMES:
            path = folder / name
            if path.is_file():
                files.writestr(zipfile.ZipInfo(name, _YEAR_ZERO), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()
