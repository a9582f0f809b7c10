"""OpenAI's routes and requests, as vLLM understands them.

Fields that are unknown here, and those that are null, are passed over; one that would change the output and cannot be
honoured is refused.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from lorrery.chassis.errors import InvalidRequest
from lorrery.router.http.edge import Edge
from lorrery.router.http.errors import json_response
from lorrery.router.http.openai_shapes import ChatShape, CompletionShape, unix_seconds
from lorrery.v1 import router_pb2, types_pb2

MAX_CHOICES = 128
"""Most outputs of one HTTP request, over all its prompts."""

Tokens = list[Annotated[int, Field(ge=0, le=0xFFFFFFFF)]]

EITHER: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}, "application/json": {}}}}


class StreamOptions(BaseModel):
    """What a stream tells beside its output."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


class _Request(BaseModel):
    """The fields that all of OpenAI's generating routes have."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = Field(default=None, description="the base model, or an adapter; unset: the base model")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(default=None, description="0 and -1: all tokens")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    user: str | None = Field(default=None, description="the tenant, where no API keys are asked for")

    unsupported: ClassVar[tuple[str, ...]] = ()
    """Fields that would change the output in a way that is not to be had."""

    @property
    def include_usage(self) -> bool:
        """Whether its stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def outputs(
        self, prompts: Sequence[str | list[int]], max_tokens: int | None, request_id: str, adapter_id: str, tenant: str
    ) -> list[router_pb2.GenerateRequest]:
        """Return a message for each output, those of the first prompt first.

        Raises:
            InvalidRequest: it asks for what is not to be had.
        """
        n = self.n or 1
        if not prompts:
            raise InvalidRequest("prompt is empty; give text or tokens", field="prompt")
        if len(prompts) * n > MAX_CHOICES:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n = {n} are {len(prompts) * n} outputs; at most {MAX_CHOICES}; send less",
                field="n",
                value=n,
                limit=MAX_CHOICES,
            )
        sampling = self._sampling(max_tokens)
        messages: list[router_pb2.GenerateRequest] = []
        for prompt in prompts:
            for _ in range(n):
                number = len(messages)
                message = router_pb2.GenerateRequest(
                    adapter_id=adapter_id,
                    tenant_id=tenant,
                    request_id=f"{request_id}-{number}" if number else request_id,
                    sampling=sampling,
                )
                if isinstance(prompt, str):
                    message.text = prompt
                else:
                    message.token_ids.ids.extend(prompt)
                if self.seed is not None:
                    message.seed = (self.seed + number) % 2**64
                messages.append(message)
        return messages

    def _sampling(self, max_tokens: int | None) -> types_pb2.SamplingParams:
        """Return what it asks of the sampler.

        Raises:
            InvalidRequest: it asks for what is not to be had.
        """
        for name in self.unsupported:
            if value := getattr(self, name):
                raise InvalidRequest(f"{name} is not to be had here; leave it out", field=name, value=value)
        sampling = types_pb2.SamplingParams(do_sample=self.temperature is None or self.temperature > 0)
        if max_tokens is not None:
            sampling.max_new_tokens = max_tokens
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "ignore_eos"):
            value = getattr(self, name)
            if value is not None and not (name == "temperature" and value == 0):
                setattr(sampling, name, value)
        if self.top_k:
            sampling.top_k = self.top_k
        if self.stop:
            sampling.stop_sequences.extend([self.stop] if isinstance(self.stop, str) else self.stop)
        if self.min_tokens:
            if self.min_tokens != max_tokens:
                raise InvalidRequest(
                    f"min_tokens is {self.min_tokens}; it must be 0 or max_tokens, which is {max_tokens}",
                    field="min_tokens",
                    value=self.min_tokens,
                    limit=max_tokens,
                )
            sampling.ignore_eos = True
        return sampling


class CompletionRequest(_Request):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | Tokens | list[Tokens]
    max_tokens: Annotated[int, Field(ge=1, le=0x7FFFFFFF)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None

    unsupported: ClassVar[tuple[str, ...]] = ("echo", "suffix", "logprobs")

    def prompts(self) -> Sequence[str | list[int]]:
        """Return its prompts, each as text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: Any = self.prompt
        return [prompts] if prompts and isinstance(prompts[0], int) else prompts


class ContentPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: str
    content: str | list[ContentPart] | None = None

    def text(self) -> str:
        """Return what is said."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(_Request):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=0x7FFFFFFF)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=0x7FFFFFFF)] | None = None
    logprobs: bool | None = None

    unsupported: ClassVar[tuple[str, ...]] = ("logprobs",)

    def turns(self) -> list[dict[str, Any]]:
        """Return the conversation as chat templates read it."""
        return turns(self.messages)


def turns(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return a conversation as chat templates read it."""
    return [{"role": message.role, "content": message.text()} for message in messages]


def routes(edge: Edge) -> APIRouter:
    """Return OpenAI's routes."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    began = unix_seconds()

    @router.post("/completions", responses=EITHER)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        """Complete one or more prompts, each text or tokens; as a stream or in one piece."""
        request_id = _new_id("cmpl", http)
        adapter_id, tenant = edge.adapter_of(request.model), edge.tenant(request.user)
        messages = request.outputs(request.prompts(), request.max_tokens, request_id, adapter_id, tenant)
        shape = CompletionShape(request_id, request.model or edge.model, request.n or 1, request.include_usage)
        return edge.answer(http, messages, shape, stream=request.stream)

    @router.post("/chat/completions", responses=EITHER)
    async def chat(request: ChatRequest, http: Request) -> Response:
        """Answer a conversation, as a stream or in one piece."""
        request_id = _new_id("chatcmpl", http)
        adapter_id, tenant = edge.adapter_of(request.model), edge.tenant(request.user)
        max_tokens = request.max_completion_tokens or request.max_tokens
        prompt = await edge.handler.encode_chat(request.turns(), lambda: edge.caller(http))
        messages = request.outputs([prompt], max_tokens, request_id, adapter_id, tenant)
        shape = ChatShape(request_id, request.model or edge.model, request.n or 1, request.include_usage)
        return edge.answer(http, messages, shape, stream=request.stream)

    @router.get("/models")
    async def models(http: Request) -> Response:
        """List the base model, then the adapters."""
        known = await edge.handler.list_adapters(edge.caller(http))
        card = {"object": "model", "created": began, "owned_by": "lorrery"}
        length = {"max_model_len": edge.max_model_len}
        cards = [{**card, "id": name, "root": name, "parent": None, **length} for name in edge.models]
        adapters = (adapter.adapter_id for adapter in known.adapters)
        cards += [{**card, "id": name, "root": name, "parent": edge.model} for name in adapters]
        return json_response({"object": "list", "data": cards})

    return router


def _new_id(prefix: str, http: Request) -> str:
    """Return the id of an answer, with what the client calls its request, if it does."""
    return f"{prefix}-{http.headers.get('x-request-id') or uuid4().hex}"
