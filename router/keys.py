"""API keys: the format of their file, and what each key may do.

The file holds SHA-256 digests, never keys. A key has 256 random bits, so neither a salt nor a slow hash is needed, and
the time of a look-up by digest reveals nothing. `lorrery keys new` makes a key and its entry.

    [[keys]]
    name = "acme-production"           # in logs and messages; quotas count under it
    sha256 = "9f86d081884c7d65..."
    tenant = "acme"
    adapters = ["acme-*", "shared-1"]   # that it may use
    load_adapters = ["acme-*"]          # that it may load and unload
    requests_per_minute = 600
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from lorrery.service.errors import SettingsError
from lorrery.service.files.reading import read_toml
from lorrery.service.settings.sections import Name, Section, Weight

FORMAT = 1
KEY_PREFIX = "lry_"
"""Prefix of keys made by `lorrery keys new`; lets scanners find leaked keys."""

_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the key, 64 hexadecimal digits")]
_Patterns = tuple[str, ...]
_Limit = Annotated[int, Field(ge=1, le=2**31 - 1)]


class ApiKey(Section):
    """What a key may do. Names of adapters may hold `*`, `?` and `[...]`, as in a shell."""

    name: Name = Field(description="in logs and messages; quotas count under it")
    sha256: _Digest
    tenant: Name = Field(description="whose requests these are")
    adapters: _Patterns = Field(default=("*",), description="adapters that it may use")
    base_model: bool = Field(default=True, description="whether it may ask the base model, without an adapter")
    load_adapters: _Patterns = Field(default=(), description="adapters that it may load and unload")
    operator: bool = Field(
        default=False, description="may load and unload every adapter, and sees the whole cluster's state"
    )
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = Field(default=None, description="of prompts and outputs together")
    max_running: _Limit | None = Field(default=None, description="most requests at once on workers; others wait")
    max_waiting: _Limit | None = Field(default=None, description="most requests that wait")
    max_new_tokens: _Limit | None = Field(default=None, description="most that one request may ask for")
    weight: Weight = Field(default=1.0, description="the tenant's share under a fair policy")

    @property
    def has_rates(self) -> bool:
        """Whether its requests count, per minute."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    def may_use(self, adapter_id: str) -> bool:
        """Return whether requests may use this adapter; empty: the base model."""
        if not adapter_id:
            return self.base_model
        return self._uses.fullmatch(adapter_id) is not None

    def may_load(self, adapter_id: str) -> bool:
        """Return whether the key may load and unload this adapter."""
        return self.operator or self._loads.fullmatch(adapter_id) is not None

    def may_see(self, adapter_id: str) -> bool:
        """Return whether the key may learn that this adapter exists."""
        return self.operator or self.may_use(adapter_id) or self.may_load(adapter_id)

    @cached_property
    def _uses(self) -> re.Pattern[str]:
        return _any_of(self.adapters)

    @cached_property
    def _loads(self) -> re.Pattern[str]:
        return _any_of(self.load_adapters)


class _KeysFile(Section):
    """The whole file."""

    format: int = FORMAT
    keys: tuple[ApiKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys of a file."""

    by_digest: Mapping[str, ApiKey]

    def find(self, secret: str) -> ApiKey | None:
        """Return the entry of a key; None: there is none."""
        return self.by_digest.get(digest(secret))


def digest(secret: str) -> str:
    """Return the digest that the file holds for a key."""
    return sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def read_keys(path: Path) -> Keys:
    """Read a file of keys.

    Raises:
        SettingsError: it cannot be read, or is invalid.
    """
    try:
        found = _KeysFile.model_validate(read_toml(path))
    except SettingsError as error:
        raise SettingsError(f"router.keys: {error}") from None
    except ValidationError as error:
        raise SettingsError(f"router.keys: {path}: {_in_words(error)}") from None
    if "keys" not in found.model_fields_set:  # as while it is being written, or on a full disk
        raise SettingsError(f"router.keys: {path} has no [[keys]]; write keys = [] into it to revoke all keys")
    if found.format != FORMAT:
        raise SettingsError(f"router.keys: {path}: format {found.format} is not known; this version reads {FORMAT}")
    names: set[str] = set()
    by_digest: dict[str, ApiKey] = {}
    for key in found.keys:
        if key.name in names:
            raise SettingsError(f"router.keys: {path}: {key.name!r} is there twice; each key needs its own name")
        if (other := by_digest.get(key.sha256)) is not None:
            raise SettingsError(f"router.keys: {path}: {other.name!r} and {key.name!r} have the same sha256")
        names.add(key.name)
        by_digest[key.sha256] = key
    return Keys(by_digest)


def _any_of(patterns: _Patterns) -> re.Pattern[str]:
    # Without patterns nothing matches, not even the empty id.
    return re.compile("|".join(translate(pattern) for pattern in patterns) or r"(?!)")


def _in_words(error: ValidationError) -> str:
    """Describe the first error without its value, which may be a key in the place of its digest."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{where}: no such field"
    if first["type"] == "string_pattern_mismatch":
        return f"{where}: the SHA-256 of a key expected, 64 hexadecimal digits; `lorrery keys new` prints one"
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"
