"""What the routes of every kind of client have in common: who calls, whom a name means, and the answer."""

from collections.abc import Collection, Sequence

from fastapi import Request
from starlette.responses import Response

from lorrery.chassis.errors import Unauthenticated
from lorrery.router.faults import METADATA_KEY
from lorrery.router.generate import Call
from lorrery.router.handler import Handler
from lorrery.router.http.answer import Answer, Shape
from lorrery.router.http.field_names import Names, named
from lorrery.router.keys import ApiKey
from lorrery.v1 import router_pb2

ROLES, REQUEST_ID = "roles", "request_id"
"""What the server knows of a request, in its ASGI state: the roles in the certificate that was shown, and its id. The
writer of its answer's body is there too, see answer.py."""


class Edge:
    """The handler as the routes see it.

    Args:
        handler: answers.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.models = handler.settings.served_model_names
        self.model = self.models[0]
        self.max_model_len = handler.settings.scheduler.max_req_total_len

    def caller(self, http: Request) -> ApiKey:
        """Return what a caller may do.

        Raises:
            Unauthenticated: no valid key.
        """
        roles: Collection[str] = http.scope["state"].get(ROLES, ())
        return self.handler.caller(http.headers.get("authorization", ""), roles)

    def admit(self, http: Request) -> None:
        """Check who asks, and count who is not let in.

        Raises:
            Unauthenticated: no valid key.
        """
        try:
            self.caller(http)
        except Unauthenticated as error:
            self.handler.count_refused(error)
            raise

    def request_id(self, http: Request) -> str:
        """Return what the client calls its request, or what the server does."""
        name: str = http.scope["state"][REQUEST_ID]
        return name

    def tenant(self, user: str | None) -> str:
        """Return whose request it is: the key tells, where one is asked for."""
        return "" if user is None or self.handler.counts_keys else user

    def answer(
        self,
        http: Request,
        messages: Sequence[router_pb2.GenerateRequest],
        shape: Shape,
        *,
        stream: bool | None,
        names: Names,
    ) -> Response:
        """Return the answer to a request for so many outputs; `names`: of fields in errors, see `field_names`."""

        async def generate(message: router_pb2.GenerateRequest, call: Call) -> None:
            with named(names):
                await self.handler.generate(message, lambda: self.caller(http), call)

        return Answer(messages, generate, shape, stream=bool(stream), fault_rules=http.headers.getlist(METADATA_KEY))
