"""A workload: requests with intended send times, lengths and names, in send order.

A workload states a client's intention, not a cluster's response. It comes from a generator (`slora`, `arrivals`,
`conversations`) or from a file (`traces`), and it feeds the live driver and the simulator alike.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lorrery.vocabulary.compiling import mypyc_attr

MOST_TOKENS = 2**31 - 1
"""In one prompt or answer: they are counted in 32 bits on the wire."""
BLOCK_TOKENS = 512
"""Prompt tokens for each of `hash_ids`, as in Mooncake's traces, unless said otherwise."""


class TraceError(ValueError):
    """A trace cannot be read; the message names the line."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The parts of a prompt: a part shared with others, all earlier turns of its session, and its own words.

    Attributes:
        session: requests of one session are sequential: each is sent after the previous answer has ended.
        number: its place in the session, from 0.
        own_tokens: prompt tokens that are neither shared nor of earlier turns.
        think_seconds: device seconds from the end of the previous answer to the sending; for the first turn 0.
        shared_group: which shared part all prompts of the session begin with.
        shared_tokens: its length; 0: none is shared.
        text: the turn's own words, from a data set; empty: they are drawn.
        token_ids: the tokens of `text`, `own_tokens` of them.
        alone: the prompt has nothing of the earlier turns but what its `hash_ids` say; only its time follows from them.
    """

    session: int
    number: int
    own_tokens: int
    think_seconds: float = 0.0
    shared_group: int = 0
    shared_tokens: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    alone: bool = False


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class WorkloadRequest:
    """One request as its client intends it. Never mutated; a frozen record takes three times as long to make.

    Attributes:
        index: position in the workload, from 0; it seeds the prompt and the output.
        at_seconds: intended send time in device seconds from the start of the run, never below 0; for a later turn of a
            session: when the session begins.
        prompt_tokens: length of the prompt, at least 1; for a later turn: if every answer has its true length.
        output_tokens: true length of the output, at least 1. No scheduling decision may see it.
        adapter_id: the LoRA adapter, or None for the base model.
        tenant_id: its tenant; may be empty.
        hash_ids: ids of consecutive blocks of the prompt (equal leading ids: equal prefix), or None if unknown.
            `len(hash_ids) == ceil(prompt_tokens / block_tokens)`. Readers of traces make an `array("Q")`, a fifth of a
            tuple's size, whose bytes prefix caches compare.
        turn: parts of the prompt; None: it consists of its own words, or follows `hash_ids`. The turns of a session are
            adjacent in a workload.
        priority: 32 bits, signed; a lower one is earlier under `scheduler.policy = "priority"`.
        cache_salt: prompts with different ones share no cached prefix.
        block_tokens: prompt tokens for each of `hash_ids`.
    """

    index: int
    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    adapter_id: str | None
    tenant_id: str
    hash_ids: Sequence[int] | None
    turn: Turn | None
    priority: int
    cache_salt: str
    block_tokens: int

    def __init__(
        self,
        index: int,
        at_seconds: float,
        prompt_tokens: int,
        output_tokens: int,
        adapter_id: str | None = None,
        tenant_id: str = "",
        hash_ids: Sequence[int] | None = None,
        turn: Turn | None = None,
        priority: int = 0,
        cache_salt: str = "",
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.index = index
        self.at_seconds = at_seconds
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.adapter_id = adapter_id
        self.tenant_id = tenant_id
        self.hash_ids = hash_ids
        self.turn = turn
        self.priority = priority
        self.cache_salt = cache_salt
        self.block_tokens = block_tokens


def of_columns(
    index: list[int],
    at_seconds: list[float],
    prompt_tokens: list[int],
    output_tokens: list[int],
    adapter_ids: list[str | None],
) -> list[WorkloadRequest]:
    """Make requests of one tenant without sessions and known prefixes from columns of equal length."""
    return [
        WorkloadRequest(number, seconds, prompt, output, adapter_id)
        for number, seconds, prompt, output, adapter_id in zip(  # noqa: B905 - compiled, a strict one takes ten times
            index, at_seconds, prompt_tokens, output_tokens, adapter_ids
        )
    ]


def sessions(workload: Iterable[WorkloadRequest]) -> Iterator[list[WorkloadRequest]]:
    """Yield the requests session by session; a request without a session is yielded alone."""
    for _, turns in groupby(workload, key=lambda one: -1 - one.index if one.turn is None else one.turn.session):
        yield list(turns)
