"""Errors in a client's words: the handler writes fields and calls as Lorrery's gRPC does, others have their own."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from lorrery.chassis.errors import InjectedFault, NeverFits, RequestError
from lorrery.router.context_length import FAULT_STATUS, as_vllm_tells, fault_as_vllm_tells

EMPTY = "prompt is empty; give text or token_ids"
_MENTIONED = ("ListAdapters", EMPTY, "max_new_tokens")
"""Messages about other fields, or none, write these."""


class Names(NamedTuple):
    """What a kind of client calls things, by the handler's name.

    Attributes:
        words: for messages, where they are about that field or always write it as a name, and for `param`.
        params: for `param` alone, where a message means the word.
        max_model_len: most tokens of a prompt and its output, where the client reads vLLM's words on those; else None.
    """

    words: Mapping[str, str]
    params: Mapping[str, str] = {}
    max_model_len: int | None = None

    def param(self, field: str) -> str:
        """Return what the client calls a field; an element's index stays."""
        name, bracket, index = field.partition("[")
        return f"{self.params.get(name) or self.words.get(name, name)}{bracket}{index}"


@contextmanager
def named(names: Names) -> Iterator[None]:
    """Raise errors of what runs within again, in a client's words."""
    try:
        yield
    except RequestError as error:
        told = _renamed(error, names)
        found = error if told is None else told
        if names.max_model_len is not None:
            if isinstance(found, NeverFits):
                told = as_vllm_tells(found, names.max_model_len, names.param("text"), names.param("max_new_tokens"))
            elif isinstance(found, InjectedFault) and found.status == FAULT_STATUS:
                told = fault_as_vllm_tells(found, names.max_model_len, names.param("text"))
        if told is None:
            raise
        raise told from error


def _renamed(error: RequestError, names: Names) -> RequestError | None:
    """Return a copy, for a refusal may be kept for others; None: nothing has another name."""
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
