"""Authentication and authorisation, shared by all edges of a router.

With `router.keys` set, each call needs an API key. Without, every caller may do everything, except that operator calls
need an operator's certificate where certificates are required (`server_tls.ca`).
"""

from collections.abc import Collection, Iterable

from lorrery.router.keys import ApiKey, read_keys
from lorrery.service.errors import PermissionDenied, Unauthenticated
from lorrery.service.names import quoted
from lorrery.service.network.credentials import Role, Watched, token_of
from lorrery.service.settings.cluster import Settings
from lorrery.v1 import router_pb2, types_pb2

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
