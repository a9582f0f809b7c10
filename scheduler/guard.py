"""Which peers may call a scheduler: those of its own cluster.

With `cluster_token` set every call must carry the token; with `server_tls.ca` set every certificate names a role, and
the role must be one that may make this call. If both are set, both must hold; if neither is, any peer may call.
"""

from lorrery.chassis import status
from lorrery.chassis.credentials import ClusterToken, Role, authorization, certificate_roles, token_of
from lorrery.chassis.errors import PermissionDenied, Unauthenticated
from lorrery.settings import Settings

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

    @property
    def protects(self) -> bool:
        """Whether any call is restricted."""
        return self._token.required or self._roles_count

    async def check(self, context: status.Context, roles: tuple[Role, ...]) -> None:
        """End a forbidden call: UNAUTHENTICATED without the token, PERMISSION_DENIED with another role."""
        if self._token.required and not self._token.accepts(token_of(authorization(context))):
            await status.abort(
                context,
                Unauthenticated(
                    "the cluster's token is needed here; give this service the scheduler's file as cluster_token",
                    field="cluster_token",
                ),
            )
        if self._roles_count and not certificate_roles(context) & set(roles):
            shown = ", ".join(sorted(certificate_roles(context))) or "none"
            await status.abort(
                context,
                PermissionDenied(
                    f"the certificate's role is {shown}; this call is for {' and '.join(roles)};"
                    " `lorrery certs` makes certificates with roles",
                    field="client_tls.cert",
                    value=shown,
                ),
            )
