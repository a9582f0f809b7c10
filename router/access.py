"""Authentication and authorisation, shared by all edges of a router.

With `router.keys` set, each call needs an API key. Without, every caller may do everything, except that operator calls
need an operator's certificate where certificates are required (`server_tls.ca`).

The file of keys holds SHA-256 digests, never keys. A key has 256 random bits, so neither a salt nor a slow hash is
needed, and the time of a look-up by digest reveals nothing. `lorrery keys new` makes a key and its entry.

    [[keys]]
    name = "acme-production"           # in logs and messages; quotas count under it
    sha256 = "9f86d081884c7d65..."
    tenant = "acme"
    adapters = ["acme-*", "shared-1"]   # that it may use
    load_adapters = ["acme-*"]          # that it may load and unload
    requests_per_minute = 600
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from lorrery.service.errors import PermissionDenied, SettingsError, Unauthenticated
from lorrery.service.files.reading import read_toml
from lorrery.service.names import quoted
from lorrery.service.network.credentials import Role, Watched, token_of
from lorrery.service.settings.cluster import Settings
from lorrery.service.settings.sections import Name, Section, Weight
from lorrery.v1 import router_pb2, types_pb2

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


_NOBODY = "0" * 64
ANYBODY = ApiKey(name="anybody", sha256=_NOBODY, tenant="anybody", load_adapters=("*",), operator=True)
"""The caller where no key is required."""
CERTIFIED = ApiKey(name="certified", sha256=_NOBODY, tenant="anybody")
"""A caller with a certificate that is not an operator's."""


class Access:
    """Authenticates callers.

    Args:
        settings: of the cluster.

    Raises:
        SettingsError: the file of keys cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        path = settings.router.keys
        self._keys = None if path is None else Watched((path,), lambda: read_keys(path))
        self._roles_count = settings.server_tls.ca is not None

    @property
    def tenants(self) -> list[str]:
        """Tenants that have keys now."""
        return [] if self._keys is None else sorted({key.tenant for key in self._keys.current().by_digest.values()})

    @property
    def counts(self) -> bool:
        """Whether requests count against a key's quotas."""
        return self._keys is not None

    @property
    def protects(self) -> bool:
        """Whether some calls need a key or a certificate."""
        return self._keys is not None or self._roles_count

    def caller(self, authorization: str, roles: Collection[str] = ()) -> ApiKey:
        """Authenticate a caller; return its permissions.

        Args:
            authorization: gRPC metadata or HTTP header; empty: none.
            roles: from the client certificate.

        Raises:
            Unauthenticated: no valid key.
        """
        if self._keys is None:
            return CERTIFIED if self._roles_count and Role.OPERATOR not in roles else ANYBODY
        secret = token_of(authorization)
        if not secret:
            raise Unauthenticated("an API key is needed: authorization: Bearer KEY", field="authorization")
        key = self._keys.current().find(secret)
        if key is None:
            raise Unauthenticated("the API key is not known here; ask the operator for one", field="authorization")
        return key

    def is_valid(self, caller: ApiKey) -> bool:
        """Return whether the caller's key is still valid."""
        return self._keys is None or caller.sha256 in self._keys.current().by_digest

    def tenant(self, caller: ApiKey, asked: str) -> str:
        """Return the tenant of a request; `asked`: the tenant that the request names.

        Raises:
            PermissionDenied: it names another tenant than the key's.
        """
        if self._keys is None:
            return asked
        if asked not in ("", caller.tenant):
            raise PermissionDenied(
                f"tenant_id is {quoted(asked)}; this key is tenant {caller.tenant!r}'s; leave tenant_id empty",
                field="tenant_id",
                value=quoted(asked),
            )
        return caller.tenant


def taken_back(caller: ApiKey) -> Unauthenticated:
    """Return the error for a caller whose key was revoked."""
    text = f"the API key {caller.name!r} has been taken back; ask the operator for another"
    return Unauthenticated(text, field="authorization")


def check_use(caller: ApiKey, adapter_id: str, max_new_tokens: int, prompt_tokens: int) -> None:
    """Check that a request is within the permanent limits of its key.

    Raises:
        PermissionDenied: it is not; a retry would be refused too.
    """
    if not caller.may_use(adapter_id):
        what = f"adapter {quoted(adapter_id)}" if adapter_id else "the base model"
        raise PermissionDenied(
            f"this key may not use {what}; ListAdapters lists the adapters that it may use",
            field="adapter_id",
            value=quoted(adapter_id),
        )
    check_tokens(caller, max_new_tokens, prompt_tokens)


def check_tokens(caller: ApiKey, max_new_tokens: int, prompt_tokens: int) -> None:
    """Check that the lengths of a request are within the permanent limits of its key.

    Raises:
        PermissionDenied: they are not.
    """
    for field, value, limit in (
        ("max_new_tokens", max_new_tokens, caller.max_new_tokens),
        ("tokens_per_minute", prompt_tokens + max_new_tokens, caller.tokens_per_minute),
    ):
        if limit is not None and value > limit:
            raise PermissionDenied(
                f"the request asks for {value} tokens; {field} of this key is {limit}; ask for less",
                field=field,
                value=value,
                limit=limit,
            )


def check_load(caller: ApiKey, adapter_id: str) -> None:
    """Check that the caller may load or unload an adapter.

    Raises:
        PermissionDenied: it may not.
    """
    if not caller.may_load(adapter_id):
        raise PermissionDenied(
            f"{_shown(caller)} may not load or unload adapter {quoted(adapter_id)}; an operator's may",
            field="adapter_id",
            value=quoted(adapter_id),
        )


def check_operator(caller: ApiKey, what: str) -> None:
    """Check that the caller is an operator; `what` describes the call.

    Raises:
        PermissionDenied: it is not.
    """
    if not caller.operator:
        raise PermissionDenied(f"{_shown(caller)} may not {what}; an operator's may")


def _shown(caller: ApiKey) -> str:
    """Return what the caller has shown, for messages."""
    return "this certificate" if caller is CERTIFIED else "this key"


def visible_adapters(caller: ApiKey, adapters: Iterable[types_pb2.Adapter]) -> list[types_pb2.Adapter]:
    """Return the adapters that the caller may see."""
    return [adapter for adapter in adapters if caller.may_see(adapter.adapter_id)]


def visible_status(caller: ApiKey, status: router_pb2.GetClusterStatusResponse) -> router_pb2.GetClusterStatusResponse:
    """Remove from a status, in place, what the caller may not see: counts and other tenants' adapters; return it."""
    if caller.operator:
        return status
    for shard in status.shards:
        shard.ClearField("num_unplaced")
        for worker in shard.workers:
            for field in ("num_running", "num_waiting", "kv_tokens"):
                worker.ClearField(field)
            resident = [name for name in worker.resident_adapters if caller.may_see(name)]
            del worker.resident_adapters[:]
            worker.resident_adapters.extend(resident)
    return status
