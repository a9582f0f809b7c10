"""Selects the tokens of a vocabulary for a mock model's output: whole words, one token each.

The words are those of the shipped tokenizer, which are one token in the usual vocabularies too. For a word that is not,
another whole word of the vocabulary is used; a small vocabulary may have fewer words than the model. A vocabulary
without whole words, such as of single letters, provides its visible text.
"""

from collections.abc import Iterable, Iterator

import tokenizers

from lorrery.tokenizer.detokenize import REPLACEMENT


def word_ids(model: tokenizers.Tokenizer, words: Iterable[str], num_ids: int, special: frozenset[int]) -> list[int]:
    """Return the tokens for an output, each once, at most one per word; the words' own tokens come first, in order.

    Args:
        model: the vocabulary.
        words: without spaces.
        num_ids: token ids are below it.
        special: tokens without text.
    """
    words = list(words)
    found: dict[int, None] = {}
    for word in words:
        for text in (f" {word}", word):
            token_ids = model.encode(text, add_special_tokens=False).ids
            if len(token_ids) == 1 and token_ids[0] not in special and _whole_word(model, token_ids[0]) == word:
                found[token_ids[0]] = None
                break
    others = [token_id for token_id in range(num_ids) if token_id not in special and token_id not in found]
    _fill(found, (token_id for token_id in others if _whole_word(model, token_id)), len(words))
    if not found:
        _fill(found, _visible(model, others), len(words))
    return list(found)


def _fill(found: dict[int, None], more: Iterator[int], num_wanted: int) -> None:
    while len(found) < num_wanted and (token_id := next(more, None)) is not None:
        found[token_id] = None


def _whole_word(model: tokenizers.Tokenizer, token_id: int) -> str:
    """Return the word that a token is in any context; empty: it is not a word, or only a part of one."""
    one, two = model.decode([token_id]), model.decode([token_id, token_id])
    word = one.strip(" ")
    return word if word.isalpha() and two == f"{one} {word}" and REPLACEMENT not in word else ""


def _visible(model: tokenizers.Tokenizer, token_ids: Iterable[int]) -> Iterator[int]:
    for token_id in token_ids:
        text = model.decode([token_id])
        if text.strip() and text.isprintable() and REPLACEMENT not in text:
            yield token_id
