"""vLLM's routes beside OpenAI's: adapters at run time, and the tokenizer."""

import asyncio
import json
import re
from http import HTTPStatus
from itertools import chain
from typing import Annotated, Any

import grpc
import grpc.aio
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from lorrery.router.access import ApiKey, check_load
from lorrery.router.field_names import named
from lorrery.router.http.answer import JsonParts, array_of
from lorrery.router.http.bodies import json_route
from lorrery.router.http.edge import Edge
from lorrery.router.http.errors import LORA, body, json_response
from lorrery.router.http.generating import LENIENT, Options
from lorrery.router.http.openai_requests import ChatMessage, Tool, template_variables, turns
from lorrery.router.peft import BrokenAdapterError
from lorrery.service.errors import InvalidRequest, RankOverLimit, Reason, RequestError, UnknownName
from lorrery.service.names import cut, quoted
from lorrery.service.network.status import reason_of
from lorrery.v1 import scheduler_pb2, types_pb2

_MAX_PATH_CHARACTERS = 4096
"""Linux's PATH_MAX."""
_BOTH = "Both 'lora_name' and 'lora_path' must be provided."
_KNOWN = (
    "The lora adapter {} has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."
)
_MAX_QUEUE_SIZE = 100_000
"""Default of vLLM's `max_queue_size`; here a batch is sent at once."""
_INVALID, _NOT_FOUND = "InvalidUserInput", "NotFoundError"
_PATHS = (
    re.compile(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+"),
    re.compile(r"(?:/[\w\-]+)+/[\w\-]+\.\w+"),
)
"""Paths that vLLM takes out of messages (entrypoints/serve/exception_handling/utils.py)."""


class LoadLora(BaseModel):
    """The body of `/v1/load_lora_adapter`; vLLM's, and the rank beside it."""

    model_config = LENIENT

    lora_name: str
    lora_path: Annotated[str, Field(max_length=_MAX_PATH_CHARACTERS)] = Field(
        description="a PEFT folder on the router's machine; unset only with a rank"
    )
    rank: Annotated[int, Field(ge=0, lt=2**32)] | None = Field(default=None, description="unset: as the folder has it")
    load_inplace: bool = Field(default=False, description="take the place of one of this name")

    @model_validator(mode="before")
    @classmethod
    def _without_folder(cls, given: object) -> object:
        return {"lora_path": "", **given} if isinstance(given, dict) and given.get("rank") is not None else given


class UnloadLora(BaseModel):
    """The body of `/v1/unload_lora_adapter`."""

    model_config = LENIENT

    lora_name: str


class Adapter(BaseModel):
    """The body of `POST /adapters`."""

    model_config = LENIENT

    name: str | None = None
    src: Annotated[str, Field(max_length=_MAX_PATH_CHARACTERS)] | None = Field(
        default=None, description="a PEFT folder on the router's machine"
    )
    load_inplace: bool | None = Field(default=None, description="take the place of one of this name")


class TokenizeRequest(BaseModel):
    """The body of `/tokenize`: a conversation, or a prompt. Of both, the conversation counts unless it is empty."""

    model_config = LENIENT

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    add_special_tokens: bool = Field(
        default=False, description="unset: of a prompt, and not of a conversation, whose template brings its own"
    )
    return_token_strs: bool | None = Field(default=None, description="whether to show how each is spelt")
    add_generation_prompt: bool = Field(default=True, description="of a conversation")
    continue_final_message: bool = Field(default=False, description="of a conversation; instead of that")
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="for the chat template")
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(
        default=None, description="for the chat template"
    )
    mm_processor_kwargs: dict[str, Any] | None = Field(default=None, description="without effect")
    media_io_kwargs: Options | None = Field(default=None, description="without effect")

    @model_validator(mode="before")
    @classmethod
    def _without_what_does_not_count(cls, given: object) -> object:
        if isinstance(given, dict) and isinstance(given.get("prompt"), str):
            messages = given.get("messages")
            if not (isinstance(messages, list) and messages):
                return {name: value for name, value in given.items() if name != "messages"}
        return given


class DetokenizeRequest(BaseModel):
    """The body of `/detokenize`."""

    model_config = LENIENT

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(fail_fast=True)]


def routes(edge: Edge) -> APIRouter:
    """Return vLLM's routes."""
    router, handler = APIRouter(tags=["vLLM"], route_class=json_route(edge.admit, edge.bodies)), edge.handler
    router_settings = handler.settings.router

    @router.post("/v1/load_lora_adapter", response_class=Response)
    async def load_lora_adapter(request: LoadLora, http: Request) -> Response:
        """Load an adapter; its rank stands in the adapter_config.json of its path, or is given."""
        caller = edge.caller(http)
        name = request.lora_name
        try:
            if not name or not (request.lora_path or (request.rank is not None and router_settings.mock_adapters)):
                raise InvalidRequest(_BOTH)
            if name in handler.settings.model_names:
                raise InvalidRequest(f"The lora adapter '{name}' conflicts with a served base model.")
            with named(LORA):
                check_load(caller, name)
            if not request.load_inplace and await handler.find_adapter(caller, name) is not None:
                raise InvalidRequest(_KNOWN.format(quoted(name)))
            return await load(caller, request)
        except (RequestError, grpc.aio.AioRpcError) as error:
            response = _as_vllm(error, request)
            if response is None:
                raise
            return response

    async def load(caller: ApiKey, request: LoadLora) -> Response:
        name, path = request.lora_name, request.lora_path
        with named(LORA):
            rank = await handler.adapter_rank(caller, name, path, request.rank)
        in_place = request.load_inplace
        when_known = scheduler_pb2.WHEN_KNOWN_REPLACE if in_place else scheduler_pb2.WHEN_KNOWN_REFUSE
        try:
            with named(LORA):
                await handler.load_adapter(caller, types_pb2.Adapter(adapter_id=name, rank=rank), when_known, path)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.ALREADY_EXISTS:
                raise
            raise InvalidRequest(_KNOWN.format(quoted(name)), Reason.ADAPTER_EXISTS) from None
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=Response)
    async def unload_lora_adapter(request: UnloadLora, http: Request) -> Response:
        """Make an adapter unknown to new requests."""
        name = request.lora_name
        return await unload(edge.caller(http), name, f"Success: LoRA adapter '{name}' removed successfully.")

    async def unload(caller: ApiKey, name: str, success: str) -> Response:
        if not name:
            message = "'lora_name' needs to be provided to unload a LoRA adapter."
            return _vllm_error(HTTPStatus.BAD_REQUEST, _INVALID, message)
        try:
            if name in handler.settings.model_names:
                raise UnknownName(name)
            with named(LORA):
                await handler.unload_adapter(caller, name)
        except UnknownName:
            return _vllm_error(HTTPStatus.NOT_FOUND, _NOT_FOUND, f"The lora adapter {quoted(name)} cannot be found.")
        return Response(success)

    @router.post("/adapters", response_class=Response)
    async def add_adapter(request: Adapter, http: Request) -> Response:
        """Load an adapter, as SageMaker does: `/v1/load_lora_adapter` in other words."""
        if not request.name or not request.src:
            raise RequestValidationError([f"{'src' if request.name else 'name'} is missing or empty; give one"])
        own = LoadLora(lora_name=request.name, lora_path=request.src, load_inplace=bool(request.load_inplace))
        response = await load_lora_adapter(own, http)
        if response.status_code != HTTPStatus.OK:
            return response
        return Response(f"Adapter {request.name} registered")

    @router.delete("/adapters/{name:path}", response_class=Response)
    async def remove_adapter(name: str, http: Request) -> Response:
        """Unload an adapter, as SageMaker does."""
        return await unload(edge.caller(http), name, f"Adapter {name} unregistered")

    @router.post("/tokenize")
    async def tokenize(request: TokenizeRequest, http: Request) -> Response:
        """Return the tokens of a text, or of a conversation."""
        caller = edge.caller(http)
        await edge.check_model(http, request.model)
        if request.messages is not None:
            tokens = await handler.encode_chat(
                turns(request.messages, to_be_continued=request.continue_final_message),
                lambda: caller,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                add_special_tokens=request.add_special_tokens,
                only_count=True,
                variables=template_variables(
                    request.chat_template,
                    request.chat_template_kwargs,
                    tools=[tool.model_dump(exclude_none=True) for tool in request.tools or ()],
                ),
            )
        elif request.prompt is not None:
            given = "add_special_tokens" in request.model_fields_set
            framed = request.add_special_tokens if given else True
            tokens = await handler.tokenize(request.prompt, add_special_tokens=framed)
        else:
            raise InvalidRequest("neither prompt nor messages is given; give one", field="prompt")
        await handler.count(caller, request.model, len(tokens))
        names = map(handler.tokenizer.name, tokens)
        head = json.dumps({"count": len(tokens), "max_model_len": edge.max_model_len})[:-1]
        parts = (
            (f'{head}, "tokens": ',),
            array_of(tokens),
            (', "token_strs": ',),
            array_of(names) if request.return_token_strs else ("null",),
            ("}",),
        )
        return JsonParts(chain(*parts), edge.turns)

    @router.post("/detokenize")
    async def detokenize(request: DetokenizeRequest, http: Request) -> Response:
        """Return the text of tokens."""
        caller = edge.caller(http)
        await edge.check_model(http, request.model)
        if (largest := max(request.tokens, default=0)) >= 2**32:
            raise InvalidRequest(
                f"tokens has {cut(str(largest))}; a token id has 32 bits",
                field="tokens",
                value=largest,
                limit=2**32 - 1,
            )
        await handler.count(caller, request.model, len(request.tokens))
        return json_response({"prompt": await asyncio.to_thread(handler.tokenizer.decode, request.tokens)})

    @router.get("/kv_event_sources")
    async def kv_event_sources(http: Request) -> Response:
        """List where workers publish KV events, by number as vLLM's data parallel ranks."""
        shards = (await handler.cluster_status(edge.caller(http))).shards
        workers = [worker for shard in shards for worker in shard.workers if worker.HasField("kv_events")]
        given = handler.settings.worker.kv_events
        return json_response(
            {
                str(rank): {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": _as_given(worker.kv_events.endpoint, given.endpoint),
                    "replay_endpoint": _as_given(worker.kv_events.replay_endpoint, given.replay_endpoint) or None,
                    "buffer_steps": worker.kv_events.buffer_steps,
                    "hwm": worker.kv_events.hwm,
                    "max_queue_size": _MAX_QUEUE_SIZE,
                    "topic": worker.kv_events.topic,
                }
                for rank, worker in enumerate(workers)
            }
        )

    return router


def _as_given(endpoint: str, setting: str | None) -> str:
    """Return an address as vLLM shows it: a wildcard with the port that was asked for, as the wildcard."""
    host, _, port = (setting or "").rpartition(":")
    return f"{host}:{endpoint.rpartition(':')[2]}" if host == "tcp://*" and port != "0" else endpoint


def _as_vllm(error: RequestError | grpc.aio.AioRpcError, request: LoadLora) -> Response | None:
    """Return vLLM's response to a load that failed: 500 if its worker refuses what the client gave; None: as ever."""
    status, kind, message = HTTPStatus.BAD_REQUEST, _INVALID, str(error)
    if isinstance(error, UnknownName):
        status, kind = HTTPStatus.NOT_FOUND, _NOT_FOUND
        message = f"Loading lora {request.lora_name} failed: No adapter found for {request.lora_path}"
    elif request.rank is not None and isinstance(error, RankOverLimit):
        pass  # vLLM has no such field
    elif (theirs := _words_of_worker(error)) is not None:
        status, kind = HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
        message = f"Call to add_lora method failed: Worker failed with error '{theirs}', please check the stack trace"
        message += " above for the root cause"
    elif not isinstance(error, InvalidRequest):
        return None
    return _vllm_error(status, kind, message)


def _vllm_error(status: HTTPStatus, kind: str, message: str) -> Response:
    for path in _PATHS:
        message = path.sub("<path>", message)
    return json_response(body(status, message, None, kind), status)


def _words_of_worker(error: RequestError | grpc.aio.AioRpcError) -> str | None:
    """Return how vLLM's worker refuses a load; None: another part does."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() if reason_of(error) == Reason.ADAPTER_LOAD else None
    if isinstance(error, RankOverLimit):
        return f"LoRA rank {error.facts['value']} is greater than max_lora_rank {error.facts['limit']}."
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, BrokenAdapterError):  # it may have been renamed
        cause = cause.__cause__
    return None if cause is None else cause.theirs
