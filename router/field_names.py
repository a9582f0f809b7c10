"""Translates errors to what a client knows: its names of fields, and vLLM's words for requests that are too long.

The handler uses the field names of Lorrery's gRPC, other protocols their own.

Gateways match vLLM's sentences (vllm/renderers/params.py) to fall back to a model with more room: LiteLLM recognises a
ContextWindowExceededError by "This model's maximum context length is". Lorrery's further limits (`max_req_input_len`,
the KV pool) follow in its own words.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from lorrery.service.errors import InjectedFault, NeverFits, RequestError

EMPTY = "prompt is empty; give text or token_ids"
_MENTIONED = ("ListAdapters", EMPTY, "max_new_tokens")
"""Words that also appear in messages about other fields, or about none."""


class Names(NamedTuple):
    """A protocol's names for the handler's fields and calls.

    Attributes:
        words: names used in `param`, and in messages that are about that field or always use it as a name.
        params: names for `param` alone, where a message uses the word in its plain sense.
        max_model_len: upper bound on prompt plus output in tokens, for clients that expect vLLM's errors about lengths;
            else None.
    """

    words: Mapping[str, str]
    params: Mapping[str, str] = {}
    max_model_len: int | None = None

    def param(self, field: str) -> str:
        """Return the client's name for a field; the index of an element is kept."""
        name, bracket, index = field.partition("[")
        return f"{self.params.get(name) or self.words.get(name, name)}{bracket}{index}"


@contextmanager
def named(names: Names) -> Iterator[None]:
    """Re-raise RequestErrors from the body in the client's words."""
    try:
        yield
    except RequestError as error:
        told = _renamed(error, names)
        found = error if told is None else told
        if names.max_model_len is not None:
            if isinstance(found, NeverFits):
                told = as_vllm_tells(found, names.max_model_len, names.param("max_new_tokens"))
            elif isinstance(found, InjectedFault) and found.status == FAULT_STATUS:
                told = fault_as_vllm_tells(found, names.max_model_len, names.param("text"))
        if told is None:
            raise
        raise told from error


def _renamed(error: RequestError, names: Names) -> RequestError | None:
    """Return a translated copy, since other requests may share the error; None: nothing to translate."""
    field, message, words = error.facts.get("field", ""), str(error), names.words
    given = [name for name in (*_MENTIONED, field.partition("[")[0]) if name in words]
    if given:
        message = re.sub(
            rf"(?<!['\w])({'|'.join(map(re.escape, given))})(?!['\w])", lambda found: words[found[1]], message
        )
    param = names.param(field)
    if (message, param) == (str(error), field):
        return None
    copy = type(error).__new__(type(error), message)
    vars(copy).update(vars(error))
    copy.facts = error.facts | ({"field": param} if field else {})
    return copy


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
