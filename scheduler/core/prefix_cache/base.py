"""The interface of a prefix cache to a replica: how much of a prompt is already computed; and what caches compare.

A cache compares the content of inputs (`content_of`): their tokens, or the ids that a trace gives to runs of them. A
trace such as Mooncake's only gives an id for each 512 tokens, which says what other prompts have the same tokens.
Comparing ids is enough then, without making 512 tokens of each. Otherwise the tokens themselves are compared, so there
is no hash that could collide. Both are one `bytes`, which machines compare fastest; two inputs agree in as many leading
tokens as their leading units of equal kind do.

A cache may live in the KV pool and change as sequences come and go (`BlockCache`), or be fixed (`StaticTrie`, for which
all methods but look-ups are no-ops). A look-up never changes anything, not even the order of last use: a head of line
that is looked up at every step would otherwise keep its blocks for ever.
"""

from array import array
from collections.abc import Sequence as Tokens

from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Content, Sequence
from lorrery.vocabulary import u32
from lorrery.vocabulary.compiling import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixCache:
    """Knows which prefixes have their keys and values in the KV pool.

    A base class and not a protocol, so that compiled code calls its methods without a lookup. Not abstract by `abc`:
    mypyc gives the instances of such a class weak references that outlive them.

    Attributes:
        share_within_plan: whether a sequence finds what is scheduled for another one, in the same step too.
        num_evictions: blocks evicted so far because their place was needed.
    """

    def __init__(self, *, share_within_plan: bool = False) -> None:
        self.share_within_plan = share_within_plan
        self.num_evictions = 0

    def match(self, token_ids: Tokens[int], adapter_key: str | None, cache_salt: str = "") -> int:
        """Count the leading tokens that are cached; mutates nothing.

        The caller decides whether all of them may be used: a prompt that is cached to its last token gives its full
        length here, although most engines compute at least that last token.

        Args:
            token_ids: a prompt, in order.
            adapter_key: the adapter the prompt is for (`Adapter.key`), None for the base model. A cache whose contents
                depend on the adapter matches for this one only.
            cache_salt: of the prompt (`Sequence.cache_salt`).

        Returns:
            A length in 0..len(token_ids).
        """
        raise NotImplementedError

    def reusable(self, sequence: Sequence) -> int:
        """Count the leading input tokens of a waiting sequence that it could take over; mutates nothing."""
        raise NotImplementedError

    def steps_unchanged(self, sequence: Sequence, limit: int) -> int:
        """Return after how many decode steps, at most `limit`, output may have extended what a sequence would find."""
        return limit

    def acquire(self, sequence: Sequence) -> None:
        """Pin the first `cached_tokens` of a sequence that enters the batch, and note that they were used."""
        raise NotImplementedError

    def schedule(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the next step computes a sequence's input up to its first `num_tokens`."""

    def resume(self, sequence: Sequence) -> None:
        """Go on with a sequence whose output so far has become part of its input, and which keeps its blocks."""

    def stand_still(self, sequence: Sequence) -> None:
        """Note that a decoding sequence gets no further token; its last block is found once it is released."""

    def commit(self, sequence: Sequence) -> None:
        """Make visible to others what a step has computed of a sequence's input: its first `computed_tokens`."""
        raise NotImplementedError

    def shows_alone(self, sequence: Sequence) -> bool:
        """Return whether the commits of a sequence's next steps, with only `shrink` calls between, may be one.

        Their blocks are then requested once, as many as before the last of them. False is always a valid result.
        """
        raise NotImplementedError

    def release(self, sequence: Sequence, output_tokens: int) -> None:
        """Unpin the blocks of a sequence that leaves the batch, and keep what it has computed.

        Args:
            sequence: it has computed `computed_tokens` of its input.
            output_tokens: tokens that it has produced since; the last of them was never cached.
        """
        raise NotImplementedError

    def shrink(self, spare_tokens: int) -> None:
        """Evict unpinned blocks, least recently used first, until they take at most this many tokens."""
        raise NotImplementedError

    def lose(self) -> None:
        """Forget what was in a worker's memory; the worker is gone."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class SharedBlocks(PrefixCache):
    """A prefix cache whose blocks are in the KV pool, so that blocks that sequences share count once.

    Attributes:
        num_pins: blocks that sequences of the batch use; one that two use counts twice.
        num_pinned: distinct blocks that sequences of the batch use.
        num_unpinned: blocks that no sequence uses, kept until their place is needed.
        running: the batch whose output can be found as it fills blocks, with `share_within_plan`; set by the replica.
        unseen_tokens: newest tokens of a decoding sequence that cannot be found though the step that computes them is
            scheduled: 1 if the scheduler is a step ahead of them.
    """

    def __init__(self, *, share_within_plan: bool = False) -> None:
        super().__init__(share_within_plan=share_within_plan)
        self.running: Running | None = None
        self.unseen_tokens = 0
        self.num_pins = 0
        self.num_pinned = 0
        self.num_unpinned = 0

    def num_shareable(self, sequence: Sequence) -> int:
        """Count the blocks that a waiting sequence would find and that others already pin."""
        raise NotImplementedError


def usable_tokens(cache: PrefixCache | None, sequence: Sequence, min_computed_tokens: int) -> int:
    """Count the leading tokens of a sequence that need no computation; mutates nothing.

    Args:
        cache: None: nothing is cached.
        sequence: whose input to look up.
        min_computed_tokens: tokens that are computed even if all are cached: 1, for the logits, or 0 as in llm-mock.
    """
    if cache is None or sequence.skips_prefix_cache:
        return 0
    return max(0, min(cache.reusable(sequence), sequence.input_tokens - min_computed_tokens))


_TOKEN_BYTES = array("I").itemsize


def of_tokens(token_ids: Tokens[int]) -> Content:
    """Return the content of an input whose tokens are known."""
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        data = token_ids.tobytes()
    else:
        data = array("I", token_ids).tobytes()
    return Content(data, 1, _TOKEN_BYTES, len(data) // _TOKEN_BYTES)


def of_u32(data: bytes) -> Content:
    """Return the content of an input whose tokens are on the wire as `vocabulary.u32` packs them; usually no copy."""
    data = u32.native(data)
    return Content(data, 1, _TOKEN_BYTES, len(data) // _TOKEN_BYTES)


def of_runs(run_ids: Tokens[int], run_tokens: int, num_tokens: int) -> Content:
    """Return the content of an input of `num_tokens`, given an id for each run of `run_tokens`, the last cut short.

    Equal ids mean equal tokens after equal ones, different ids mean tokens that differ from the first on.
    """
    ids = run_ids if isinstance(run_ids, array) and run_ids.typecode == "Q" else array("Q", run_ids)
    assert len(ids) == -(-num_tokens // run_tokens), "a run without an id"
    return Content(ids.tobytes(), run_tokens, ids.itemsize, num_tokens)


def content_of(sequence: Sequence) -> Content:
    """Return the content of a sequence's input, as far as it is known; it is cached there."""
    content = sequence.content
    if content is None:
        content = sequence.content = of_tokens(sequence.prompt_token_ids)
    if sequence.produced_tokens:
        num_known = content.num_tokens - len(sequence.prompt_token_ids)  # of the output
        num_produced = min(sequence.produced_tokens, len(sequence.output_token_ids))
        if num_known < num_produced:
            content = sequence.content = with_output(content, sequence, num_known, num_produced)
    return content


def with_output(content: Content, sequence: Sequence, first: int, end: int) -> Content:
    """Return a content extended by a sequence's output tokens from `first` to `end`, as far as they are known."""
    if content.unit_tokens != 1 or len(sequence.prompt_token_ids) < sequence.prompt_tokens:
        return content
    output = of_tokens(sequence.output_token_ids[first:end])
    return Content(content.data + output.data, 1, _TOKEN_BYTES, content.num_tokens + output.num_tokens)
