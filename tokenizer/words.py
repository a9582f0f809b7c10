"""Which tokens of a vocabulary a mock model's output is made of: whole words, one token each.

The words are those of the shipped tokenizer, which the usual vocabularies have as one token too. For a word that is
none there, another whole word of the vocabulary stands in; a small vocabulary may have fewer words than the model. One
without any whole word, such as of single letters, gives what it has of visible text.
"""

from collections.abc import Iterable, Iterator

import tokenizers

from lorrery.tokenizer.detokenize import REPLACEMENT


def word_ids(model: tokenizers.Tokenizer, words: Iterable[str], num_ids: int, special: frozenset[int]) -> list[int]:
    """Return the tokens of an output, each once, at most one for each word; those of the words, in their order, first.

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
    """Return the word that a token is, whatever is before it; empty: it is none, or only a part of one."""
    one, two = model.decode([token_id]), model.decode([token_id, token_id])
    word = one.strip(" ")
    return word if word.isalpha() and two == f"{one} {word}" and REPLACEMENT not in word else ""


def _visible(model: tokenizers.Tokenizer, token_ids: Iterable[int]) -> Iterator[int]:
    for token_id in token_ids:
        text = model.decode([token_id])
        if text.strip() and text.isprintable() and REPLACEMENT not in text:
            yield token_id
