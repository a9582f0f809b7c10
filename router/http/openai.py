"""OpenAI's routes, as vLLM answers them."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from pydantic import ValidationError
from starlette.responses import RedirectResponse, Response

from lorrery.router.edges.anthropic.routes import is_anthropics
from lorrery.router.field_names import Names, named
from lorrery.router.http.answer import JsonParts, array_of
from lorrery.router.http.bodies import json_route
from lorrery.router.http.edge import EITHER, Edge
from lorrery.router.http.errors import CHAT, COMPLETION, json_response, of_prompt
from lorrery.router.http.generating import GeneratingRequest, check_room, check_vocabulary, outputs
from lorrery.router.http.openai_requests import ChatBatchRequest, ChatRequest, CompletionRequest
from lorrery.router.http.openai_shapes import ChatShape, CompletionShape, unix_seconds
from lorrery.router.http.token_details import Details, LogprobsJson, Prompt
from lorrery.service.errors import InvalidRequest
from lorrery.v1 import router_pb2

_UNKNOWN = "1970-01-01T00:00:00Z"
"""Release date of every model; by Anthropic's API this value stands for an unknown one."""
_SAGEMAKER_ADAPTER = "x-amzn-sagemaker-adapter-identifier"


def routes(edge: Edge) -> APIRouter:
    """Return OpenAI's routes."""
    router = APIRouter(tags=["OpenAI"], route_class=json_route(edge.admit, edge.bodies))
    began = unix_seconds()

    @router.post("/v1/completions", responses=EITHER)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        """Complete one or more prompts, each text or tokens; as a stream or in one piece."""
        await edge.check_model(http, request.model)
        request.check()
        request_id = f"cmpl-{edge.request_id(http, request.request_id)}"
        names = [COMPLETION]
        if request.lists_prompts:
            names = [of_prompt(number) for number in range(len(request.prompts))]
        prompts = [edge.handler.tokenizer.encode_prompt("") if prompt == "" else prompt for prompt in request.prompts]
        return await _answer(edge, request, http, prompts, names, request_id)

    @router.post("/v1/chat/completions", responses=EITHER)
    async def chat(request: ChatRequest, http: Request) -> Response:
        """Answer a conversation, as a stream or in one piece."""
        return await _chat(edge, request, http, [request.turns])

    @router.post("/v1/chat/completions/batch", responses=EITHER)
    async def chats(request: ChatBatchRequest, http: Request) -> Response:
        """Answer several conversations in one piece, a choice for each."""
        return await _chat(edge, request, http, request.conversations)

    @router.post("/invocations", responses=EITHER)
    async def invocations(body: Annotated[object, Body()], http: Request) -> Response:
        """Answer a chat or a completion, as SageMaker asks for it: its adapter stands in a header."""
        if isinstance(body, dict):
            body = {**body, "model": http.headers.get(_SAGEMAKER_ADAPTER)}
        with suppress(ValidationError):
            return await chat(ChatRequest.model_validate(body), http)
        with suppress(ValidationError):
            return await completions(CompletionRequest.model_validate(body), http)
        raise InvalidRequest("the body is neither a chat nor a completion; give messages or a prompt")

    @router.get("/v1/models")
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

    @router.get("/v1/models/", include_in_schema=False)
    async def models_with_slash(http: Request) -> Response:
        """Redirect, as other routes do; the next one would take it for a model without a name."""
        return RedirectResponse(http.url.replace(path=http.url.path.rstrip("/")))

    @router.get("/v1/models/{name:path}")
    async def model(name: str, http: Request) -> Response:
        """Show the base model or an adapter."""
        found = await edge.handler.find_adapter(edge.caller(http), name)
        if name not in edge.models and found is None:
            with named(COMPLETION):
                raise edge.handler.unknown_model(name)
        shown = base_card(name) if name in edge.models else adapter_card(name)
        return json_response(as_anthropic_shows(shown) if is_anthropics(http.scope) else shown)

    permission = {
        "object": "model_permission",
        "created": began,
        **dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking"), False),
        **dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True),
        "organization": "*",
        "group": None,
    }

    def card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": began,
            "owned_by": "lorrery",
            "root": root,
            "parent": parent,
            "max_model_len": max_model_len,
            "permission": [{"id": f"modelperm-{name}", **permission}],
        }

    def base_card(name: str) -> dict[str, Any]:
        return card(
            name, edge.handler.settings.router.model_root or edge.handler.settings.model, None, edge.max_model_len
        )

    def adapter_card(name: str) -> dict[str, Any]:
        return card(name, edge.handler.adapter_path(name) or name, edge.model, None)

    def as_anthropic_shows(shown: dict[str, Any]) -> dict[str, Any]:
        theirs = {"type": "model", "display_name": shown["id"], "created_at": _UNKNOWN, "lifecycle": "active"}
        return {**shown, **theirs}

    return router


async def _chat(
    edge: Edge, request: ChatRequest, http: Request, conversations: Sequence[Sequence[dict[str, Any]]]
) -> Response:
    await edge.check_model(http, request.model)
    request.check()
    edge.check_tool_choice(request.tool_choice)
    prompts = []
    for turns in conversations:
        with named(CHAT._replace(max_model_len=edge.max_model_len)):
            prompts.append(
                await edge.handler.encode_chat(
                    turns,
                    lambda: edge.caller(http),
                    add_generation_prompt=request.add_generation_prompt,
                    continue_final_message=request.continue_final_message,
                    add_special_tokens=request.add_special_tokens,
                    variables=request.variables(excludes_tools=edge.excludes_tools),
                )
            )
    request_id = f"chatcmpl-{edge.request_id(http, request.request_id)}"
    return await _answer(edge, request, http, prompts, [CHAT] * len(prompts), request_id)


async def _answer(
    edge: Edge,
    request: CompletionRequest | ChatRequest,
    http: Request,
    prompts: Sequence[str | list[int]],
    names: Sequence[Names],
    request_id: str,
) -> Response:
    request.check_outputs(len(prompts), edge.handler.settings.router.http_max_outputs)
    check_vocabulary(request, prompts, edge.handler.tokenizer.vocab_size)
    check_room(request, edge.max_model_len)
    n = request.n or 1
    form = edge.counting(request.form(edge.tool_call_probability), "chat_completions", stream=request.stream)
    messages = request.messages(prompts, request_id, edge.tenant(request.user))
    names = [one._replace(max_model_len=edge.max_model_len) for one in names]
    details = await _details(edge, request, http, messages, names)
    if details is None or not details.prompts:
        await edge.encode_for_several(http, messages, names, n)
    stop_token_ids = frozenset(request.stop_token_ids or ())
    common = (request_id, request.model or edge.model, n, request.include_usage, details, stop_token_ids)
    shown: CompletionShape
    if isinstance(request, ChatRequest):
        prompt = prompts[0]
        prompt_text = None
        if request.return_prompt_text and not isinstance(prompt, str):
            prompt_text = edge.handler.tokenizer.decode(prompt)
        in_batch = isinstance(request, ChatBatchRequest)
        shown = ChatShape(
            *common,
            form,
            role=request.role,
            echo=request.echoed,
            prompt_text=prompt_text,
            block_size=None if in_batch else edge.cached_block_size,
        )
    else:
        shown = CompletionShape(*common)
    its_names = [one for one in names for _ in range(n)]
    stream = request.stream and not isinstance(request, ChatBatchRequest)
    return edge.answer(http, outputs(messages, n, request.seed), shown, stream=stream, names=its_names, form=form)


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
    of_prompts = echo or bool(request.return_token_ids) or request.shown_prompt_logprobs is not None or continuous_usage
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
            shown = text or edge.handler.tokenizer.decode(token_ids)
            cut = message.HasField("truncate_prompt_tokens")
            num_cut = max(0, len(shown) - edge.texts.num_characters(token_ids)) if cut else 0
            prompts.append(Prompt(shown, token_ids, logprobs, num_cut))
    return Details(
        LogprobsJson(edge.texts, as_token_ids=bool(request.return_tokens_as_token_ids)),
        request.n or 1,
        prompts,
        top_logprobs=request.top_logprobs,
        prompt_logprobs=None if request.stream else request.shown_prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        prompt_token_ids=bool(request.return_token_ids) or (echo and bool(request.stream)),
        echo=echo,
        continuous_usage=continuous_usage,
        output=not (isinstance(request, CompletionRequest) and request.echoes_only),
    )
