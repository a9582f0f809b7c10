"""Conversations: files of questions and answers as texts, and drawn sessions of several turns.

A session is a conversation: the prompt of turn k + 1 has the whole history (its shared part, all earlier turns and
their answers) and its own words. It is sent when the answer to turn k has ended and the think time has passed, so the
loop is closed within a session: slower answers mean fewer requests.

    prompt tokens(k) = shared tokens + sum over j < k of (own tokens(j) + output tokens(j)) + own tokens(k)

In files a tokenizer determines lengths; there are no times.

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
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.columns import MemorySpool, Spool
from lorrery.loadgen.workload.request import TraceError, Turn, WorkloadRequest, sessions

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


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Distributions of sessions.

    Attributes:
        turns: number of turns, uniform over [low, high].
        input_range: own tokens of a turn, uniform over [low, high].
        output_range: likewise for its output.
        think_seconds: mean of the exponential think times; 0: none.
    """

    turns: tuple[int, int]
    input_range: tuple[int, int]
    output_range: tuple[int, int]
    think_seconds: float

    def __post_init__(self) -> None:
        for name in ("turns", "input_range", "output_range"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name} is {low}:{high}; it must begin at 1 or more and not be empty")


def chat(at_seconds: npt.NDArray[np.float64], shape: ChatShape, rng: np.random.Generator) -> list[WorkloadRequest]:
    """Draw sessions that begin at these times; the turns of each are adjacent and in order.

    Raises:
        ValueError: an empty range, or one that begins below 1.
    """
    counts = rng.integers(*shape.turns, len(at_seconds), endpoint=True)
    total = int(counts.sum())
    own = rng.integers(*shape.input_range, total, endpoint=True).tolist()
    outputs = rng.integers(*shape.output_range, total, endpoint=True).tolist()
    thinks = rng.exponential(shape.think_seconds, total).tolist()
    made: list[WorkloadRequest] = []
    for session, (at, count) in enumerate(zip(at_seconds.tolist(), counts.tolist(), strict=True)):
        first = len(made)
        turns = [
            Turn(session, number, own[first + number], thinks[first + number] if number else 0.0)
            for number in range(count)
        ]
        made += session_requests(first, at, turns, outputs[first : first + count])
    return made


def session_requests(
    first_index: int, at_seconds: float, turns: Iterable[Turn], output_tokens: Sequence[int]
) -> list[WorkloadRequest]:
    """Build the requests of one session, without a shared part."""
    made: list[WorkloadRequest] = []
    history = 0
    for turn, output in zip(turns, output_tokens, strict=True):
        prompt = history + turn.own_tokens
        made.append(WorkloadRequest(first_index + turn.number, at_seconds, prompt, output, turn=turn))
        history = prompt + output
    return made


def share_prefixes(
    workload: Sequence[WorkloadRequest], num_tokens: int, num_groups: int, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """Prepend a shared part to each prompt, one of `num_groups`, drawn uniformly for each session or request.

    Raises:
        ValueError: no token or no group.
    """
    if num_tokens < 1 or num_groups < 1:
        raise ValueError(f"a shared prefix of {num_tokens} tokens in {num_groups} groups; both must be 1 or more")
    made: list[WorkloadRequest] = []
    for turns in sessions(workload):
        group = int(rng.integers(num_groups))
        for request in turns:
            turn = request.turn or Turn(request.index, 0, request.prompt_tokens)
            turn = replace(turn, shared_group=group, shared_tokens=num_tokens)
            made.append(replace(request, prompt_tokens=request.prompt_tokens + num_tokens, turn=turn))
    return made
