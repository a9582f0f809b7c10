"""Request fields of every OpenAI-like route: OpenAI's own, and those that vLLM adds.

A field is of one of three kinds: it is honoured; it is ignored, as are unknown and null fields, because the output of a
mock does not depend on it; or it asks for output that cannot be produced, and is refused with a reason. docs/clients.md
lists them.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from lorrery.chassis.errors import InvalidRequest
from lorrery.router.http.forms import (
    Form,
    of_format,
    of_mock_output,
    of_structured_outputs,
    only_one,
)
from lorrery.v1 import router_pb2, types_pb2

MAX_CHOICES = 128
"""Upper bound on the outputs of one prompt, as in OpenAI's API."""

RequestId = Annotated[str, Field(pattern="^[ -~]*$")]
"""Only what a header can show, since the response has it in one."""
TokenId = Annotated[int, Field(ge=0, le=0xFFFFFFFF)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]
"""Validation of a list stops at the first wrong element: the errors of a whole list would be a hundred times as big."""
Switch = Annotated[bool, Field(strict=False)]
Whole = Annotated[int, Field(strict=False)]
Number = Annotated[float, Field(strict=False)]
"""Read as pydantic does in its lax mode, which vLLM has for all fields: "3" and 3.0 are 3, "true" and 1 are true."""
Count = Annotated[Whole, Field(ge=0, le=0x7FFFFFFF)]
Positive = Annotated[Whole, Field(ge=1, le=0x7FFFFFFF)]

LENIENT = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())
"""Unknown fields are ignored; values must have exactly the field's type, unless it is one of the three above."""

_REFUSED = {
    "suffix": "output follows its prompt, and is followed by nothing",
    "prompt_embeds": "a prompt is text or tokens",
    "use_beam_search": "output is sampled; leave it out, or false",
    "logits_processors": "the router runs no code of its clients",
    "allowed_token_ids": "the mock model's words cannot be chosen",
    "bad_words": "the mock model's words cannot be chosen",
    "functions": "it is the older name of tools; give those",
    "audio": "output is text",
    "kv_transfer_params": "KV caches of two engines do not meet here",
    "cache_salt": "prefix caches are shared by those who share an adapter; give a tenant an adapter of its own",
}
"""Fields that must be left out, null, or without effect (false, 0, empty), and the reason."""


class StreamOptions(BaseModel):
    """What a stream tells beside its output."""

    model_config = LENIENT

    include_usage: Switch | None = None
    continuous_usage_stats: Switch | None = Field(
        default=None, description="with include_usage, each chunk has the usage so far"
    )


class GeneratingRequest(BaseModel):
    """The fields that all of OpenAI's generating routes have."""

    model_config = LENIENT

    model: str | None = Field(default=None, description="the base model, or an adapter; unset: the base model")
    stream: Switch | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Count | None = Field(default=None, description="n at most: none is better than another")
    stop: str | Texts | None = None
    stop_token_ids: Tokens | None = Field(default=None, description="the output ends with the first of these")
    include_stop_str_in_output: Switch | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Number | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = Field(default=None, description="0 and -1: all tokens")
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = Field(default=None, description="without effect")
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = Field(default=None, description="without effect")
    ignore_eos: Switch | None = None
    min_tokens: Count | None = Field(
        default=None, description="the output's own end and stop strings come after so many"
    )
    prompt_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = Field(
        default=None, description="how likely each token of the prompt was, with so many alternatives; not in streams"
    )
    return_tokens_as_token_ids: Switch | None = Field(
        default=None, description="tokens of log-probabilities are called token_id:N"
    )
    return_token_ids: Switch | None = Field(default=None, description="choices have token_ids and prompt_token_ids")
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1, le=0x7FFFFFFF)] | None = Field(
        default=None, description="so many last tokens of the prompt count; -1: as many as there may be"
    )
    request_id: RequestId | None = Field(default=None, description="the request's id, without a header x-request-id")
    add_special_tokens: Switch | None = Field(default=None, description="whether a text begins with the token for that")
    priority: Annotated[Whole, Field(ge=-(2**31), lt=2**31)] | None = Field(
        default=None, description="a lower one is earlier, if scheduler.policy is priority"
    )
    user: str | None = Field(default=None, description="the tenant, where no API keys are asked for")
    response_format: dict[str, Any] | None = Field(
        default=None, description="type json_schema with json_schema.schema, json_object, or text"
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="json (a schema), json_object, regex or choice: the form of the output"
    )
    guided_json: dict[str, Any] | str | None = Field(default=None, description="older name of structured_outputs.json")
    guided_regex: str | None = Field(default=None, description="older name of structured_outputs.regex")
    guided_choice: Texts | None = Field(default=None, description="older name of structured_outputs.choice")
    guided_grammar: Any = None
    mock_output: str | None = Field(default=None, description="what the mock model says, word for word")
    suffix: str | None = None
    prompt_embeds: Any = None
    use_beam_search: Switch | None = None
    logits_processors: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    functions: Any = None
    audio: Any = None
    kv_transfer_params: Any = None
    cache_salt: str | None = None

    most_tokens_name: ClassVar[str] = "max_tokens"
    fills_context: ClassVar[bool] = False
    """Whether an output without a given length may use all of the remaining context."""

    @property
    def include_usage(self) -> bool:
        """Whether its stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of its stream has the usage so far; as in vLLM, only beside the whole usage."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    @abstractmethod
    def most_tokens(self) -> int | None:
        """The number of output tokens requested."""

    @property
    @abstractmethod
    def top_logprobs(self) -> int | None:
        """Number of alternatives to each token; None: no log-probabilities."""

    def check(self) -> None:
        """Check what the types do not express.

        Raises:
            InvalidRequest: a field cannot be honoured.
        """
        refuse_given(self, _REFUSED)
        if self.stop == "":
            raise InvalidRequest(
                "stop is empty; a stop string has at least 1 character; leave it out", field="stop", value="", limit=1
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is for streams; set stream to true, or leave stream_options out", field="stream_options"
            )
        if self.best_of is not None and self.best_of > (self.n or 1):
            raise refused("best_of", self.best_of, "no output is better than another; ask for n of them")
        if self.min_tokens and self.most_tokens is not None and self.min_tokens > self.most_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}; it must be at most {self.most_tokens_name}, {self.most_tokens}",
                field="min_tokens",
                value=self.min_tokens,
                limit=self.most_tokens,
            )
        if self.prompt_logprobs is not None and self.stream:
            raise refused("prompt_logprobs", self.prompt_logprobs, "streams have none; leave out one of the two")

    def form(self, tool_call_probability: float) -> Form | None:
        """Return the form that it asks of its outputs; None: none.

        Args:
            tool_call_probability: with which an output calls tools where it may and need not.

        Raises:
            InvalidRequest: it asks for several, or for one that is not supported.
        """
        del tool_call_probability
        guided = {kind: getattr(self, f"guided_{kind}") for kind in ("json", "regex", "choice", "grammar")}
        return only_one(
            [
                of_format(self.response_format, "response_format", "json_schema"),
                of_structured_outputs(self.structured_outputs, "structured_outputs."),
                of_structured_outputs(guided, "guided_"),
                of_mock_output(self.mock_output),
            ]
        )

    def check_outputs(self, num_prompts: int, http_max_outputs: int) -> None:
        """Check the number of outputs.

        Raises:
            InvalidRequest: it exceeds `http_max_outputs`.
        """
        n = self.n or 1
        if num_prompts * n > http_max_outputs:
            at_fault = ("prompt", num_prompts) if n == 1 or num_prompts > http_max_outputs else ("n", n)
            raise InvalidRequest(
                f"prompts times n are {num_prompts} x {n} outputs; http_max_outputs is {http_max_outputs}; send several"
                " requests",
                field=at_fault[0],
                value=at_fault[1],
                limit=http_max_outputs,
            )

    def messages(
        self, prompts: Sequence[str | list[int]], request_id: str, tenant: str
    ) -> list[router_pb2.GenerateRequest]:
        """Return a message for each prompt, in order."""
        sampling = self._sampling()
        return [self._message(prompt, sampling, request_id, tenant) for prompt in prompts]

    def _message(
        self, prompt: str | list[int], sampling: types_pb2.SamplingParams, request_id: str, tenant: str
    ) -> router_pb2.GenerateRequest:
        message = router_pb2.GenerateRequest(
            model=self.model or "",
            tenant_id=tenant,
            request_id=request_id,
            sampling=sampling,
            top_logprobs=self.top_logprobs,
            fill_context=self.fills_context,
            without_special_tokens=self.add_special_tokens is False,
            priority=self.priority or 0,
        )
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.token_ids.ids.extend(prompt)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens >= 0:
            message.truncate_prompt_tokens = self.truncate_prompt_tokens
        return message

    def _sampling(self) -> types_pb2.SamplingParams:
        sampling = types_pb2.SamplingParams(
            do_sample=self.temperature is None or self.temperature > 0, signed_penalties=True
        )
        if self.most_tokens is not None:
            sampling.max_new_tokens = self.most_tokens
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "ignore_eos"):
            value = getattr(self, name)
            if value is not None and not (name == "temperature" and value == 0):
                setattr(sampling, name, value)
        if self.top_k:
            sampling.top_k = self.top_k
        if self.stop:
            sampling.stop_sequences.extend([self.stop] if isinstance(self.stop, str) else self.stop)
        sampling.stop_token_ids.extend(self.stop_token_ids or ())
        if self.include_stop_str_in_output:
            sampling.include_stop_sequence = True
        if self.min_tokens:
            sampling.min_new_tokens = self.min_tokens
        return sampling


def outputs(
    messages: Sequence[router_pb2.GenerateRequest], n: int, seed: int | None
) -> list[router_pb2.GenerateRequest]:
    """Return a message for each output in order, prompt by prompt, each with its own id and seed.

    Args:
        messages: one for each prompt.
        n: outputs per prompt.
        seed: of the first output; it counts up.
    """
    found: list[router_pb2.GenerateRequest] = []
    for message in messages:
        for _ in range(n):
            number = len(found)
            output = router_pb2.GenerateRequest()
            output.CopyFrom(message)
            if number:
                output.request_id = f"{message.request_id}-{number}"
            if seed is not None:
                output.seed = (seed + number) % 2**64
            found.append(output)
    return found


def refuse_given(request: GeneratingRequest, reasons: Mapping[str, str]) -> None:
    """Check that fields that cannot be honoured are not set to a value with an effect.

    Args:
        request: has these fields.
        reasons: why each is refused, by field.

    Raises:
        InvalidRequest: the first field that is.
    """
    for name, why in reasons.items():
        value = getattr(request, name)
        asks = value is not None if name == "prompt_logprobs" else value  # 0 wants them without alternatives
        if asks and (name, value) != ("n", 1):
            raise refused(name.rstrip("_"), value, why)


def refused(name: str, value: object, why: str) -> InvalidRequest:
    """Return the error for a field that cannot be honoured."""
    return InvalidRequest(f"{name} is not supported here: {why}", field=name, value=value)
