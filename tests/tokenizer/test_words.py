"""What a mock model says in another vocabulary: whole words of it."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lorrery.service.errors import SettingsError
from lorrery.tokenizer.base import NUM_WORDS
from lorrery.tokenizer.file import WORDS, BuiltinTokenizer, FileTokenizer
from tests.tokenizer.test_file import byte_fallback, byte_level, opened, unigram, word_piece

ENGLISH = WORDS.read_text().split()


def with_words(words: list[str]) -> FileTokenizer:
    """Return a tokenizer that knows these words, whose ids run backwards behind the letters."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {name: index for index, name in enumerate(sorted(letters))}
    first = len(vocabulary) + len(words) - 1
    vocabulary |= {f"Ġ{word}": first - index for index, word in enumerate(words)}
    model = tokenizers.Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<|endoftext|>"])
    return opened(lambda: model)


def said(tokenizer: FileTokenizer) -> list[str]:
    """The words, as each comes in the middle of an output."""
    first = tokenizer.word_ids[0]
    return [
        tokenizer.model.decode([first, token_id])[len(tokenizer.model.decode([first])) :]
        for token_id in tokenizer.word_ids
    ]


def test_the_words_are_found_where_the_vocabulary_has_them() -> None:
    tokenizer = with_words(ENGLISH)
    assert said(tokenizer) == [f" {word}" for word in ENGLISH]
    assert said(BuiltinTokenizer()) == [f" {word}" for word in ENGLISH]
    assert tokenizer.word_ids[0] > tokenizer.word_ids[-1]


def test_other_words_stand_in_for_those_that_it_has_not() -> None:
    mine = [f"mock{'abcdefghijklmnopqrstuvwxyz'[index % 26] * (1 + index // 26)}" for index in range(40)]
    tokenizer = with_words(ENGLISH[:1900] + mine)
    words = said(tokenizer)
    assert words[:1900] == [f" {word}" for word in ENGLISH[:1900]]
    assert len(words) == len(set(words)) == NUM_WORDS
    assert {word.strip() for word in words[1900:]} <= set(mine)


@pytest.mark.parametrize("kind", [byte_level, word_piece, unigram, byte_fallback])
def test_a_small_vocabulary_says_the_words_that_it_has(kind) -> None:
    tokenizer = opened(kind)
    words = said(tokenizer)
    assert " the" in words
    assert 0 < len(words) < NUM_WORDS
    assert all(word.startswith(" ") and word[1:].isalpha() for word in words)
    assert not tokenizer.special_ids & set(tokenizer.word_ids)
    assert len(set(tokenizer.word_ids)) == len(words)


def test_single_letters_are_better_than_nothing() -> None:
    words = said(with_words([]))
    assert {"a", "Z", "7", "!"} <= set(words)
    assert not {" ", "\ufffd", "\n"} & set(words)


def test_a_vocabulary_without_text_is_a_settings_error() -> None:
    model = tokenizers.Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    model.add_special_tokens(["<pad>"])
    with pytest.raises(SettingsError, match="no token has text"):
        opened(lambda: model).word_ids  # noqa: B018  reading it works them out
