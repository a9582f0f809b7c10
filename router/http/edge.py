"""What the routes for all kinds of clients share: authentication, model names, and the response."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from lorrery.router.access import ApiKey, check_use
from lorrery.router.checks import check_length
from lorrery.router.edges.structured_output.drawing import SharedConstraint
from lorrery.router.faults import METADATA_KEY
from lorrery.router.field_names import Names, named
from lorrery.router.generate import Call
from lorrery.router.handler import Handler
from lorrery.router.http.answer import Answer, Shape
from lorrery.router.http.bodies import BodyReader, Bounds
from lorrery.router.http.errors import COMPLETION
from lorrery.router.http.forms import Form
from lorrery.router.http.token_details import TokenTexts
from lorrery.service.errors import InvalidRequest, Unauthenticated
from lorrery.service.settings.cluster import Settings
from lorrery.service.tasks import Turns
from lorrery.v1 import router_pb2

ROLES, REQUEST_ID = "roles", "request_id"
"""Keys in a request's ASGI state: the roles in the client's certificate, and the request id.

The writer of the response's body is there too, see answer.py.
"""

PRIORITY = "x-vllm-priority"
"""Header of vLLM with a request's priority, which takes precedence over the one in the body."""

EITHER: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}, "application/json": {}}}}
"""OpenAPI description of a response that is a stream if requested."""


class Edge:
    """The handler as the routes see it.

    Args:
        handler: performs the operations.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.turns = Turns()
        scheduler, router = handler.settings.scheduler, handler.settings.router
        self.bodies = BodyReader(
            Bounds.of(scheduler.max_req_input_len, router.http_max_outputs), self.turns, handler.receive_bytes
        )
        self.texts = TokenTexts(handler.tokenizer)
        self.models = handler.settings.served_model_names
        self.model = self.models[0]
        self.tool_call_probability = handler.settings.router.tool_call_probability
        self.excludes_tools = handler.settings.router.exclude_tools_when_tool_choice_none
        self.cached_block_size = _cached_block_size(handler.settings)
        self.max_model_len = handler.settings.scheduler.max_req_total_len

    def check_tool_choice(self, choice: object) -> None:
        """Check that clients may ask for calls of tools in this way.

        Args:
            choice: `none`, `auto`, `required`, or a tool to call; None: as none.

        Raises:
            InvalidRequest: they may not.
        """
        allowed = self.handler.settings.router.tool_calls
        if choice in (None, "none") or allowed == "auto" or (allowed == "required" and choice != "auto"):
            return
        read = "required calls of tools alone" if allowed == "required" else "no calls of tools"
        raise InvalidRequest(
            f"this engine reads {read}: router.tool_calls is {allowed!r} (--enable-auto-tool-choice,"
            " --tool-call-parser); set tool_choice to 'none', or leave tools out",
            field="tool_choice",
        )

    def counting(self, form: Form | None, request_type: str, *, stream: bool | None) -> Form | None:
        """Return a form of outputs whose parses are counted as vLLM's tool parser's are.

        Args:
            form: of the outputs; None: none.
            request_type: `chat_completions`, `responses` or `other`.
            stream: whether they are streamed.
        """
        if form is None or not form.is_auto:
            return form
        return form._replace(parsed=partial(self.handler.count_tool_parse, request_type, bool(stream)))

    def caller(self, http: Request) -> ApiKey:
        """Authenticate the caller; return its permissions.

        Raises:
            Unauthenticated: no valid key.
        """
        roles: Collection[str] = http.scope["state"].get(ROLES, ())
        return self.handler.access.caller(http.headers.get("authorization", ""), roles)

    def admit(self, http: Request) -> None:
        """Check that the caller is authenticated, and count refusals.

        Raises:
            Unauthenticated: no valid key.
        """
        try:
            self.caller(http)
        except Unauthenticated as error:
            self.handler.count_refused(error)
            raise

    def request_id(self, http: Request, in_body: str | None = None) -> str:
        """Return the request's id: that of its header, else of its body, else the one that the server generated.

        The response's `x-request-id` is the same.

        Raises:
            InvalidRequest: the body's is too long.
        """
        state = http.scope["state"]
        if in_body and "x-request-id" not in http.headers:
            check_length("request_id", in_body)
            state[REQUEST_ID] = in_body
        name: str = state[REQUEST_ID]
        return name

    def tenant(self, user: str | None) -> str:
        """Return the tenant that a request names; empty where API keys determine the tenant."""
        return "" if user is None or self.handler.access.counts else user

    async def encode_prompts(
        self, http: Request, messages: Sequence[router_pb2.GenerateRequest], names: Sequence[Names]
    ) -> None:
        """Replace the prompts of messages by their tokens, in turns with everything else on the event loop.

        Args:
            http: the request that they belong to.
            messages: each with a prompt, as text or tokens.
            names: field names for errors about each message.

        Raises:
            RequestError: a prompt is empty or too long.
        """
        turn = self.turns.begin()
        for message, its_names in zip(messages, names, strict=True):
            with named(its_names):
                token_ids = await self.handler.prompt_token_ids(message, lambda: self.caller(http))
            message.ClearField("prompt")
            message.token_ids.ids.extend(token_ids)
            if turn.is_over:
                await turn.pass_on()

    async def encode_for_several(
        self, http: Request, messages: Sequence[router_pb2.GenerateRequest], names: Sequence[Names], n: int
    ) -> None:
        """Do that, see `encode_prompts`, if there are several outputs, `n` per prompt.

        Each output encodes its prompt otherwise, and all of them would do so in one iteration of the event loop.
        """
        if len(messages) * n > 1:
            await self.encode_prompts(http, messages, names)

    def answer(
        self,
        http: Request,
        messages: Sequence[router_pb2.GenerateRequest],
        shape: Shape,
        *,
        stream: bool | None,
        names: Sequence[Names],
        form: Form | None = None,
    ) -> Response:
        """Return the response with one output per message.

        Args:
            http: the request.
            messages: one for each output.
            shape: of the response.
            stream: whether to send events.
            names: field names for errors about each message.
            form: of the outputs; None: their own.
        """
        constraint = None if form is None else SharedConstraint(form.constraint)
        if (priority := _header_priority(http)) is not None:
            for message in messages:
                message.priority = priority

        async def generate(message: router_pb2.GenerateRequest, its_names: Names, call: Call) -> None:
            with named(its_names if form is None else form.names(its_names)):
                await self.handler.generate(message, lambda: self.caller(http), call, constraint)

        choices = [partial(generate, *one) for one in zip(messages, names, strict=True)]
        return Answer(choices, shape, self.turns, stream=bool(stream), fault_rules=http.headers.getlist(METADATA_KEY))

    async def check_model(self, http: Request, model: str | None) -> None:
        """Check that a request names no model, the base model, or an adapter that the caller may see.

        Raises:
            PermissionDenied: the caller may not use the adapter, whether or not there is one.
            RequestError: it names another model, or the check is impossible now.
            grpc.aio.AioRpcError: a scheduler's error.
        """
        if not model or model in (self.handler.settings.model, *self.models):
            return
        check_length("model", model)
        caller = self.caller(http)
        with named(COMPLETION):
            check_use(caller, model, 0, 0)
            if await self.handler.find_adapter(caller, model) is None:
                raise self.handler.unknown_model(model)


def _cached_block_size(settings: Settings) -> int:
    """Return how many tokens the prefix cache keeps together; 0: there is none."""
    cache = settings.scheduler.prefix_cache
    return 0 if cache.kind == "none" else settings.scheduler.block_size or 1


def _header_priority(http: Request) -> int | None:
    """Return the priority in the header; None: it has none, or as in vLLM one that is not a number."""
    try:
        priority = int(http.headers.get(PRIORITY, ""))
    except ValueError:
        return None
    return priority if -(2**31) <= priority < 2**31 else None
