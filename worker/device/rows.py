"""A batch's sequences while they run, individually and as arrays; `gpu` keeps them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.batch import PrefillWork
from lorrery.worker.device.output import (
    EOS_TOKEN_ID,
    TOKEN_STATE_STEP,
    Ending,
    Sampled,
    TokenIds,
    finish_token_ids,
    token_state,
    tokens_between,
)

BLOCK_STEPS, BLOCK_TOKENS = 8, 256
"""Tokens are made for this many steps at once, or for more until they are this many: numpy's cost per call equals that
of a few hundred tokens."""
_STEP = np.uint64(TOKEN_STATE_STEP)


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class DeviceSequence:
    """A sequence as it joins; not changed afterwards.

    Attributes:
        handle: its 32-bit name.
        prompt_tokens: length of the prompt proper.
        produced_tokens: output tokens made before it was resumed.
        seed: of its tokens, from `output.sequence_seed`.
        ending: where it ends, from `output.ending`.
        given: token ids of its output, if that is given.
        adapter_key: name and version of its LoRA adapter; empty for the base model.
        adapter_rank: of that adapter; 0 for the base model.
        sampled: its words in logits mode.
    """

    handle: int
    prompt_tokens: int
    produced_tokens: int
    seed: int
    ending: Ending
    given: TokenIds | None
    adapter_key: str
    adapter_rank: int
    sampled: Sampled | None

    def __init__(
        self,
        handle: int,
        prompt_tokens: int,
        produced_tokens: int,
        seed: int,
        ending: Ending,
        given: TokenIds | None = None,
        adapter_key: str = "",
        adapter_rank: int = 0,
        sampled: Sampled | None = None,
    ) -> None:
        self.handle = handle
        self.prompt_tokens = prompt_tokens
        self.produced_tokens = produced_tokens
        self.seed = seed
        self.ending = ending
        self.given = given
        self.adapter_key = adapter_key
        self.adapter_rank = adapter_rank
        self.sampled = sampled


@mypyc_attr(acyclic=True)
class Row:
    """A sequence in the batch. An `_offset` value plus the counter of decode steps gives the current value.

    Attributes:
        sequence: as it joined.
        order: of joining.
        cached_tokens: in the KV cache; maintained only until it decodes.
        decoding: whether it is past its prompt.
        position_offset: offset of the output position of its next token.
        first_position: output position of its prefill's token.
        last_position: output position of its last step.
        kv_offset: offset of its tokens in the KV cache.
        last_step: its last decode step.
    """

    __slots__ = (
        "cached_tokens",
        "decoding",
        "first_position",
        "kv_offset",
        "last_position",
        "last_step",
        "order",
        "position_offset",
        "sequence",
    )

    def __init__(self, sequence: DeviceSequence, order: int) -> None:
        self.sequence = sequence
        self.order = order
        self.cached_tokens = 0
        self.decoding = False
        self.position_offset = self.kv_offset = self.last_step = 0
        end = sequence.ending
        self.first_position = sequence.produced_tokens
        self.last_position = max(end.output_tokens - (0 if end.extra_step else 1), self.first_position)

    @property
    def ends_silently(self) -> bool:
        """Whether its last step gives no token."""
        return self.last_position >= self.sequence.ending.output_tokens

    def check(self, work: PrefillWork) -> None:
        """Check that a chunk of its prompt continues from the cached tokens.

        Raises:
            ValueError: it does not, or its `samples` is not whether it ends the prompt.
        """
        whole = self.sequence.prompt_tokens + self.sequence.produced_tokens
        computed = work.past_tokens + work.new_tokens
        if self.decoding or (self.cached_tokens and work.past_tokens != self.cached_tokens) or computed > whole:
            raise ValueError(
                f"sequence {work.handle} has {self.cached_tokens} of {whole} tokens in the cache;"
                f" a chunk of {work.new_tokens} after {work.past_tokens} does not follow"
            )
        if work.samples != (computed == whole):
            raise ValueError(
                f"sequence {work.handle}: samples is {work.samples}, but {computed} of {whole} tokens are computed"
            )

    def begin_to_decode(self, step: int) -> None:
        """Record that the prefill gave its token, and that decode step `step` is next."""
        self.decoding = True
        self.position_offset = self.first_position + 1 - step
        self.kv_offset = self.cached_tokens - step
        self.last_step = self.last_position - self.position_offset

    def tokens(self, first: int, last: int, spelling: TokenIds | None) -> TokenIds:
        """Return its tokens at output positions `first` to `last - 1`; `spelling`: as for `MockGpu`."""
        sequence = self.sequence
        return tokens_between(sequence.seed, first, last, sequence.ending, sequence.given, sequence.sampled, spelling)


class DecodeRows:
    """The decoding rows as arrays in join order, valid until one joins or leaves.

    Args:
        rows: in join order.
        step: the next decode step.
        spelling: as for `MockGpu`.
    """

    def __init__(self, rows: Iterable[Row], step: int, spelling: TokenIds | None) -> None:
        rows = list(rows)
        self._spelling = spelling
        self.orders: NDArray[np.int64] = np.array([row.order for row in rows], np.int64)
        self.handles: NDArray[np.uint32] = np.array([row.sequence.handle for row in rows], np.uint32)
        self._own = [
            (index, row)
            for index, row in enumerate(rows)
            if row.sequence.given is not None or row.sequence.sampled is not None
        ]
        # Words from logits cost a thousand times as much, so they are made only when needed.
        makes_ahead = all(row.sequence.sampled is None for row in rows)
        self._block_steps = max(BLOCK_STEPS, BLOCK_TOKENS // max(1, len(rows))) if makes_ahead else 1
        self._states: NDArray[np.uint64] = np.array(
            [token_state(row.sequence.seed, row.position_offset + step) for row in rows], np.uint64
        )
        self._first_step = self._block_step = step
        self._block: NDArray[np.uint32] = np.empty((0, len(rows)), np.uint32)

    def tokens(self, step: int, steps_ahead: int) -> TokenIds:
        """Return every row's token in decode step `step`, as if no sequence ended.

        Args:
            step: never before that of an earlier call.
            steps_ahead: steps certain to run, this one included; the limit for tokens made in advance.
        """
        index = step - self._block_step
        if index >= len(self._block):
            self._block, self._block_step, index = self._make(step, min(steps_ahead, self._block_steps)), step, 0
        tokens: TokenIds = self._block[index]
        return tokens

    def _make(self, step: int, num_steps: int) -> NDArray[np.uint32]:
        first = step - self._first_step
        advances = np.arange(first, first + num_steps, dtype=np.uint64) * _STEP  # modulo 2^64, as token states are
        block = finish_token_ids(self._states + advances[:, np.newaxis])
        if self._spelling is not None:
            block = self._spelling[block]
        for index, row in self._own:
            position = row.position_offset + step
            block[:, index] = row.tokens(position, position + num_steps, self._spelling)
        return block


def tokens_of_step(
    handles: NDArray[np.uint32],
    tokens: TokenIds,
    orders: NDArray[np.int64],
    finished: Sequence[Row],
    prefilled: Sequence[Row],
    spelling: TokenIds | None,
) -> tuple[NDArray[np.uint32], TokenIds]:
    """Return the handles that get a token in a step, and their tokens, in join order.

    Args:
        handles: of the decoding rows.
        tokens: theirs, as if none ended.
        orders: of their joining.
        finished: decoding rows that end with this step: by EOS, at a length, or without a token.
        prefilled: rows whose prefill gives its token; they do not decode yet.
        spelling: as for `MockGpu`.
    """
    if finished:
        silent = [row.sequence.handle for row in finished if row.ends_silently]
        if silent:
            keep = np.isin(handles, silent, invert=True)
            handles, tokens, orders = handles[keep], tokens[keep], orders[keep]
        for row in finished:
            if row.sequence.ending.reason is FinishReason.EOS and row.sequence.given is None:
                tokens[handles == row.sequence.handle] = EOS_TOKEN_ID if spelling is None else spelling[EOS_TOKEN_ID]
    if prefilled:
        gave = [row for row in prefilled if not (row.last_position == row.first_position and row.ends_silently)]
        handles = np.append(handles, np.array([row.sequence.handle for row in gave], np.uint32))
        firsts = [row.tokens(row.first_position, row.first_position + 1, spelling) for row in gave]
        tokens = np.concatenate([tokens, *firsts])
        by_order = np.argsort(np.append(orders, [row.order for row in gave]))
        handles, tokens = handles[by_order], tokens[by_order]
    return handles, tokens
