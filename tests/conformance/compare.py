"""What of two answers to one request must agree, as plain data.

Kept: status, content type, each field and its type, the errors' type, code and param, the order and shape of a stream's
events, and every value that the request determines. Left out: ids, times, messages of errors, log-probabilities,
the number of tokens, and of outputs that nothing forces the text and the end.
"""

import json
from collections.abc import Iterable
from typing import Any

from tests.conformance.corpus import Case
from tests.conformance.sending import Answer

_HIDDEN = frozenset(
    {"id", "created", "created_at", "item_id", "completed_at", "call_id", "signature", "system_fingerprint"}
)
"""Fields whose values differ between two runs of one server; whether they are null counts."""
_OUTPUT = frozenset({"text", "content", "arguments", "delta", "partial_json", "reasoning", "input", "message"})
_ENDINGS = frozenset({"finish_reason", "stop_reason", "incomplete_details", "status"})
_IN_EVENTS = frozenset({"event", "delta", "choices"})
_COUNTS = frozenset({"completion_tokens", "total_tokens", "output_tokens", "sequence_number"})
_TOKENS = frozenset(
    {"tokens", "token_logprobs", "top_logprobs", "text_offset", "token_ids", "token", "logprob", "bytes"}
)


def normal(case: Case, answer: Answer) -> dict[str, Any]:
    """Return what of an answer must agree."""
    found: dict[str, Any] = {"status": answer.status, "type": answer.type}
    forced = is_forced(case)
    if (answer.type or "").startswith("text/event-stream"):
        return found | {"events": _events(answer.body, forced)}
    try:
        content = json.loads(answer.body)
    except ValueError:
        return found | {"body": answer.body if len(answer.body) < 200 else "..."}
    return found | {"body": _masked(content, forced)}


def is_forced(case: Case) -> bool:
    """Return whether a request says what its output is, to the end."""
    if not isinstance(case.body, dict):
        return False
    asked = case.body.get("structured_outputs"), case.body.get("output_config")
    most = case.body.get("max_tokens", case.body.get("max_output_tokens"))
    return any(isinstance(one, dict) for one in asked) and isinstance(most, int) and most >= 9


def _masked(value: Any, forced: bool, name: str = "", within: str = "") -> Any:
    if name in _ENDINGS and not forced:
        return "..."
    if isinstance(value, dict):
        if name == "error" and "message" in value:
            value = {**value, "message": "..."}
        return {key: _masked(one, forced, key, name) for key, one in value.items()}
    if isinstance(value, list):
        if name == "prompt_logprobs":
            return [None if one is None else _kinds(one) for one in value]
        if (name in _TOKENS and within) or name in ("token_ids", "prompt_token_ids"):
            return len(value) > 0
        if name == "logprobs" or (name == "content" and within == "logprobs"):
            value = value[:1]  # into which tokens a text is cut is the engine's choice
        return [_masked(one, forced, name, within) for one in value]
    if value is None:
        return None
    if name in _HIDDEN:
        return "..."
    if name in _OUTPUT and (not forced or within in _IN_EVENTS) and isinstance(value, str):
        return "..." if value else ""
    if name in _COUNTS:
        return 0
    if name in _TOKENS:
        return type(value).__name__
    return value


def _kinds(logprobs: dict[str, dict[str, Any]]) -> list[str]:
    """Return the fields of each of a prompt's token's alternatives; whether one is the token itself is chance."""
    return [",".join(f"{field}={type(value).__name__}" for field, value in one.items()) for one in logprobs.values()][
        :1
    ]


def _events(body: str, forced: bool) -> dict[str, Any]:
    """Return a stream's events, those of each choice by themselves: how choices alternate is a matter of timing.

    Of events that differ only in their text there is the first, and where the output is forced all the text.
    """
    found: dict[str, Any] = {}
    text = ""
    for block in body.split("\n\n"):
        lines = block.split("\n")
        data = next((line.removeprefix("data: ") for line in lines if line.startswith("data:")), "")
        named = [line for line in lines if line.startswith("event:")]
        try:
            content = json.loads(data)
        except ValueError:
            content = data
        text += "".join(_texts(content))
        choices = content.get("choices") if isinstance(content, dict) else None
        of_choice = found.setdefault(f"choice {choices[0]['index']}" if choices else "", [])
        shape = [*named, _masked(content, forced=forced, name="event")]
        if shape not in of_choice:
            of_choice.append(shape)
    return {**found, "text": "".join(sorted(text)) if len(found) > 2 else text} if forced else found


def _texts(content: Any) -> Iterable[str]:
    if not isinstance(content, dict):
        return
    for choice in content.get("choices") or ():
        yield choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    if isinstance(delta := content.get("delta"), str):
        yield delta
    elif isinstance(delta, dict):
        yield delta.get("text") or ""


def differing(case: Case, theirs: Answer, ours: Answer) -> list[str]:
    """Return where two answers differ: where their status does, nothing else is told."""
    found = list(differences(normal(case, theirs), normal(case, ours)))
    return found if theirs.status == ours.status else [one for one in found if one.startswith("status")]


def differences(theirs: Any, ours: Any, path: str = "") -> Iterable[str]:
    """Yield where two answers differ, as PATH: THEIRS -> OURS."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in [*theirs, *(name for name in ours if name not in theirs)]:
            at = f"{path}.{name}" if path else name
            if name not in ours:
                yield f"{at}: {_short(theirs[name])} -> absent"
            elif name not in theirs:
                yield f"{at}: absent -> {_short(ours[name])}"
            else:
                yield from differences(theirs[name], ours[name], at)
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif theirs != ours or type(theirs) is not type(ours):
        yield f"{path}: {_short(theirs)} -> {_short(ours)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
