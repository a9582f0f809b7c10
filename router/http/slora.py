"""S-LoRA's routes, as its benchmark reads them (S-LoRA, slora/server/api_server.py, commit c1ddf48).

Events are `data:` without a blank, in Python's own JSON spacing; the last one has `finished`.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from lorrery.chassis.errors import RequestError
from lorrery.router.http.answer import Collected
from lorrery.router.http.edge import Edge
from lorrery.router.http.errors import error_body
from lorrery.v1 import router_pb2, types_pb2

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class SloraParameters(BaseModel):
    """The nine sampling parameters; limits and defaults are S-LoRA's, checked where gRPC's are."""

    model_config = ConfigDict(extra="ignore", strict=True)

    do_sample: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    ignore_eos: bool | None = None
    max_new_tokens: Int32 | None = None
    stop_sequences: str | list[str] | None = None

    def sampling(self) -> types_pb2.SamplingParams:
        """Return them as a message."""
        given = {name: value for name, value in self.model_dump().items() if value is not None}
        stop = given.pop("stop_sequences", None)
        sampling = types_pb2.SamplingParams(**given)
        if stop is not None:
            sampling.stop_sequences.extend([stop] if isinstance(stop, str) else stop)
        return sampling


class SloraRequest(BaseModel):
    """The body of `/generate` and `/generate_stream`."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    inputs: str
    parameters: SloraParameters = SloraParameters()
    model_dir: str | None = Field(default=None, description="the base model; any name is taken, as S-LoRA does")
    lora_dir: str | None = Field(default=None, description="the adapter; null: the base model")
    req_id: str | None = None


class SloraShape:
    """How S-LoRA answers."""

    def event(self, index: int, message: router_pb2.GenerateResponse) -> bytes:
        """See `Shape`."""
        token_ids = message.token_ids
        content = {
            "token": {
                "id": token_ids[-1] if token_ids else None,
                "text": message.text,
                "logprob": None,
                "special": False,
            },
            "generated_text": None,
            "finished": message.HasField("finish"),
            "details": None,
        }
        return f"data:{json.dumps(content)}\n\n".encode()

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """See `Shape`."""
        return b""

    def error_events(self, error: RequestError) -> bytes:
        """See `Shape`."""
        return f"data:{json.dumps(error_body(error))}\n\n".encode()

    def whole(self, choices: Sequence[Collected]) -> dict[str, Any]:
        """See `Shape`."""
        (choice,) = choices
        return {"generated_text": ["".join(choice.text)], "count": len(choice.token_ids), "finished": True}


def routes(edge: Edge) -> APIRouter:
    """Return S-LoRA's routes."""
    router = APIRouter(tags=["S-LoRA"])

    def answer(request: SloraRequest, http: Request, *, stream: bool) -> Response:
        message = router_pb2.GenerateRequest(
            text=request.inputs,
            adapter_id=edge.adapter_of(request.lora_dir),
            request_id=request.req_id or "",
            sampling=request.parameters.sampling(),
        )
        return edge.answer(http, [message], SloraShape(), stream=stream)

    @router.post("/generate_stream", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
    async def generate_stream(request: SloraRequest, http: Request) -> Response:
        """Stream the output of one prompt, a token an event."""
        return answer(request, http, stream=True)

    @router.post("/generate")
    async def generate(request: SloraRequest, http: Request) -> Response:
        """Return the output of one prompt in one piece."""
        return answer(request, http, stream=False)

    return router
