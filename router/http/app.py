"""The routes: each reads a body, and makes requests of it as a gRPC client would send them.

It names the shape of the answer, too; everything else is the handler's, as for gRPC.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import grpc.aio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from lorrery.chassis.errors import InvalidRequest, RequestError
from lorrery.chassis.version import VERSION
from lorrery.router.generate import Call
from lorrery.router.handler import Handler
from lorrery.router.http.answer import Answer, Shape
from lorrery.router.http.errors import HTTP_STATUS, body, error_response, json_response
from lorrery.router.http.openai import (
    MAX_CHOICES,
    ChatRequest,
    ChatShape,
    CompletionRequest,
    CompletionShape,
    new_id,
    unix_seconds,
)
from lorrery.router.http.slora import SloraRequest, SloraShape
from lorrery.router.http.vllm import DetokenizeRequest, LoadLora, TokenizeRequest, UnloadLora
from lorrery.v1 import router_pb2, types_pb2

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {}}}
    for status, text in (
        (400, "A bad value, or a request that can never fit."),
        (401, "No valid API key."),
        (403, "This key may not do that."),
        (404, "No such model or adapter."),
        (409, "The name stands for something else."),
        (413, "The body is too long."),
        (429, "A queue or quota is full; see retry-after."),
        (500, "Our fault; the router's log has more."),
        (503, "No worker or scheduler, or draining; see retry-after."),
        (504, "A scheduler did not answer in time."),
    )
}

_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
_EITHER: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}, "application/json": {}}}}


def make_app(handler: Handler, registry: CollectorRegistry) -> FastAPI:
    """Return the ASGI application of a router's HTTP edge.

    Args:
        handler: answers.
        registry: what `/metrics` shows.
    """
    model = handler.settings.model
    began = unix_seconds()
    app = FastAPI(title="Lorrery", version=VERSION, responses=_ERRORS, redoc_url=None)

    def split_model(named: str | None) -> str:
        """Return the adapter that a client names as its model; empty: the base model."""
        return "" if named in (None, "", model) else str(named)

    def answer(
        http: Request, requests: Sequence[router_pb2.GenerateRequest], shape: Shape, *, stream: bool | None
    ) -> Response:
        authorization = http.headers.get("authorization", "")

        async def generate(request: router_pb2.GenerateRequest, call: Call) -> None:
            await handler.generate(request, lambda: handler.caller(authorization), call)

        return Answer(requests, generate, shape, stream=bool(stream), fault_rules=http.headers.getlist("lorrery-fault"))

    def tenant(user: str | None) -> str:
        return "" if user is None or handler.counts_keys else user

    # --- S-LoRA -----------------------------------------------------------------------------------------------------

    def slora(request: SloraRequest, http: Request, *, stream: bool) -> Response:
        message = router_pb2.GenerateRequest(
            text=request.inputs,
            adapter_id=split_model(request.lora_dir),
            request_id=request.req_id or "",
            sampling=request.parameters.sampling(),
        )
        return answer(http, [message], SloraShape(), stream=stream)

    @app.post("/generate_stream", tags=["S-LoRA"], response_class=Response, responses=_STREAM)
    async def generate_stream(request: SloraRequest, http: Request) -> Response:
        """Stream the output of one prompt, a token an event."""
        return slora(request, http, stream=True)

    @app.post("/generate", tags=["S-LoRA"])
    async def generate(request: SloraRequest, http: Request) -> Response:
        """Return the output of one prompt in one piece."""
        return slora(request, http, stream=False)

    # --- OpenAI -----------------------------------------------------------------------------------------------------

    @app.post("/v1/completions", tags=["OpenAI"], responses=_EITHER)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        """Complete one or more prompts, each text or tokens; as a stream or in one piece."""
        request_id = new_id("cmpl", http.headers.get("x-request-id"))
        sampling = request.sampling(request.max_tokens)
        messages = []
        prompts, n = request.prompts(), request.n or 1
        if len(prompts) * n > MAX_CHOICES:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n = {n} are {len(prompts) * n} outputs; at most {MAX_CHOICES}; send less",
                field="n",
                value=n,
                limit=MAX_CHOICES,
            )
        for number, prompt in enumerate(prompt for prompt in prompts for _ in range(n)):
            message = router_pb2.GenerateRequest(
                adapter_id=split_model(request.model),
                tenant_id=tenant(request.user),
                request_id=f"{request_id}-{number}" if number else request_id,
                sampling=sampling,
            )
            if isinstance(prompt, str):
                message.text = prompt
            else:
                message.token_ids.ids.extend(prompt)
            if request.seed is not None:
                message.seed = (request.seed + number) % 2**64
            messages.append(message)
        if not messages:
            raise InvalidRequest("prompt is empty; give text or tokens", field="prompt")
        shape = CompletionShape(request_id, request.model or model, request.options(), request.n or 1)
        return answer(http, messages, shape, stream=request.stream)

    @app.post("/v1/chat/completions", tags=["OpenAI"], responses=_EITHER)
    async def chat(request: ChatRequest, http: Request) -> Response:
        """Answer a conversation, as a stream or in one piece."""
        request_id = new_id("chatcmpl", http.headers.get("x-request-id"))
        sampling = request.sampling(request.max_completion_tokens or request.max_tokens)
        messages = []
        for number in range(request.n or 1):
            message = router_pb2.GenerateRequest(
                text=request.prompt(),
                adapter_id=split_model(request.model),
                tenant_id=tenant(request.user),
                request_id=f"{request_id}-{number}" if number else request_id,
                sampling=sampling,
            )
            if request.seed is not None:
                message.seed = (request.seed + number) % 2**64
            messages.append(message)
        shape = ChatShape(request_id, request.model or model, request.options(), request.n or 1)
        return answer(http, messages, shape, stream=request.stream)

    @app.get("/v1/models", tags=["OpenAI"])
    async def models(http: Request) -> Response:
        """List the base model, then the adapters."""
        caller = handler.caller(http.headers.get("authorization", ""))
        known = await handler.list_adapters(caller)
        card = {"object": "model", "created": began, "owned_by": "lorrery"}
        base = {
            **card,
            "id": model,
            "root": model,
            "parent": None,
            "max_model_len": handler.settings.scheduler.max_req_total_len,
        }
        adapters = [
            {**card, "id": adapter.adapter_id, "root": adapter.adapter_id, "parent": model}
            for adapter in known.adapters
        ]
        return json_response({"object": "list", "data": [base, *adapters]})

    # --- vLLM -------------------------------------------------------------------------------------------------------

    @app.post("/v1/load_lora_adapter", tags=["vLLM"], response_class=PlainTextResponse)
    async def load_lora_adapter(request: LoadLora, http: Request) -> Response:
        """Make an adapter known; its rank is given, or stands in the adapter_config.json of its path."""
        caller = handler.caller(http.headers.get("authorization", ""))
        adapter = types_pb2.Adapter(adapter_id=request.lora_name, rank=request.known_rank())
        await handler.load_adapter(caller, adapter)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", tags=["vLLM"], response_class=PlainTextResponse)
    async def unload_lora_adapter(request: UnloadLora, http: Request) -> Response:
        """Make an adapter unknown to new requests."""
        caller = handler.caller(http.headers.get("authorization", ""))
        await handler.unload_adapter(caller, request.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    @app.post("/tokenize", tags=["vLLM"])
    async def tokenize(request: TokenizeRequest, http: Request) -> Response:
        """Return the tokens of a text."""
        handler.caller(http.headers.get("authorization", ""))
        tokens = await handler.tokenize(request.prompt)
        max_model_len = handler.settings.scheduler.max_req_total_len
        return json_response({"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens})

    @app.post("/detokenize", tags=["vLLM"])
    async def detokenize(request: DetokenizeRequest, http: Request) -> Response:
        """Return the text of tokens."""
        handler.caller(http.headers.get("authorization", ""))
        return json_response({"prompt": handler.detokenize(request.tokens)})

    # --- the process ------------------------------------------------------------------------------------------------

    @app.get("/health", tags=["process"], response_class=Response)
    async def health() -> Response:
        """Answer 200 while requests can be served, else 503."""
        return Response(status_code=200 if handler.is_ready else 503)

    @app.get("/version", tags=["process"])
    async def version() -> dict[str, str]:
        """Return the version of Lorrery."""
        return {"version": VERSION}

    @app.api_route("/metrics", methods=["GET", "HEAD"], tags=["process"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Show the router's metrics, as Prometheus reads them."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    # --- errors -----------------------------------------------------------------------------------------------------

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(grpc.aio.AioRpcError)
    async def scheduler_refused(_: Request, error: grpc.aio.AioRpcError) -> Response:
        status = HTTP_STATUS.get(error.code(), HTTPStatus.INTERNAL_SERVER_ERROR)
        return json_response(body(status, error.details() or "", error.code().name.lower()), status)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or "body"
        text = f"{field}: {first['msg']}"
        return json_response(body(HTTPStatus.BAD_REQUEST, text, "invalid_value", field), HTTPStatus.BAD_REQUEST)

    @app.exception_handler(HTTPException)
    async def no_route(_: Request, error: HTTPException) -> Response:
        status = HTTPStatus(error.status_code)
        return json_response(body(status, str(error.detail), status.name.lower()), status, dict(error.headers or {}))

    return app
