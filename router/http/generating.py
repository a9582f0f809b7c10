"""Request fields of every OpenAI-like route: OpenAI's own, and those that vLLM adds.

Names, types and bounds are those of vLLM 0.32 (vllm/entrypoints/openai/*/protocol.py, vllm/sampling_params.py), read in
pydantic's lax mode as there: "3" and 3.0 are 3, "true" and 1 are true. A field is honoured; or it is without effect, as
are unknown fields, because the output of a mock does not depend on it; or it asks for output that cannot be produced,
and is refused with a reason. docs/clients.md lists them.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lorrery.router.checks import MAX_TOP_LOGPROBS
from lorrery.router.http.forms import (
    Form,
    StructuredOutputs,
    of_format,
    of_mock_output,
    of_structured_outputs,
    only_one,
)
from lorrery.service.errors import InvalidRequest
from lorrery.service.names import cut, quoted
from lorrery.v1 import router_pb2, types_pb2

MAX_CHOICES = 16384
"""Upper bound on the outputs of one prompt; `router.http_max_outputs` bounds those of a request."""
_MAX_TEMPERATURE, _MAX_PENALTY = 2.0, 2.0
_LEAST_TEMPERATURE = 1e-5
"""Below it decoding is greedy."""
_MOST_SALT = 128
_NOT_IN_SALT = frozenset("@/\\\0")

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
"""Validation stops at the first wrong element: the errors of a whole list would be a hundred times as big."""
Stop = str | Annotated[Texts, Field(max_length=4)] | None
Arguments = Annotated[
    dict[str, str | int | float | Annotated[list[str | int | float], Field(fail_fast=True)]], Field(fail_fast=True)
]
Options = Annotated[dict[str, dict[str, Any]], Field(fail_fast=True)]
Bias = Annotated[dict[str, float], Field(fail_fast=True)]
NullIsZero = Annotated[int, BeforeValidator(lambda value: 0 if value is None else value)]

LENIENT = ConfigDict(extra="ignore", protected_namespaces=())
"""Unknown fields are ignored."""

_SIDES = {"left": router_pb2.TRUNCATION_SIDE_LEFT, "right": router_pb2.TRUNCATION_SIDE_RIGHT}


def _checked_budget(given: object) -> object:
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < -1):
        raise InvalidRequest(
            f"thinking_token_budget is {quoted(str(given))}; it must be an integer of at least -1",
            field="thinking_token_budget",
        )
    return given


_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "suffix": ((None,), "output follows its prompt, and is followed by nothing"),
    "prompt_embeds": ((None, []), "a prompt is text or tokens"),
    "use_beam_search": ((False,), "output is sampled; leave it out, or false"),
    "thinking_token_budget": ((None, -1), "no thinking of the model's is modelled; leave it out, or -1"),
}
"""Fields that cannot be honoured: the values without effect, and the reason."""


class StreamOptions(BaseModel):
    """What a stream tells beside its output."""

    model_config = LENIENT

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = Field(
        default=False, description="with include_usage, each chunk has the usage so far"
    )


class JsonSchemaFormat(BaseModel):
    """A JSON Schema as OpenAI's `response_format` has it."""

    model_config = LENIENT

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's form of an output."""

    model_config = LENIENT

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _needs_schema(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("type") == "json_schema" and given.get("json_schema") is None:
            raise InvalidRequest(
                "response_format has no json_schema; its type json_schema needs one; give name and schema",
                field="response_format",
            )
        return given


class RepetitionDetection(BaseModel):
    """When a repeating output ends; without effect."""

    model_config = LENIENT

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class GeneratingRequest(BaseModel):
    """The fields that completions and chats have."""

    model_config = LENIENT

    model: str | None = Field(default=None, description="the base model, or an adapter; unset: the base model")
    n: int | None = 1
    frequency_penalty: float | None = None
    logit_bias: Bias | None = Field(default=None, description="without effect")
    presence_penalty: float | None = None
    seed: Int64 | None = None
    stop: Stop = []
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = Field(default=None, description="the tenant, where no API keys are asked for")
    use_beam_search: bool = False
    top_k: int | None = Field(default=None, description="0 and -1: all tokens")
    min_p: float | None = Field(default=None, description="without effect")
    repetition_penalty: float | None = Field(default=None, description="without effect")
    watermarking: bool | None = Field(default=None, description="without effect")
    length_penalty: float = Field(default=1.0, description="without effect")
    stop_token_ids: Tokens | None = Field(default=[], description="the output ends with the first of these")
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, description="the output's own end and stop strings come after so many")
    skip_special_tokens: bool = Field(default=True, description="without effect")
    spaces_between_special_tokens: bool = Field(default=True, description="without effect")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**63)] | None = Field(
        default=None, description="so many tokens of the prompt count; -1: as many as there may be"
    )
    truncation_side: Literal["left", "right"] | None = Field(default=None, description="left: the last ones count")
    allowed_token_ids: Tokens | None = Field(default=None, description="the output consists of these")
    prompt_logprobs: int | None = Field(
        default=None, description="how likely each token of the prompt was, with so many alternatives; not in streams"
    )
    logprob_token_ids: Tokens | None = None
    bad_words: Texts = Field(default=[], description="without effect")
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="json (a schema), json_object, regex or choice: the form of the output"
    )
    response_format: ResponseFormat | None = Field(
        default=None, description="type json_schema with json_schema.schema, json_object, or text"
    )
    priority: Int64 = Field(default=0, description="a lower one is earlier, if scheduler.policy is priority")
    request_id: str = Field(default="", description="the request's id, without a header x-request-id")
    session_id: str | None = Field(default=None, description="without effect")
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="tokens of log-probabilities are called token_id:N"
    )
    return_token_ids: bool | None = Field(default=None, description="choices have token_ids and prompt_token_ids")
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] = Field(default=0, description="without effect")
    return_token_offsets: bool | None = Field(default=False, description="without effect")
    mm_payload: Literal["tensors", "none"] = Field(default="tensors", description="without effect")
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    kv_transfer_params: dict[str, Any] | None = Field(default=None, description="without effect")
    ec_transfer_params: dict[str, Any] | None = Field(default=None, description="without effect")
    vllm_xargs: Arguments | None = Field(default=None, description="without effect")
    repetition_detection: RepetitionDetection | None = Field(default=None, description="without effect")
    thinking_token_budget: Annotated[int | None, BeforeValidator(_checked_budget)] = None
    stream_interval: Annotated[int, Field(ge=1)] | None = Field(default=None, description="without effect")
    mock_output: str | None = Field(default=None, description="what the mock model says, word for word")

    logprobs_name: ClassVar[str] = "logprobs"

    @property
    def include_usage(self) -> bool:
        """Whether its stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of its stream has the usage so far; as in vLLM, only beside the whole usage."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def most_tokens_name(self) -> str:
        """The name of the field with that number."""
        return "max_tokens"

    @property
    @abstractmethod
    def most_tokens(self) -> int | None:
        """The number of output tokens requested."""

    @property
    @abstractmethod
    def top_logprobs(self) -> int | None:
        """Number of alternatives to each token; None: no log-probabilities."""

    @model_validator(mode="before")
    @classmethod
    def _check_salt(cls, given: object) -> object:
        salt = given.get("cache_salt") if isinstance(given, dict) else None
        if salt is not None and (
            not isinstance(salt, str) or not 0 < len(salt) <= _MOST_SALT or _NOT_IN_SALT & {*salt}
        ):
            raise InvalidRequest(
                f"cache_salt must have 1 to {_MOST_SALT} characters, and no @, /, backslash or NUL",
                field="cache_salt",
                limit=_MOST_SALT,
            )
        return given

    @model_validator(mode="before")
    @classmethod
    def _check_stream(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("stream_options") and not given.get("stream"):
            raise InvalidRequest(
                "stream_options is for streams; set stream to true, or leave stream_options out", field="stream_options"
            )
        return given

    @model_validator(mode="before")
    @classmethod
    def _check_counts_of_logprobs(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        for name in ("prompt_logprobs", cls.logprobs_name):
            count = given.get(name)
            if count is not None and not isinstance(count, int | float):
                raise InvalidRequest(f"{name} is no integer; give one", field=name)
            if count is not None and count < 0 and count != -1:
                raise InvalidRequest(
                    f"{name} is {cut(str(count))}; it must be at least 0, or -1", field=name, value=count
                )
            if name == "prompt_logprobs" and count and given.get("stream"):
                raise refused(name, count, "streams have none; leave out one of the two")
        return given

    @property
    def echoed_logprobs(self) -> int | None:
        """Number of alternatives to each token of a prompt that is echoed; None: no log-probabilities."""
        return None

    @property
    def shown_prompt_logprobs(self) -> int | None:
        """Number of alternatives to each token of the prompt; None: no log-probabilities."""
        return self.echoed_logprobs if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def adds_special_tokens(self) -> bool:
        """Whether a text begins with the token for that."""
        return False

    def check(self) -> None:
        """Check what the types do not express.

        Raises:
            InvalidRequest: a field cannot be honoured.
        """
        for name, (harmless, why) in _REFUSED.items():
            if name in type(self).model_fields and (value := getattr(self, name)) not in harmless:
                raise refused(name, value, why)
        self._check_sampling()
        if self.most_tokens is not None and self.most_tokens < 1:
            raise _bad(self.most_tokens_name, self.most_tokens, "must be at least 1", 1)
        if self.min_tokens < 0:
            raise _bad("min_tokens", self.min_tokens, "must be at least 0", 0)
        if self.most_tokens is not None and self.min_tokens > self.most_tokens:
            raise _bad(
                "min_tokens",
                self.min_tokens,
                f"must be at most {self.most_tokens_name}, {self.most_tokens}",
                self.most_tokens,
            )
        if "" in self.stop_strings:
            raise _bad("stop", "empty", "must have at least 1 character; leave it out", 1)
        if "" in self.bad_words:
            raise _bad("bad_words", "empty", "must have at least 1 character; leave it out", 1)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _bad("allowed_token_ids", "empty", "must have at least one token; leave it out", 1)
        if self.logprob_token_ids and self.top_logprobs is None:
            raise InvalidRequest(
                "logprob_token_ids needs logprobs; set that, or leave it out", field="logprob_token_ids"
            )
        for name, count in (("prompt_logprobs", self.prompt_logprobs), ("logprobs", self.top_logprobs)):
            if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
                raise _bad(name, count, f"may be at most {MAX_TOP_LOGPROBS}", MAX_TOP_LOGPROBS)

    def _check_sampling(self) -> None:
        """Check the sampling parameters, in vLLM's order."""
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise _bad("n", self.n, f"must be 1 to {MAX_CHOICES}", MAX_CHOICES)
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name) or 0) <= _MAX_PENALTY:
                raise _bad(name, getattr(self, name), "must be -2 to 2", _MAX_PENALTY)
        penalty = self.repetition_penalty
        if penalty is not None and (penalty <= 0 or not math.isfinite(penalty)):
            raise _bad("repetition_penalty", penalty, "must be above 0", 0)
        if not 0 <= (self.temperature or 0) <= _MAX_TEMPERATURE:
            raise _bad("temperature", self.temperature, f"must be 0 to {_MAX_TEMPERATURE:g}", _MAX_TEMPERATURE)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise _bad("top_p", self.top_p, "must be above 0, and at most 1", 1)
        if self.top_k is not None and self.top_k < -1:
            raise _bad("top_k", self.top_k, "must be 0 or -1 (all tokens), or at least 1", -1)
        if not 0 <= (self.min_p or 0) <= 1:
            raise _bad("min_p", self.min_p, "must be 0 to 1", 1)
        if self.is_greedy and (self.n or 1) > 1:
            raise _bad("n", self.n, "must be 1 at temperature 0, since all outputs would be equal", 1)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest."""
        return self.temperature is not None and self.temperature < _LEAST_TEMPERATURE

    @property
    def stop_strings(self) -> Sequence[str]:
        """What ends an output where it says it."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or ()

    def form(self, tool_call_probability: float) -> Form | None:
        """Return the form that it asks of its outputs; None: none.

        Args:
            tool_call_probability: with which an output calls tools where it may and need not.

        Raises:
            InvalidRequest: it asks for several, or for one that is not supported.
        """
        del tool_call_probability
        asked = self.response_format
        given = None if asked is None else asked.model_dump(by_alias=True)
        return only_one(
            [
                of_format(given, "response_format", "json_schema"),
                of_structured_outputs(self.structured_outputs),
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
            fill_context=True,
            without_special_tokens=not self.adds_special_tokens,
            priority=clamped(self.priority),
            allowed_token_ids=self.allowed_token_ids or (),
            skips_prefix_cache=self.shown_prompt_logprobs is not None,
            cache_salt=self.cache_salt or "",
        )
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.token_ids.ids.extend(prompt)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens >= 0:
            message.truncate_prompt_tokens = self.truncate_prompt_tokens
            if self.truncation_side is not None:
                message.truncation_side = _SIDES[self.truncation_side]
        return message

    def _sampling(self) -> types_pb2.SamplingParams:
        sampling = types_pb2.SamplingParams(do_sample=not self.is_greedy, signed_penalties=True)
        if self.most_tokens is not None:
            sampling.max_new_tokens = self.most_tokens
        for name in ("top_p", "presence_penalty", "frequency_penalty", "ignore_eos"):
            value = getattr(self, name)
            if value is not None:
                setattr(sampling, name, value)
        if self.temperature is not None and not self.is_greedy:
            sampling.temperature = self.temperature
        if self.top_k and self.top_k > 0:
            sampling.top_k = min(self.top_k, 2**31 - 1)
        sampling.stop_sequences.extend(self.stop_strings)
        sampling.stop_token_ids.extend(self.stop_token_ids or ())
        if self.include_stop_str_in_output:
            sampling.include_stop_sequence = True
        if self.min_tokens:
            sampling.min_new_tokens = self.min_tokens
        return sampling


def check_vocabulary(request: GeneratingRequest, prompts: Sequence[str | list[int]], vocab_size: int) -> None:
    """Check that all tokens that a request names are in the vocabulary.

    Raises:
        InvalidRequest: one is not.
    """
    bias: list[int] = []
    for name in request.logit_bias or ():
        try:
            bias.append(int(name))
        except ValueError:
            raise InvalidRequest(
                f"logit_bias has {quoted(name)}, which is no number of a token", field="logit_bias"
            ) from None
    named = [("logit_bias", bias), ("stop_token_ids", request.stop_token_ids or ())]
    named += [("allowed_token_ids", request.allowed_token_ids or ())]
    named += [("prompt", prompt) for prompt in prompts if not isinstance(prompt, str)]
    for field, token_ids in named:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise InvalidRequest(
                f"{field} has token {cut(str(wrong))}; the vocabulary has {vocab_size} tokens, so at most"
                f" {vocab_size - 1} is allowed",
                field=field,
                value=wrong,
                limit=vocab_size - 1,
            )


def check_room(request: GeneratingRequest, max_model_len: int) -> None:
    """Check that numbers of tokens are within the context; what a prompt leaves of it is another matter.

    Raises:
        InvalidRequest: one is not.
    """
    asked = {
        request.most_tokens_name: request.most_tokens,
        "min_tokens": request.min_tokens,
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
    }
    for name, count in asked.items():
        if count is not None and count > max_model_len:
            raise InvalidRequest(
                f"{name}={cut(str(count))} cannot be greater than max_model_len={max_model_len}; ask for fewer",
                field=name,
                value=count,
                limit=max_model_len,
            )


def clamped(priority: int) -> int:
    """Return a priority as 32 bits hold it."""
    return max(-(2**31), min(priority, 2**31 - 1))


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
        group_id = uuid4().hex
        for _ in range(n):
            number = len(found)
            output = router_pb2.GenerateRequest()
            output.CopyFrom(message)
            if number:
                output.request_id = f"{message.request_id}-{number}"
            if n > 1:
                output.group.id, output.group.num_outputs = group_id, n
            if seed is not None:
                output.seed = (seed + number) % 2**64
            found.append(output)
    return found


def refused(name: str, value: object, why: str) -> InvalidRequest:
    """Return the error for a field that cannot be honoured."""
    return InvalidRequest(f"{name} is not supported here: {why}", field=name, value=value)


def _bad(name: str, value: object, rule: str, limit: float) -> InvalidRequest:
    return InvalidRequest(f"{name} is {cut(str(value))}; it {rule}", field=name, value=value, limit=limit)
