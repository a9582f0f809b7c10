"""OpenAI's Responses route, as vLLM answers it. Nothing is stored: a response cannot be retrieved later."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorrery.router.field_names import named
from lorrery.router.http.bodies import json_route
from lorrery.router.http.edge import EITHER, Edge
from lorrery.router.http.field_names import RESPONSES
from lorrery.router.http.generating import outputs
from lorrery.router.http.responses_requests import ResponsesRequest
from lorrery.router.http.responses_shapes import ResponseShape


def routes(edge: Edge) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=json_route(edge.admit))

    @router.post("/responses", responses=EITHER)
    async def responses(request: ResponsesRequest, http: Request) -> Response:
        """Answer a text or a conversation, as a stream or in one piece."""
        request.check()
        names = RESPONSES._replace(max_model_len=edge.max_model_len)
        with named(names):
            prompt = await edge.handler.encode_chat(
                request.turns(),
                lambda: edge.caller(http),
                add_special_tokens=True,  # as in vLLM, beside the template's own, unlike in a chat
                variables=request.variables,
            )
        request_id = edge.request_id(http, request.request_id)
        form = edge.counting(request.form(edge.tool_call_probability), "responses", stream=request.stream)
        messages = request.messages([prompt], f"resp_{request_id}", edge.tenant(request.user))
        shape = ResponseShape(request_id, request.model or edge.model, request, form)
        wanted = outputs(messages, 1, request.seed)
        return edge.answer(http, wanted, shape, stream=request.stream, names=[names], form=form)

    return router
