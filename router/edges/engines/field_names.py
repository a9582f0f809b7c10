"""Names of fields and calls in errors, with the messages that contain them, by engine protocol."""

from collections.abc import Mapping

from lorrery.router.field_names import EMPTY, Names


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
