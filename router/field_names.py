"""Translates errors to a client's field names: the handler uses those of Lorrery's gRPC, other protocols their own."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from lorrery.router.context_length import FAULT_STATUS, as_vllm_tells, fault_as_vllm_tells
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
