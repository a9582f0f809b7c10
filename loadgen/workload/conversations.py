"""Conversations: questions and answers as texts. A tokenizer determines their lengths; there are no times.

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}     ShareGPT
    {"conversation": [{"role": "user", "content": "..."}, ...]}                                      LMSYS-Chat-1M
    {"messages": [{"role": "system", "content": "..."}, ...]}                                        OpenAI
    [{"role": "user", "content": "..."}, ...]                                                        the list alone

ShareGPT. The rules are those of vLLM's serving benchmark (vllm/benchmarks/datasets.py, `ShareGPTDataset`), so that
results can be compared: entries with fewer than two messages are left out; the order is drawn from the seed; messages
are paired in sequence, whoever speaks; and a pair is left out if its question or answer has fewer than 4 tokens, its
question more than 1,024, or both together more than 2,048. vLLM plays the first pair only. With more turns requested, a
conversation continues until a pair breaks a rule. Unlike vLLM's, lengths exclude special tokens, and entries are not
reused when there are too few.

Roles. An answer is what the assistant says, with its calls of tools; a question is all that others say before it,
system messages and results of tools included, joined by line ends. What follows the last answer is left out, since its
answer's length is not known; there are no limits on lengths.
"""

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from lorrery.loadgen.workload.request import TraceError
from lorrery.loadgen.workload.spool import MemorySpool, Spool

__all__ = ["MAX_PROMPT_TOKENS", "MAX_TOTAL_TOKENS", "MIN_TOKENS", "Conversations", "Encode", "Pair", "list_key"]

MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
"""vLLM's limits for a pair."""

Pair = tuple[str, tuple[int, ...], int]
"""A question, its token ids, and the answer's number of tokens."""
Encode = Callable[[str], Sequence[int]]

_LISTS: Final = {"conversations": "ShareGPT's conversations", "conversation": "LMSYS' conversations"}
_LISTS_OF_ROLES: Final = {"messages": "OpenAI's lists of messages"}
_ANSWERS: Final = ("assistant", "model", "gpt")
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Half of a character: JSON may contain it (after truncation of text), but tokenizers reject it."""


def list_key(entry: object) -> tuple[str, str] | None:
    """Return the key of an entry's messages, empty if it is the list itself, and its form's title; None: no such."""
    if isinstance(entry, list):
        return ("", "lists of messages") if entry and isinstance(entry[0], dict) and "role" in entry[0] else None
    if isinstance(entry, dict):
        for key, title in (_LISTS | _LISTS_OF_ROLES).items():
            if key in entry:
                return key, title
    return None


class Conversations:
    """The conversations of a file, each read when it is played: only the places of their texts are in memory.

    Attributes:
        num_entries: of the file.
        has_limits: whether vLLM's limits on lengths apply.
        num_other_parts: parts of messages that are no text, such as images; they are left out.

    Args:
        entries: place and value of each.
        key: of their messages, as `list_key` returns it.
        spool: keeps their texts; None: in memory.

    Raises:
        TraceError: not of this format, or without an entry.
    """

    def __init__(self, entries: Iterable[tuple[str, Any]], key: str, spool: Spool | None = None) -> None:
        self._spool = MemorySpool() if spool is None else spool
        self._places, self._sizes = array("q"), array("q")
        self.has_limits = True
        self.num_entries = self.num_other_parts = 0
        for where, entry in entries:
            self.num_entries += 1
            messages = entry if not key else entry.get(key) if isinstance(entry, dict) else None
            if not isinstance(messages, list):
                wanted = f"an object with a list `{key}`" if key else "a list of messages"
                raise TraceError(f"{where}: expected {wanted}")
            if messages and isinstance(messages[0], dict) and "role" in messages[0]:
                self.has_limits = False
                texts = list(self._by_role(where, messages))
            else:
                texts = [_value(where, message) for message in messages]
            if len(texts) >= 2:
                piece = json.dumps(texts, ensure_ascii=False).encode()
                self._places.append(self._spool.add(piece))
                self._sizes.append(len(piece))
        if not self.num_entries:
            raise TraceError("there is no conversation in it")

    def __len__(self) -> int:
        return len(self._places)

    def texts(self, row: int) -> list[str]:
        """Return the messages of a conversation, two or more; half a surrogate pair is U+FFFD."""
        texts: list[str] = json.loads(self._spool.read(self._places[row], self._sizes[row]))
        return texts

    def played(self, encode: Encode, max_turns: int, rng: np.random.Generator) -> Iterator[list[Pair]]:
        """Yield the playable pairs of each conversation in random order; conversations without any are skipped.

        Args:
            encode: a text's tokens, without special ones.
            max_turns: most pairs of a conversation.
            rng: one permutation.
        """
        for row in rng.permutation(len(self)).tolist():
            if pairs := list(self._pairs(self.texts(row), encode, max_turns)):
                yield pairs

    def _pairs(self, texts: Sequence[str], encode: Encode, max_turns: int) -> Iterator[Pair]:
        for first in range(0, min(len(texts) - 1, 2 * max_turns), 2):
            question = tuple(encode(texts[first]))
            answer_tokens = len(encode(texts[first + 1]))
            least = MIN_TOKENS if self.has_limits else 1
            if min(len(question), answer_tokens) < least or (
                self.has_limits
                and (len(question) > MAX_PROMPT_TOKENS or len(question) + answer_tokens > MAX_TOTAL_TOKENS)
            ):
                return
            yield texts[first], question, answer_tokens

    def _by_role(self, where: str, messages: Sequence[object]) -> Iterator[str]:
        """Yield questions and answers in turn."""
        question: list[str] = []
        answer: list[str] = []
        for message in messages:
            role = message.get("role") if isinstance(message, dict) else None
            if not isinstance(message, dict) or not isinstance(role, str):
                raise TraceError(f"{where}: each message needs a `role` and `content`")
            text = self._content(where, message)
            if role in _ANSWERS:
                if question:  # a greeting answers nothing
                    answer.append(text)
                continue
            if answer:
                yield "\n".join(question)
                yield "\n".join(answer)
                question, answer = [], []
            question.append(text)
        if answer:
            yield "\n".join(question)
            yield "\n".join(answer)

    def _content(self, where: str, message: Mapping[str, Any]) -> str:
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else part for part in content]
            self.num_other_parts += sum(not isinstance(text, str) for text in texts)
            content = "".join(text for text in texts if isinstance(text, str))
        if calls:
            content = (content or "") + json.dumps(calls, ensure_ascii=False)
        if content is None and "content" in message:
            content = ""
        if not isinstance(content, str):
            raise TraceError(f"{where}: content is {str(content)[:40]!r}; expected a text, or a list of parts")
        return _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", content)


def _value(where: str, message: object) -> str:
    value = message.get("value") if isinstance(message, dict) else None
    if not isinstance(value, str):
        raise TraceError(f"{where}: each message needs a text `value`")
    return _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
