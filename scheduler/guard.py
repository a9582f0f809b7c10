"""Which peers may call a scheduler: those of its own cluster.

With `cluster_token` set every call must carry the token; with `server_tls.ca` set every certificate names a role, and
the role must be one that may make this call. If both are set, both must hold; if neither is, any peer may call. Refused
calls are logged, at most one a second of a kind: a worker with a wrong token dials for ever.
"""

from typing import NoReturn

from lorrery.service.errors import PermissionDenied, RequestError, Unauthenticated
from lorrery.service.network import status
from lorrery.service.network.credentials import ClusterToken, Role, authorization, certificate_roles, token_of
from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.log import BoundedLog, get_logger

ROUTERS = (Role.ROUTER,)
WORKERS = (Role.WORKER,)
OPERATORS = (Role.ROUTER, Role.OPERATOR)
"""A router passes on calls of its operators."""


class Guard:
    """Checks calls.

    Args:
        settings: of the cluster.

    Raises:
        SettingsError: the token cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        self._token = ClusterToken(settings.cluster_token)
        self._roles_count = settings.server_tls.ca is not None
        self._refused = BoundedLog(get_logger("scheduler.guard"), "call_refused")

    @property
    def protects(self) -> bool:
        """Whether any call is restricted."""
        return self._token.required or self._roles_count

    async def check(self, context: status.Context, roles: tuple[Role, ...]) -> None:
        """End a forbidden call: UNAUTHENTICATED without the token, PERMISSION_DENIED with another role."""
        token = token_of(authorization(context))
        if self._token.required and not self._token.accepts(token):
            what = "the token sent is not this cluster's" if token else "the cluster's token is needed here"
            message = f"{what}; give this service the scheduler's file as cluster_token"
            await self._refuse(context, roles, Unauthenticated(message, field="cluster_token"))
        if self._roles_count and not certificate_roles(context) & set(roles):
            shown = ", ".join(sorted(certificate_roles(context))) or "none"
            message = (
                f"the certificate's role is {shown}; this call is for {' and '.join(roles)};"
                " `lorrery certs` makes certificates with roles"
            )
            await self._refuse(context, roles, PermissionDenied(message, field="client_tls.cert", value=shown))

    async def _refuse(self, context: status.Context, roles: tuple[Role, ...], error: RequestError) -> NoReturn:
        called_as = " or ".join(roles)
        kind = f"{called_as}: {error.reason.name}"
        self._refused.say(kind, called_as=called_as, peer=context.peer(), reason=str(error))
        await status.abort(context, error)
