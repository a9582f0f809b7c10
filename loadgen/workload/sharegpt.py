"""Reader of conversations in ShareGPT's format: a JSON list, or JSON Lines.

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}

The prompts are the texts; a tokenizer determines their lengths and those of the answers. There are no times.

The rules are those of vLLM's serving benchmark (vllm/benchmarks/datasets.py, `ShareGPTDataset`), so that results can be
compared: entries with fewer than two messages are left out; the order is drawn from the seed; messages are paired in
sequence, whoever speaks; and a pair is left out if its question or answer has fewer than 4 tokens, its question more
than 1,024, or both together more than 2,048. vLLM plays the first pair only. With more turns requested, a conversation
continues until a pair breaks a rule. Unlike vLLM's, lengths exclude special tokens, and entries are not reused when
there are too few.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lorrery.loadgen.workload.request import TraceError

__all__ = ["MAX_PROMPT_TOKENS", "MAX_TOTAL_TOKENS", "MIN_TOKENS", "Pair", "conversations", "read_sharegpt"]

MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
"""vLLM's limits for a pair."""

Pair = tuple[str, tuple[int, ...], int]
"""A question, its token ids, and the answer's number of tokens."""
Encode = Callable[[str], Sequence[int]]

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character: JSON may contain it (after truncation of text), but tokenizers reject it."""


def read_sharegpt(text: str) -> list[list[str]]:
    """Read the messages of each conversation that has two or more; half a surrogate pair becomes U+FFFD.

    Raises:
        TraceError: not of this format.
    """
    found: list[list[str]] = []
    for number, entry in enumerate(_entries(text), start=1):
        messages = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(messages, list):
            raise TraceError(f"entry {number}: expected an object with a list `conversations`")
        values = [message.get("value") if isinstance(message, dict) else None for message in messages]
        if not all(isinstance(value, str) for value in values):
            raise TraceError(f"entry {number}: each message needs a text `value`")
        if len(values) >= 2:
            found.append([_LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", str(value)) for value in values])
    return found


def conversations(
    messages: Sequence[Sequence[str]], encode: Encode, max_turns: int, rng: np.random.Generator
) -> Iterator[list[Pair]]:
    """Yield the playable pairs of each conversation in random order; conversations without any are skipped.

    Args:
        messages: as `read_sharegpt` returns them.
        encode: a text's tokens, without special ones.
        max_turns: most pairs of a conversation.
        rng: one permutation.
    """
    for row in rng.permutation(len(messages)).tolist():
        if pairs := list(_pairs(messages[row], encode, max_turns)):
            yield pairs


def _pairs(messages: Sequence[str], encode: Encode, max_turns: int) -> Iterator[Pair]:
    for first in range(0, min(len(messages) - 1, 2 * max_turns), 2):
        question = tuple(encode(messages[first]))
        answer_tokens = len(encode(messages[first + 1]))
        if (
            min(len(question), answer_tokens) < MIN_TOKENS
            or len(question) > MAX_PROMPT_TOKENS
            or len(question) + answer_tokens > MAX_TOTAL_TOKENS
        ):
            return
        yield messages[first], question, answer_tokens


def _entries(text: str) -> Iterable[Any]:
    if text.lstrip("\ufeff \t\r\n").startswith("["):
        try:
            entries: list[Any] = json.loads(text.lstrip("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise TraceError(f"not JSON: {error}") from None
        return entries
    return [_line(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _line(number: int, line: str) -> Any:  # noqa: ANN401  JSON
    try:
        return json.loads(line.lstrip("\ufeff"))
    except (ValueError, RecursionError):
        raise TraceError(f"line {number}: not JSON: {line[:80]!r}") from None
