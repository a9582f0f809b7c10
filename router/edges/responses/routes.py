"""OpenAI's Responses routes, as vLLM answers them. Nothing is stored: a response cannot be retrieved later."""

from http import HTTPStatus

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorrery.router.edges.as_chat import check_fits
from lorrery.router.edges.responses.requests import ResponsesRequest
from lorrery.router.edges.responses.shapes import ResponseShape
from lorrery.router.field_names import named
from lorrery.router.http.bodies import json_route
from lorrery.router.http.edge import EITHER, Edge
from lorrery.router.http.errors import RESPONSES, body, json_response
from lorrery.router.http.generating import check_vocabulary, outputs
from lorrery.router.http.token_details import LogprobsJson


def routes(edge: Edge) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1/responses", tags=["OpenAI"], route_class=json_route(edge.admit, edge.bodies))
    names = RESPONSES._replace(max_model_len=edge.max_model_len)
    router_settings = edge.handler.settings.router

    @router.post("", responses=EITHER)
    async def responses(request: ResponsesRequest, http: Request) -> Response:
        """Answer a text or a conversation, as a stream or in one piece."""
        await edge.check_model(http, request.model)
        if request.background:
            return _refused(HTTPStatus.BAD_REQUEST, "background", "responses are not kept; leave it out, and stream")
        if request.previous_response_id is not None:
            return _unknown(request.previous_response_id)
        with named(names):
            chat = request.chat()
            chat.check()
            request.check_room(edge.max_model_len)
            check_vocabulary(chat, (), edge.handler.tokenizer.vocab_size)
            asked = request.form(chat, router_settings.tool_calls, edge.tool_call_probability)
            form = edge.counting(asked, "responses", stream=request.stream)
            prompt = await edge.handler.encode_chat(
                request.turns(),
                lambda: edge.caller(http),
                add_generation_prompt=not request.is_continuing,
                continue_final_message=request.is_continuing,
                add_special_tokens=True,
                only_count=request.truncation == "auto",
                variables=chat.variables(excludes_tools=edge.excludes_tools and request.tool_choice == "none"),
            )
        if request.truncation == "auto":
            # As in vLLM, a token is left for the output, unless its number is not given.
            most = min(edge.max_model_len - 1, edge.handler.settings.scheduler.max_req_input_len)
            prompt = prompt[: most if request.max_output_tokens else edge.max_model_len]
        check_fits(len(prompt), edge.max_model_len)
        if len(prompt) == edge.max_model_len:
            why = f"the prompt has {len(prompt)} tokens, and the context {edge.max_model_len}; make it shorter"
            return _refused(HTTPStatus.BAD_REQUEST, "input", why)
        request_id = request.request_id
        if "request_id" not in request.model_fields_set:
            request_id = f"resp_{edge.request_id(http)}"
        messages = chat.messages([prompt], request_id, edge.tenant(request.user))
        shape = ResponseShape(
            request_id,
            request.model or edge.model,
            request,
            max_output_tokens=min(request.max_output_tokens or edge.max_model_len, edge.max_model_len - len(prompt)),
            is_greedy=chat.is_greedy,
            block_size=edge.cached_block_size,
            logprobs=LogprobsJson(edge.texts),
            prompt=_shown(edge, prompt) if request.enable_response_messages else None,
            form=form,
            reads_calls=router_settings.tool_calls != "none",
        )
        wanted = outputs(messages, 1, request.seed)
        return edge.answer(http, wanted, shape, stream=request.stream, names=[names], form=form)

    @router.get("/{response_id}")
    async def response(response_id: str, starting_after: int | None = None, stream: bool | None = False) -> Response:
        """Refuse: responses are not kept."""
        del starting_after, stream
        return _unknown(response_id)

    @router.post("/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        """Refuse: responses are not kept."""
        return _unknown(response_id)

    return router


def _shown(edge: Edge, prompt: list[int]) -> tuple[str, list[int]]:
    """Return a prompt as its text, without the special tokens that were added to that, and its tokens."""
    added = edge.handler.tokenizer.decode(edge.handler.tokenizer.encode_prompt(""))
    return edge.handler.tokenizer.decode(prompt).removeprefix(added), prompt


def _unknown(response_id: str) -> Response:
    why = f"there is no response {response_id!r}: responses are not kept; send the conversation as input"
    return _refused(HTTPStatus.NOT_FOUND, "response_id", why)


def _refused(status: HTTPStatus, param: str, why: str) -> Response:
    return json_response(body(status, why, param, "invalid_request_error"), status)
