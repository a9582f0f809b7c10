"""What a replica asks of a prefix cache: how much of a prompt is already computed.

The seam is as small as the caches behind it need. The static trie never changes once it is built, so looking is all
there is to do with it.
"""

from collections.abc import Sequence as Tokens
from typing import Protocol

from scheduler.core.sequence import Sequence


class PrefixCache(Protocol):
    """Knows which prompt prefixes have their keys and values in the KV pool."""

    def match(self, prompt_token_ids: Tokens[int], adapter_id: str | None) -> int:
        """Count the leading tokens of a prompt that are cached; mutates nothing.

        Whether all of them may be used is the caller's affair: a prompt that is cached to its last token gives its full
        length here, although most engines compute at least that last token.

        Args:
            prompt_token_ids: the prompt, in order.
            adapter_id: the adapter the prompt is for, None for the base model. A cache whose contents depend on the
                adapter answers for this one only.

        Returns:
            A length in 0..len(prompt_token_ids).
        """
        ...


def usable_tokens(cache: PrefixCache | None, sequence: Sequence, min_computed_tokens: int) -> int:
    """Count the leading tokens of a sequence that need no computation; mutates nothing.

    Args:
        cache: None holds nothing.
        sequence: whose prompt to look up; output that it made before it was queued again is never found.
        min_computed_tokens: tokens that are computed even if all are cached: 1, for the logits, or 0 as in llm-mock.
    """
    if cache is None:
        return 0
    adapter_id = sequence.adapter.adapter_id if sequence.adapter is not None else None
    hit = cache.match(sequence.prompt_token_ids, adapter_id)
    return max(0, min(hit, sequence.input_tokens - min_computed_tokens))
