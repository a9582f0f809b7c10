"""What a replica asks of a prefix cache: how much of a prompt is already computed.

A cache may live in the KV pool and change as sequences come and go (`BlockCache`), or be fixed (`StaticTrie`, to which
all but looking means nothing). Looking never changes anything, not even who was used last: a head of line that is
looked up at every step would else keep its blocks for ever.
"""

from collections.abc import Sequence as Tokens

from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixCache:
    """Knows which prefixes have their keys and values in the KV pool.

    A base class and no protocol, so that compiled code calls its methods without looking them up. Not abstract by
    `abc`: mypyc gives the instances of such a class weak references that outlive them.

    Attributes:
        share_within_plan: whether a sequence may use what another one computes in the same step.
        num_evictions: blocks given up so far because their place was needed.
    """

    def __init__(self, *, share_within_plan: bool = False) -> None:
        self.share_within_plan = share_within_plan
        self.num_evictions = 0

    def match(self, token_ids: Tokens[int], adapter_key: str | None) -> int:
        """Count the leading tokens that are cached; mutates nothing.

        Whether all of them may be used is the caller's affair: a prompt that is cached to its last token gives its full
        length here, although most engines compute at least that last token.

        Args:
            token_ids: a prompt, in order.
            adapter_key: the adapter the prompt is for (`Adapter.key`), None for the base model. A cache whose contents
                depend on the adapter answers for this one only.

        Returns:
            A length in 0..len(token_ids).
        """
        raise NotImplementedError

    def reusable(self, sequence: Sequence) -> int:
        """Count the leading input tokens of a waiting sequence that it could take over; mutates nothing."""
        raise NotImplementedError

    def acquire(self, sequence: Sequence) -> None:
        """Pin the first `cached_tokens` of a sequence that enters the batch, and note that they were used."""
        raise NotImplementedError

    def commit(self, sequence: Sequence) -> None:
        """Let others see what a step has computed of a sequence's input: its first `computed_tokens`."""
        raise NotImplementedError

    def shows_alone(self, sequence: Sequence) -> bool:
        """Whether the commits of a sequence's coming steps, with nothing but `shrink` between, may be made as one.

        Places are then asked for once, as many as before the last of them. It may always say no.
        """
        raise NotImplementedError

    def release(self, sequence: Sequence, output_tokens: int) -> None:
        """Unpin what a sequence used that leaves the batch, and keep what it leaves in the pool.

        Args:
            sequence: it has computed `computed_tokens` of its input.
            output_tokens: it has produced so many since; the last of them was never cached.
        """
        raise NotImplementedError

    def shrink(self, spare_tokens: int) -> None:
        """Give up the least recently used of what nobody pins, until it takes no more than so many tokens."""
        raise NotImplementedError

    def lose(self) -> None:
        """Forget what lay in a worker's memory; the worker is gone."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class SharedBlocks(PrefixCache):
    """A prefix cache whose blocks lie in the KV pool, so that what sequences share counts once.

    Attributes:
        num_pins: blocks that sequences of the batch use; one that two use counts twice.
        num_pinned: distinct blocks that sequences of the batch use.
        num_unpinned: blocks that nobody uses, kept until their place is needed.
    """

    def __init__(self, *, share_within_plan: bool = False) -> None:
        super().__init__(share_within_plan=share_within_plan)
        self.num_pins = 0
        self.num_pinned = 0
        self.num_unpinned = 0

    def num_shareable(self, sequence: Sequence) -> int:
        """Count the blocks that a waiting sequence would find, and that others pin already."""
        raise NotImplementedError


def usable_tokens(cache: PrefixCache | None, sequence: Sequence, min_computed_tokens: int) -> int:
    """Count the leading tokens of a sequence that need no computation; mutates nothing.

    Args:
        cache: None holds nothing.
        sequence: whose input to look up.
        min_computed_tokens: tokens that are computed even if all are cached: 1, for the logits, or 0 as in llm-mock.
    """
    if cache is None:
        return 0
    return max(0, min(cache.reusable(sequence), sequence.input_tokens - min_computed_tokens))
