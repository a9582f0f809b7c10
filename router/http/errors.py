"""Errors as HTTP responses: a status, a body as vLLM has it, and the names that a route has for fields and calls."""

import json
from http import HTTPStatus
from typing import Any

import grpc
from starlette.responses import Response

from lorrery.router.field_names import EMPTY, Names
from lorrery.service.errors import RequestError
from lorrery.service.network.status import grpc_status, public_text, retry_seconds

HTTP_STATUS: dict[grpc.StatusCode, HTTPStatus] = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}
"""gRPC status -> HTTP status; any other is 500."""

_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.CONFLICT: "ConflictError",
    HTTPStatus.TOO_MANY_REQUESTS: "Too Many Requests",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
    HTTPStatus.NOT_IMPLEMENTED: "NotImplementedError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}
"""vLLM's names for kinds of errors (vllm/entrypoints/serve/exception_handling); any other is the status's phrase."""


def http_status(error: RequestError) -> HTTPStatus:
    """Return the HTTP status of an error."""
    return HTTP_STATUS.get(grpc_status(error), HTTPStatus.INTERNAL_SERVER_ERROR)


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the response body of an error."""
    return body(http_status(error), public_text(error), error.facts.get("field"))


def body(status: HTTPStatus, message: str, param: str | None = None, kind: str | None = None) -> dict[str, Any]:
    """Return an error as vLLM has it, in OpenAI's format; `kind`: its type, unless it follows from the status."""
    kind = kind or _TYPES.get(status, status.phrase)
    return {"error": {"message": message, "type": kind, "param": param, "code": status.value}}


def error_response(error: RequestError) -> Response:
    """Return the response to a request that failed before anything was sent."""
    let_go(error)
    headers = {}
    seconds = retry_seconds(error)
    if seconds is not None:
        headers["retry-after"] = f"{max(1, round(seconds))}"
    status = http_status(error)
    if status == HTTPStatus.UNAUTHORIZED:
        return json_response({"error": "Unauthorized"}, status, {"www-authenticate": "Bearer"})
    return json_response(error_body(error), status, headers)


def let_go(error: BaseException | None) -> None:
    """Let go of the frames that an error has come through; one that has the error too would keep a whole body."""
    while error is not None:
        before = error.__cause__ or error.__context__
        error.__traceback__ = error.__context__ = error.__cause__ = None
        error = before


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


_ADAPTERS = "GET /v1/models"
COMPLETION = Names(
    {
        "ListAdapters": _ADAPTERS,
        EMPTY: "prompt is empty; give text or tokens",
        "adapter_id": "model",
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "request_id": "x-request-id",
        "stop_sequences": "stop",
        "tenant_id": "user",
        "text": "prompt",
        "token_ids": "prompt",
        "top_logprobs": "logprobs",
    }
)
"""For OpenAI's completions, and llm-mock's `/generate`."""


def of_prompt(number: int) -> Names:
    """Return the names for errors about one prompt of a completion with a list of prompts."""
    place = f"prompt[{number}]"
    words = {EMPTY: f"{place} is empty; give text or tokens", "text": place, "token_ids": place}
    return Names({**COMPLETION.words, **words}, {"prompt": place})


CHAT = Names(
    {
        **COMPLETION.words,
        EMPTY: "messages make an empty prompt; give text",
        "text": "messages",
        "token_ids": "messages",
        "top_logprobs": "top_logprobs",
    },
    {"prompt": "messages"},
)
RESPONSES = Names(
    {
        **COMPLETION.words,
        EMPTY: "input makes an empty prompt; give text",
        "max_new_tokens": "max_output_tokens",
        "text": "input",
        "token_ids": "input",
    },
    {"prompt": "input"},
)
MESSAGES = Names(
    {**CHAT.words, "stop": "stop_sequences", "stop_sequences": "stop_sequences"},
    {"prompt": "messages"},
)
"""For Anthropic's routes."""
LORA = Names({"ListAdapters": _ADAPTERS, "adapter_id": "lora_name", "source_path": "lora_path"})
"""For vLLM's routes that load adapters."""

_SLORA_PARAMETERS = (
    *("do_sample", "presence_penalty", "frequency_penalty", "temperature", "top_p", "top_k"),
    *("ignore_eos", "max_new_tokens", "stop_sequences"),
)
SLORA = Names(
    {
        "ListAdapters": _ADAPTERS,
        EMPTY: "inputs is empty; give a text",
        "adapter_id": "lora_dir",
        "request_id": "req_id",
        "text": "inputs",
    },
    {"prompt": "inputs", **{name: f"parameters.{name}" for name in _SLORA_PARAMETERS}},
)
"""For S-LoRA's routes; messages about its sampling parameters are S-LoRA's."""
TGI = Names({**SLORA.words, "adapter_id": "parameters.adapter_id"}, SLORA.params)
"""For the same routes, if a body names its adapter as TGI does."""
