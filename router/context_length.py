"""Errors for requests that are too long, in vLLM's words: gateways match them to fall back to a model with more room.

LiteLLM recognises a ContextWindowExceededError by "This model's maximum context length is", and falls back. The
sentences are vLLM's (vllm/renderers/params.py). Lorrery's further limits (`max_req_input_len`, the KV pool) follow in
its own words.
"""

from lorrery.service.errors import InjectedFault, NeverFits

FAULT_STATUS = "OUT_OF_RANGE"
"""Status of an injected fault that simulates a request that is too long."""


def as_vllm_tells(error: NeverFits, max_model_len: int, max_tokens: str) -> NeverFits:
    """Return an error about lengths in vLLM's words.

    Args:
        error: has the lengths among its facts.
        max_model_len: upper bound on prompt plus output, in tokens.
        max_tokens: the client's name for the limit on output tokens.
    """
    facts = error.facts
    at_least = "at least " if "least_prompt_tokens" in facts else ""
    prompt_tokens = int(facts.get("least_prompt_tokens") or facts["prompt_tokens"])
    output_tokens = int(facts.get("max_new_tokens", 0))
    total = prompt_tokens + output_tokens
    limit = f"This model's maximum context length is {max_model_len} tokens"
    if prompt_tokens >= max_model_len or prompt_tokens > int(facts.get("max_req_input_len", max_model_len)):
        field, own = "input_tokens", bool(at_least) or prompt_tokens < max_model_len
        message = (
            f"{limit}. However, you requested {output_tokens} output tokens and your prompt contains"
            f" {at_least}{prompt_tokens} input tokens, for a total of {at_least}{total} tokens. Please reduce the"
            " length of the input prompt or the number of requested output tokens."
        )
    else:
        field, own = max_tokens, total <= max_model_len
        message = (
            f"'max_tokens' or 'max_completion_tokens' is too large: {output_tokens}. {limit} and your request has"
            f" {prompt_tokens} input tokens"
            + (". " if own else f" ({output_tokens} > {max_model_len} - {prompt_tokens}).")
        ).rstrip()
    told = NeverFits(f"{message} Here: {error}" if own else message)
    told.facts = {**facts, "field": field}
    return told


def fault_as_vllm_tells(fault: InjectedFault, max_model_len: int, prompt: str) -> InjectedFault:
    """Return an injected fault that simulates a too long request, in vLLM's words; see `as_vllm_tells`."""
    told = InjectedFault(fault.facts["rule"], fault.status)
    told.args = (f"This model's maximum context length is {max_model_len} tokens. However, this is an {fault}",)
    told.facts = {**fault.facts, "field": prompt}
    return told
