"""Conversion of requests that the engine protocols share, and each protocol's names of fields in errors."""

from collections.abc import Iterable, Mapping

from google.protobuf.message import Message

from lorrery.router.checks import MAX_TOP_LOGPROBS
from lorrery.router.field_names import EMPTY, Names
from lorrery.service.errors import InvalidRequest
from lorrery.v1 import router_pb2, types_pb2


def _within(message: str, *same: str, **other: str) -> Mapping[str, str]:
    """Return the paths of fields in a message: of those with Lorrery's names, and of those with others."""
    return {name: f"{message}.{theirs}" for name, theirs in ({name: name for name in same} | other).items()}


_FORMS = {"json_schema": "json", "regex": "regex", "choices": "choice"}
"""Forms of outputs, and vLLM's names for them."""
_LISTING = "ListLoras"
VLLM = Names(
    {
        "ListAdapters": _LISTING,
        "adapter_id": "lora_name",
        "token_ids": "token_ids.ids",
        "top_logprobs": "response.output_candidates.top_n",
        **_within("sampling", "top_p", "top_k", n="num_sequences"),
        **_within("decoding", "presence_penalty", "frequency_penalty"),
        **{f"constraint.{form}": f"decoding.{name}" for form, name in _FORMS.items()},
        **_within("stopping", "max_new_tokens", "min_new_tokens", "stop_token_ids", stop_sequences="stop_strings"),
    }
)
"""For `vllm.Inference`, if `lora_name` is set."""
VLLM_MODEL = Names({**VLLM.words, "adapter_id": "model"})
"""The same if only `model` may name an adapter."""
VLLM_LORA = Names({"ListAdapters": _LISTING, "adapter_id": "lora_name"})
"""For the calls of `vllm.Control` that load adapters."""

_SMG = {
    "token_ids": "tokenized.input_ids",
    EMPTY: "prompt is empty; give tokenized.input_ids",
    **{
        f"constraint.{form}": f"sampling_params.{name}"
        for form, name in (_FORMS | {"json_schema": "json_schema"}).items()
    },
}
_SAMPLED = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "stop_token_ids", "n")
SMG_VLLM = Names(
    {
        **_SMG,
        **_within(
            "sampling_params",
            *_SAMPLED,
            "truncate_prompt_tokens",
            max_new_tokens="max_tokens",
            min_new_tokens="min_tokens",
            stop_sequences="stop",
            logprobs="logprobs",
            top_logprobs="logprobs",
        ),
    }
)
"""For `vllm.grpc.engine.VllmEngine`, whose requests name no adapter."""

_SGLANG_LISTING = "ListLoadedLoRAAdapters"
SGLANG = Names(
    {
        **_SMG,
        "ListAdapters": _SGLANG_LISTING,
        "adapter_id": "lora_id",
        "logprobs": "top_logprobs_num",
        "top_logprobs": "top_logprobs_num",
        **_within("sampling_params", *_SAMPLED, "max_new_tokens", "min_new_tokens", stop_sequences="stop"),
    }
)
"""For `sglang.grpc.scheduler.SglangScheduler`."""
SGLANG_LORA = Names({"ListAdapters": _SGLANG_LISTING, "adapter_id": "lora_name", "source_path": "lora_path"})
"""For its calls that load adapters."""


def refuse(asked: Mapping[str, object]) -> None:
    """Refuse fields that would change an output and cannot be honoured.

    Args:
        asked: values by field; empty, false and 0 count as unset.

    Raises:
        InvalidRequest: a field is set.
    """
    for field, value in asked.items():
        if value:
            raise InvalidRequest(f"{field} is not supported here; leave it out", field=field)


def read_constraint(asked: Message, group: str, prefix: str) -> router_pb2.Constraint | None:
    """Return the form that an engine's request asks of its output; None: none.

    Args:
        asked: the message with the request's `oneof` of forms.
        group: name of that `oneof`.
        prefix: path of the message in the request, for errors.

    Raises:
        InvalidRequest: it is a grammar.
    """
    kind = asked.WhichOneof(group)
    value = None if kind is None else getattr(asked, kind)
    if not value:
        return None
    if kind in ("json", "json_schema"):
        return router_pb2.Constraint(json_schema=value)
    if kind == "regex":
        return router_pb2.Constraint(regex=value)
    if kind == "choice":
        return router_pb2.Constraint(choices=router_pb2.Choices(texts=value.choices))
    if kind == "json_object":
        return router_pb2.Constraint(json_object=True)
    raise InvalidRequest(
        f"{prefix}.{kind} is not supported here: outputs follow schemas, patterns and choices, and no grammar",
        field=f"{prefix}.{kind}",
    )


def generate_request(
    *,
    request_id: str,
    prompt: Iterable[int],
    adapter_id: str,
    sampling: types_pb2.SamplingParams,
    temperature: float,
    max_tokens: int,
    seed: int | None,
    top_logprobs: int | None,
    truncate: int = 0,
    priority: int = 0,
    cache_salt: str = "",
    constraint: router_pb2.Constraint | None = None,
    skips_prefix_cache: bool = False,
) -> router_pb2.GenerateRequest:
    """Return the message of a request.

    Args:
        request_id: empty: generated.
        prompt: its tokens.
        adapter_id: empty: the base model.
        sampling: all parameters but those below; a top_p or top_k of 0 counts as unset.
        temperature: 0: greedy.
        max_tokens: 0: the rest of the context.
        seed: 64 bits, signed or unsigned; None: drawn by the router.
        top_logprobs: alternatives to each token; None: no log-probabilities.
        truncate: number of last prompt tokens to keep; 0: all.
        priority: a lower one is earlier.
        cache_salt: prompts with different ones share no cached prefix; empty: none.
        constraint: form of the output; None: none.
        skips_prefix_cache: whether to compute every position of the prompt.

    Raises:
        InvalidRequest: a value out of range.
    """
    sampling.do_sample = temperature != 0
    sampling.signed_penalties = True
    if temperature:
        sampling.temperature = temperature
    if not sampling.top_p:
        sampling.ClearField("top_p")
    if not sampling.top_k:
        sampling.top_k = -1
    if max_tokens:
        sampling.max_new_tokens = min(max_tokens, 2**31 - 1)
    message = router_pb2.GenerateRequest(
        request_id=request_id,
        adapter_id=adapter_id,
        sampling=sampling,
        fill_context=not max_tokens,
        priority=priority,
        skips_prefix_cache=skips_prefix_cache,
        cache_salt=cache_salt,
    )
    message.token_ids.ids.extend(prompt)
    if seed is not None:
        message.seed = seed % 2**64
    if constraint is not None:
        message.constraint.CopyFrom(constraint)
    if truncate:
        message.truncate_prompt_tokens = truncate
    if top_logprobs is not None:
        if top_logprobs < 0:
            raise InvalidRequest(
                f"logprobs is {top_logprobs}; it must be 0 to {MAX_TOP_LOGPROBS}",
                field="logprobs",
                value=top_logprobs,
                limit=MAX_TOP_LOGPROBS,
            )
        message.top_logprobs = top_logprobs
    return message
