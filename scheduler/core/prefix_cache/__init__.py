"""Prefix caches: which leading tokens of a prompt need no computation."""

from lorrery.scheduler.core.prefix_cache.base import PrefixCache
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.static_trie import StaticTrie

__all__ = ["BlockCache", "PrefixCache", "StaticTrie"]
