"""S-LoRA's routes, as its benchmark reads them (S-LoRA, slora/server/api_server.py, commit c1ddf48).

Events are `data:` without a blank, with the spacing of Python's JSON encoder; the last one has `finished`. llm-mock
also has a `/generate`, whose body has a `prompt` where S-LoRA's has `inputs`.

llm-mock's is that of vLLM's first API server (dongmingli-Ben/llm-mock, commit f07dd39). The text of its response begins
with the prompt. A stream is a sequence of JSON objects, each with the whole text so far and followed by a NUL.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag
from starlette.responses import Response

from lorrery.router.field_names import Names
from lorrery.router.http.answer import EVENT_STREAM, Collected, array_of, json_array
from lorrery.router.http.bodies import json_route
from lorrery.router.http.edge import Edge
from lorrery.router.http.errors import COMPLETION, SLORA, TGI, error_body
from lorrery.router.http.generating import LENIENT, Texts, check_room, check_vocabulary, outputs
from lorrery.router.http.openai_requests import CompletionRequest
from lorrery.router.logprobs import OutputLogprobs
from lorrery.service.errors import InvalidRequest, RequestError
from lorrery.tokenizer.base import Tokenizer
from lorrery.v1 import router_pb2, types_pb2

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class SloraParameters(BaseModel):
    """The nine sampling parameters; limits and defaults are S-LoRA's, checked where gRPC's are."""

    model_config = LENIENT

    do_sample: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    ignore_eos: bool | None = None
    max_new_tokens: Int32 | None = None
    stop_sequences: str | Texts | None = None
    return_details: bool | None = Field(default=None, description="/generate lists its tokens")
    adapter_id: str | None = Field(default=None, description="the adapter, as clients of TGI name it; like lora_dir")

    def sampling(self) -> types_pb2.SamplingParams:
        """Return the parameters as a message."""
        given = {name: value for name, value in self.model_dump().items() if value is not None}
        for other in ("return_details", "adapter_id"):
            given.pop(other, None)
        stop = given.pop("stop_sequences", None)
        sampling = types_pb2.SamplingParams(**given)
        if stop is not None:
            sampling.stop_sequences.extend([stop] if isinstance(stop, str) else stop)
        return sampling


class LlmMockRequest(CompletionRequest):
    """The body of llm-mock's `/generate`: a prompt, and vLLM's sampling parameters beside it."""

    prompt: str


class SloraRequest(BaseModel):
    """The body of `/generate` and `/generate_stream`."""

    model_config = LENIENT

    inputs: str | None = None
    parameters: Annotated[SloraParameters, BeforeValidator(lambda given: {} if given is None else given)] = (
        SloraParameters()
    )
    model_dir: str | None = Field(default=None, description="the base model; any name is taken, as S-LoRA does")
    lora_dir: str | None = Field(default=None, description="the adapter; null: the base model")
    req_id: str | None = None
    text: object = Field(default=None, description="SGLang's; refused")
    input_ids: object = Field(default=None, description="SGLang's; refused")

    def prompt(self) -> str:
        """Return the prompt.

        Raises:
            InvalidRequest: there is none, perhaps because the body is of another program's `/generate`.
        """
        if self.inputs is None:
            other = next((name for name in ("text", "input_ids") if getattr(self, name) is not None), None)
            if other is None:
                raise InvalidRequest("inputs is missing; give a text", field="inputs")
            message = f"inputs is missing; {other} is of SGLang's /generate, which is not served: POST /v1/completions"
            raise InvalidRequest(message, field=other)
        return self.inputs

    def adapter(self) -> tuple[str, Names]:
        """Return the adapter's name, which may be empty, and how errors name the fields.

        Raises:
            InvalidRequest: two adapters are named.
        """
        own, tgi = self.lora_dir or "", self.parameters.adapter_id or ""
        if own and tgi and own != tgi:
            message = f"parameters.adapter_id is {tgi!r} and lora_dir {own!r}; name one adapter"
            raise InvalidRequest(message, field="parameters.adapter_id")
        return own or tgi, TGI if tgi else SLORA


class SloraShape:
    """S-LoRA's response format.

    Args:
        tokenizer: for the text of a token.
        return_details: whether an unstreamed response lists its tokens.
    """

    media_type = EVENT_STREAM

    def __init__(self, tokenizer: Tokenizer, *, return_details: bool) -> None:
        self._tokenizer = tokenizer
        self._return_details = return_details
        self._num_shown = 0

    def echo(self, index: int) -> Iterable[bytes]:
        """See `Shape`."""
        return ()

    def event(self, index: int, message: router_pb2.GenerateResponse, logprobs: OutputLogprobs | None) -> bytes:
        """See `Shape`."""
        token_ids = message.token_ids
        self._num_shown += len(token_ids)
        last = logprobs.at(self._num_shown - 1, token_ids[-1], 0) if token_ids and logprobs is not None else None
        content = {
            "token": {
                "id": token_ids[-1] if token_ids else None,
                "text": message.text,
                "logprob": None if last is None else last.logprob,
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

    def whole(self, choices: Sequence[Collected]) -> Iterator[str]:
        """See `Shape`."""
        (choice,) = choices
        yield f'{{"generated_text": [{json.dumps(choice.text.getvalue())}],'
        yield f' "count_output_tokens": {len(choice.token_ids)}'
        if self._return_details:
            yield ', "tokens": '
            yield from array_of(self._listed(choice))
        yield "}"

    def _listed(self, choice: Collected) -> Iterator[dict[str, Any]]:
        assert choice.logprobs is not None
        for at, token_id in enumerate(choice.token_ids):
            yield {
                "id": token_id,
                "logprob": choice.logprobs.at(at, token_id, 0).logprob,
                "prompt_tokens": choice.usage.prompt_tokens,
                "text": self._tokenizer.detokenizer().push((token_id,)),
            }


def _kind(body: object) -> str:
    """Return which program's `/generate` a body is for."""
    has_prompt = isinstance(body, dict) and "prompt" in body and "inputs" not in body
    return _LLM_MOCK if has_prompt or isinstance(body, LlmMockRequest) else _SLORA


KINDS = _SLORA, _LLM_MOCK = "S-LoRA", "llm-mock"
"""Tags of the two bodies of `/generate`, which pydantic puts before the field in errors."""
AnyGenerateRequest = Annotated[
    Annotated[SloraRequest, Tag(_SLORA)] | Annotated[LlmMockRequest, Tag(_LLM_MOCK)], Discriminator(_kind)
]


def routes(edge: Edge) -> APIRouter:
    """Return S-LoRA's routes, and llm-mock's."""
    router = APIRouter(tags=["S-LoRA"], route_class=json_route(edge.admit, edge.bodies))

    def answer(request: SloraRequest, http: Request, *, stream: bool) -> Response:
        adapter_id, names = request.adapter()
        message = router_pb2.GenerateRequest(
            text=request.prompt(),
            adapter_id="" if adapter_id in edge.models else adapter_id,
            request_id=request.req_id or "",
            sampling=request.parameters.sampling(),
            top_logprobs=0,
        )
        shape = SloraShape(edge.handler.tokenizer, return_details=bool(request.parameters.return_details))
        return edge.answer(http, [message], shape, stream=stream, names=[names])

    @router.post("/generate_stream", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
    async def generate_stream(request: SloraRequest, http: Request) -> Response:
        """Stream the output of one prompt, a token an event."""
        return answer(request, http, stream=True)

    @router.post("/generate")
    async def generate(request: AnyGenerateRequest, http: Request) -> Response:
        """Return the output of one prompt in one piece (S-LoRA), or as asked for (llm-mock)."""
        if isinstance(request, SloraRequest):
            return answer(request, http, stream=False)
        request.check()
        request.check_outputs(1, edge.handler.settings.router.http_max_outputs)
        check_vocabulary(request, (), edge.handler.tokenizer.vocab_size)
        check_room(request, edge.max_model_len)
        form = request.form(edge.tool_call_probability)
        (message,) = request.messages(
            [request.prompt], edge.request_id(http, request.request_id), edge.tenant(request.user)
        )
        n = request.n or 1
        await edge.encode_for_several(http, [message], [COMPLETION], n)
        shape = LlmMockShape(request.prompt, n)
        messages = outputs([message], n, request.seed)
        return edge.answer(http, messages, shape, stream=request.stream, names=[COMPLETION] * n, form=form)

    return router


class LlmMockShape:
    """llm-mock's response format.

    Args:
        prompt: precedes each text.
        n: number of texts.
    """

    media_type = "application/octet-stream"

    def __init__(self, prompt: str, n: int) -> None:
        self._quoted = [quoted(prompt)[:-1]] * n  # texts so far: each event repeats all of them

    def echo(self, index: int) -> Iterable[bytes]:
        """See `Shape`."""
        return ()

    def event(self, index: int, message: router_pb2.GenerateResponse, logprobs: OutputLogprobs | None) -> bytes:
        """See `Shape`."""
        self._quoted[index] += quoted(message.text)[1:-1]
        return ('{"text": [' + '", '.join(self._quoted) + '"]}\0').encode()

    def last_events(self, usages: Sequence[types_pb2.Usage]) -> bytes:
        """See `Shape`."""
        return b""

    def error_events(self, error: RequestError) -> bytes:
        """See `Shape`."""
        return json.dumps(error_body(error)).encode() + b"\0"

    def whole(self, choices: Sequence[Collected]) -> Iterator[str]:
        """See `Shape`."""
        yield '{"text": '
        yield from json_array(
            text + quoted(choice.text.getvalue())[1:] for text, choice in zip(self._quoted, choices, strict=True)
        )
        yield "}"
