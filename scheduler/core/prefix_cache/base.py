"""What a replica asks of a prefix cache: how much of a prompt is already computed.

The seam is as small as the caches behind it need. The static trie never changes once it is built, so looking is all
there is to do with it.
"""

from collections.abc import Sequence
from typing import Protocol


class PrefixCache(Protocol):
    """Knows which prompt prefixes have their keys and values in the KV pool."""

    def match(self, prompt_token_ids: Sequence[int], adapter_id: str | None) -> int:
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
