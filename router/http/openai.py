"""OpenAI's routes, as vLLM answers them."""

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from lorrery.router.field_names import Names, named
from lorrery.router.http.anthropic_errors import is_anthropics
from lorrery.router.http.bodies import json_route
from lorrery.router.http.edge import EITHER, Edge
from lorrery.router.http.errors import json_response
from lorrery.router.http.field_names import CHAT, COMPLETION, of_prompt
from lorrery.router.http.generating import GeneratingRequest, outputs
from lorrery.router.http.openai_details import Details, Prompt
from lorrery.router.http.openai_requests import ChatRequest, CompletionRequest
from lorrery.router.http.openai_shapes import ChatShape, CompletionShape, unix_seconds
from lorrery.router.http.pieces import JsonParts, array_of
from lorrery.router.http.token_json import LogprobsJson
from lorrery.v1 import router_pb2

_UNKNOWN = "1970-01-01T00:00:00Z"
"""Release date of every model; by Anthropic's API this value stands for an unknown one."""


def routes(edge: Edge) -> APIRouter:
    """Return OpenAI's routes."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=json_route(edge.admit))
    began = unix_seconds()

    @router.post("/completions", responses=EITHER)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        """Complete one or more prompts, each text or tokens; as a stream or in one piece."""
        request.check()
        prompts = request.prompts
        return await _answer(
            edge, request, http, prompts, f"cmpl-{edge.request_id(http, request.request_id)}", CompletionShape
        )

    @router.post("/chat/completions", responses=EITHER)
    async def chat(request: ChatRequest, http: Request) -> Response:
        """Answer a conversation, as a stream or in one piece."""
        request.check()
        with named(CHAT._replace(max_model_len=edge.max_model_len)):
            prompt = await edge.handler.encode_chat(
                request.turns,
                lambda: edge.caller(http),
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
                add_special_tokens=bool(request.add_special_tokens),
                variables=request.variables,
            )
        request_id = f"chatcmpl-{edge.request_id(http, request.request_id)}"
        return await _answer(edge, request, http, [prompt], request_id, ChatShape)

    @router.get("/models")
    async def models(http: Request) -> Response:
        """List the base model, then the adapters; with fields of Anthropic for who sends `anthropic-version`."""
        known = (await edge.handler.list_adapters(edge.caller(http))).adapters
        cards: Iterable[dict[str, Any]] = chain(
            map(base_card, edge.models), (adapter_card(adapter.adapter_id) for adapter in known)
        )
        ending = "}"
        if is_anthropics(http.scope):
            cards = map(as_anthropic_shows, cards)
            last = known[-1].adapter_id if known else edge.models[-1]
            ending = f', "has_more": false, {json.dumps({"first_id": edge.models[0], "last_id": last})[1:]}'
        return JsonParts(chain(('{"object": "list", "data": ',), array_of(cards), (ending,)), edge.turns)

    @router.get("/models/", include_in_schema=False)
    async def models_with_slash(http: Request) -> Response:
        """Redirect, as other routes do; the next one would take it for a model without a name."""
        return RedirectResponse(http.url.replace(path=http.url.path.rstrip("/")))

    @router.get("/models/{name:path}")
    async def model(name: str, http: Request) -> Response:
        """Show the base model or an adapter."""
        found = await edge.handler.find_adapter(edge.caller(http), name)
        if name not in edge.models and found is None:
            with named(COMPLETION):
                raise edge.handler.unknown_model(name)
        shown = base_card(name) if name in edge.models else adapter_card(name)
        return json_response(as_anthropic_shows(shown) if is_anthropics(http.scope) else shown)

    card = {"object": "model", "created": began, "owned_by": "lorrery"}

    def base_card(name: str) -> dict[str, Any]:
        return {**card, "id": name, "root": name, "parent": None, "max_model_len": edge.max_model_len}

    def adapter_card(name: str) -> dict[str, Any]:
        return {**card, "id": name, "root": edge.handler.adapter_path(name) or name, "parent": edge.model}

    def as_anthropic_shows(shown: dict[str, Any]) -> dict[str, Any]:
        theirs = {"type": "model", "display_name": shown["id"], "created_at": _UNKNOWN, "lifecycle": "active"}
        return {**shown, **theirs}

    return router


async def _answer(
    edge: Edge,
    request: GeneratingRequest,
    http: Request,
    prompts: Sequence[str | list[int]],
    request_id: str,
    shape: type[CompletionShape],
) -> Response:
    request.check_outputs(len(prompts), edge.handler.settings.router.http_max_outputs)
    n = request.n or 1
    form = request.form(edge.tool_call_probability)
    messages = request.messages(prompts, request_id, edge.tenant(request.user))
    names = [one._replace(max_model_len=edge.max_model_len) for one in _names(request)]
    details = await _details(edge, request, http, messages, names)
    if details is None or not details.prompts:
        await edge.encode_for_several(http, messages, names, n)
    stop_token_ids = frozenset(request.stop_token_ids or ())
    shown = shape(request_id, request.model or edge.model, n, request.include_usage, details, stop_token_ids, form)
    its_names = [one for one in names for _ in range(n)]
    return edge.answer(
        http, outputs(messages, n, request.seed), shown, stream=request.stream, names=its_names, form=form
    )


def _names(request: GeneratingRequest) -> list[Names]:
    """Return the field names for errors about each of a request's prompts."""
    if not isinstance(request, CompletionRequest):
        return [CHAT]
    if not request.lists_prompts:
        return [COMPLETION]
    return [of_prompt(number) for number in range(len(request.prompts))]


async def _details(
    edge: Edge,
    request: GeneratingRequest,
    http: Request,
    messages: Sequence[router_pb2.GenerateRequest],
    names: Sequence[Names],
) -> Details | None:
    """Return what to show beside the text, or None; if that includes prompts, tokenise them in the messages."""
    echo = isinstance(request, CompletionRequest) and bool(request.echo)
    continuous_usage = request.continuous_usage
    of_prompts = echo or bool(request.return_token_ids) or request.prompt_logprobs is not None or continuous_usage
    if not of_prompts and request.top_logprobs is None:
        return None
    prompts: list[Prompt] = []
    logprobs = edge.handler.logprobs.of_prompt(request.seed or 0)
    if of_prompts:
        texts = [message.text for message in messages]
        await edge.encode_prompts(http, messages, names)
        for text, message in zip(texts, messages, strict=True):
            token_ids = message.token_ids.ids
            if not echo or request.return_token_ids:  # as in vLLM, whoever asks for token ids gets the prompt as those
                prompts.append(Prompt("", token_ids, logprobs))
                continue
            shown = text or edge.handler.detokenize(token_ids)
            cut = message.HasField("truncate_prompt_tokens")
            num_cut = max(0, len(shown) - edge.texts.num_characters(token_ids)) if cut else 0
            prompts.append(Prompt(shown, token_ids, logprobs, num_cut))
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is None and echo:
        prompt_logprobs = request.top_logprobs
    return Details(
        LogprobsJson(edge.texts, as_token_ids=bool(request.return_tokens_as_token_ids)),
        request.n or 1,
        prompts,
        top_logprobs=request.top_logprobs,
        prompt_logprobs=None if request.stream else prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        prompt_token_ids=bool(request.return_token_ids) or (echo and bool(request.stream)),
        echo=echo,
        continuous_usage=continuous_usage,
        output=not (isinstance(request, CompletionRequest) and request.echoes_only),
    )
