"""vLLM's routes beside OpenAI's: adapters at run time, and the tokenizer."""

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from lorrery.chassis.errors import InvalidRequest
from lorrery.router.http.edge import Edge
from lorrery.router.http.errors import json_response
from lorrery.router.http.openai import ChatMessage, Tokens, turns
from lorrery.router.peft import rank_in
from lorrery.v1 import types_pb2


class LoadLora(BaseModel):
    """The body of `/v1/load_lora_adapter`; vLLM's, and the rank beside it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    lora_name: str
    lora_path: str | None = None
    rank: Annotated[int, Field(ge=0, lt=2**32)] | None = None

    def known_rank(self) -> int:
        """Return the rank: as it is given, or as a PEFT folder on the router's machine has it.

        Raises:
            InvalidRequest: it is told by neither.
        """
        if self.rank is not None:
            return self.rank
        rank = None if self.lora_path is None else rank_in(self.lora_path)
        if rank is None:
            raise InvalidRequest(
                "the adapter's rank is not known; give rank, or a lora_path whose adapter_config.json has r",
                field="rank",
            )
        return rank


class UnloadLora(BaseModel):
    """The body of `/v1/unload_lora_adapter`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    lora_name: str


class TokenizeRequest(BaseModel):
    """The body of `/tokenize`: a prompt, or a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(default=None, description="of a prompt; unset: yes")
    add_generation_prompt: bool | None = Field(default=None, description="of a conversation; unset: yes")
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """The body of `/detokenize`."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    model: str | None = None
    tokens: Tokens


def routes(edge: Edge) -> APIRouter:
    """Return vLLM's routes."""
    router, handler = APIRouter(tags=["vLLM"]), edge.handler

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(request: LoadLora, http: Request) -> Response:
        """Make an adapter known; its rank is given, or stands in the adapter_config.json of its path."""
        caller = edge.caller(http)
        await handler.load_adapter(caller, types_pb2.Adapter(adapter_id=request.lora_name, rank=request.known_rank()))
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(request: UnloadLora, http: Request) -> Response:
        """Make an adapter unknown to new requests."""
        await handler.unload_adapter(edge.caller(http), request.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    @router.post("/tokenize")
    async def tokenize(request: TokenizeRequest, http: Request) -> Response:
        """Return the tokens of a text, or of a conversation."""
        caller = edge.caller(http)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("prompt or messages must be given, and not both", field="prompt")
        if request.prompt is not None:
            tokens = await handler.tokenize(request.prompt, special_tokens=request.add_special_tokens is not False)
        else:
            tokens = await handler.encode_chat(
                turns(request.messages or ()),
                lambda: caller,
                add_generation_prompt=request.add_generation_prompt is not False,
            )
        names = [handler.tokenizer.name(token_id) for token_id in tokens] if request.return_token_strs else None
        content = {"count": len(tokens), "max_model_len": edge.max_model_len, "tokens": tokens, "token_strs": names}
        return json_response(content)

    @router.post("/detokenize")
    async def detokenize(request: DetokenizeRequest, http: Request) -> Response:
        """Return the text of tokens."""
        edge.caller(http)
        return json_response({"prompt": handler.detokenize(request.tokens)})

    return router
