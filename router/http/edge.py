"""What the routes of every kind of client have in common: who calls, whom a name means, and the answer."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from lorrery.chassis.errors import Unauthenticated
from lorrery.chassis.turns import Turns
from lorrery.router.checks import check_length
from lorrery.router.faults import METADATA_KEY
from lorrery.router.field_names import Names, named
from lorrery.router.generate import Call
from lorrery.router.handler import Handler
from lorrery.router.http.answer import Answer, Shape
from lorrery.router.http.field_names import COMPLETION
from lorrery.router.http.token_json import TokenTexts
from lorrery.router.keys import ApiKey
from lorrery.v1 import router_pb2

ROLES, REQUEST_ID = "roles", "request_id"
"""What the server knows of a request, in its ASGI state: the roles in the certificate that was shown, and its id. The
writer of its answer's body is there too, see answer.py."""

EITHER: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}, "application/json": {}}}}
"""How routes describe an answer that is a stream if that is asked for."""


class Edge:
    """The handler as the routes see it.

    Args:
        handler: answers.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.turns = Turns()
        self.texts = TokenTexts(handler.tokenizer)
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
        names: Sequence[Names],
    ) -> Response:
        """Return the answer to a request for so many outputs; `names`: of fields in errors about each message."""

        async def generate(message: router_pb2.GenerateRequest, its_names: Names, call: Call) -> None:
            with named(its_names):
                await self.handler.generate(message, lambda: self.caller(http), call)

        choices = [partial(generate, *one) for one in zip(messages, names, strict=True)]
        return Answer(choices, shape, self.turns, stream=bool(stream), fault_rules=http.headers.getlist(METADATA_KEY))

    async def check_model(self, http: Request, model: str | None) -> None:
        """Check that a request names the base model, be it by naming none, or an adapter that the caller may know of.

        Raises:
            RequestError: it names another, or that cannot be found out now.
            grpc.aio.AioRpcError: the same, as a scheduler has answered.
        """
        if not model or model in (self.handler.settings.model, *self.models):
            return
        check_length("model", model)
        if await self.handler.find_adapter(self.caller(http), model) is None:
            with named(COMPLETION):
                raise self.handler.unknown_model(model)
