"""Anthropic's routes, as vLLM answers them."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorrery.router.field_names import named
from lorrery.router.http.anthropic_errors import PREFIX
from lorrery.router.http.anthropic_requests import Conversation, MessagesRequest
from lorrery.router.http.anthropic_shapes import MessageShape
from lorrery.router.http.bodies import json_route
from lorrery.router.http.edge import EITHER, Edge
from lorrery.router.http.errors import json_response
from lorrery.router.http.field_names import MESSAGES
from lorrery.router.http.generating import outputs


def routes(edge: Edge) -> APIRouter:
    """Return Anthropic's routes."""
    router = APIRouter(prefix=PREFIX, tags=["Anthropic"], route_class=json_route(edge.admit))
    names = MESSAGES._replace(max_model_len=edge.max_model_len)

    async def encoded(request: Conversation, http: Request) -> list[int]:
        return await edge.handler.encode_chat(request.turns(), lambda: edge.caller(http), variables=request.variables)

    @router.post("", responses=EITHER)
    async def messages(request: MessagesRequest, http: Request) -> Response:
        """Answer a conversation, as a stream or in one piece."""
        with named(names):
            request.check()
            prompt = await encoded(request, http)
            form = edge.counting(request.form(edge.tool_call_probability), "other", stream=request.stream)
        request_id = edge.request_id(http)
        wanted = request.messages([prompt], f"msg_{request_id}", edge.tenant(request.user))
        shape = MessageShape(request_id, request.model or edge.model, len(prompt), form)
        choices = outputs(wanted, 1, request.seed)
        return edge.answer(http, choices, shape, stream=request.stream, names=[names], form=form)

    @router.post("/count_tokens")
    async def count_tokens(request: Conversation, http: Request) -> Response:
        """Return how many tokens a conversation has, by the chat template."""
        await edge.check_model(http, request.model)
        with named(names):
            return json_response({"input_tokens": len(await encoded(request, http))})

    return router
