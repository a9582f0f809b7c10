"""Anthropic's routes, as vLLM answers them."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorrery.router.edges.anthropic.errors import PASSED_OVER, PREFIX
from lorrery.router.edges.anthropic.requests import Conversation, MessagesRequest
from lorrery.router.edges.anthropic.shapes import MessageShape
from lorrery.router.edges.as_chat import check_fits
from lorrery.router.field_names import named
from lorrery.router.http.bodies import json_route
from lorrery.router.http.edge import EITHER, Edge
from lorrery.router.http.errors import json_response
from lorrery.router.http.field_names import MESSAGES
from lorrery.router.http.generating import check_room, outputs
from lorrery.router.http.openai_requests import ChatRequest


def routes(edge: Edge) -> APIRouter:
    """Return Anthropic's routes."""
    router = APIRouter(prefix=PREFIX, tags=["Anthropic"], route_class=json_route(edge.admit, edge.bodies))
    names = MESSAGES._replace(max_model_len=edge.max_model_len)

    async def encoded(request: Conversation, chat: ChatRequest, http: Request) -> list[int]:
        edge.check_tool_choice(request.choice)
        turns = request.turns(http.scope["state"].setdefault(PASSED_OVER, []))
        variables = chat.variables(excludes_tools=edge.excludes_tools and request.choice == "none")
        with named(names):
            prompt = await edge.handler.encode_chat(turns, lambda: edge.caller(http), variables=variables)
        check_fits(len(prompt), edge.max_model_len)
        return prompt

    @router.post("", responses=EITHER)
    async def messages(request: MessagesRequest, http: Request) -> Response:
        """Answer a conversation, as a stream or in one piece."""
        await edge.check_model(http, request.model)
        chat = request.chat()
        chat.check()
        check_room(chat, edge.max_model_len)
        prompt = await encoded(request, chat, http)
        form = edge.counting(request.form(chat, edge.tool_call_probability), "other", stream=request.stream)
        request_id = f"chatcmpl-{edge.request_id(http)}"
        tenant = edge.tenant(request.user if isinstance(request.user, str) else None)
        wanted = outputs(chat.messages([prompt], request_id, tenant), 1, chat.seed)
        shape = MessageShape(
            request_id,
            request.model,
            len(prompt),
            form,
            block_size=edge.cached_block_size,
            requires_call=request.choice == "required",
        )
        return edge.answer(http, wanted, shape, stream=request.stream, names=[names], form=form)

    @router.post("/count_tokens")
    async def count_tokens(request: Conversation, http: Request) -> Response:
        """Return how many tokens a conversation has, by the chat template."""
        await edge.check_model(http, request.model)
        count = len(await encoded(request, request.chat(), http))
        return json_response({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    return router
