"""Names of fields and calls in errors, by HTTP route."""

from lorrery.router.field_names import EMPTY, Names

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
