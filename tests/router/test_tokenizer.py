"""The built-in vocabulary, and one from a file."""

import threading
from importlib import resources
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from lorrery.chassis.errors import SettingsError
from lorrery.router.tokenizer import BuiltinTokenizer, FileTokenizer, open_tokenizer

BUILTIN = BuiltinTokenizer()
WORDS = resources.files("lorrery.router").joinpath("words.txt").read_text().split()

texts = st.text(st.characters(exclude_categories=["Cs"]))
words = st.sampled_from(WORDS).map(lambda word: " " + word)


def detokenized(token_ids: list[int], tokenizer=BUILTIN) -> str:
    detokenizer = tokenizer.detokenizer()
    return detokenizer.push(token_ids) + detokenizer.flush()


def test_every_word_with_its_space_is_one_token() -> None:
    assert len(WORDS) == BUILTIN.num_words == 1905
    for index, word in enumerate(WORDS):
        assert BUILTIN.encode_prompt(" " + word) == [1, 3 + index]
        assert detokenized([3 + index]) == " " + word


def test_no_token_has_more_text_than_the_longest() -> None:
    texts = [detokenized([token_id]) for token_id in range(3, 1908)]
    assert max(len(text.encode()) for text in texts) == BUILTIN.longest_token_bytes


def test_a_long_text_encodes_like_its_parts() -> None:
    part = " about the wéather, 世界!"
    assert BUILTIN.encode_stop(part * 1000) == BUILTIN.encode_stop(part) * 1000


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    text = " about above" * 20_000
    encoded: list[list[int]] = []
    thread = threading.Thread(target=lambda: encoded.append(BUILTIN.encode_prompt(text)))
    turns = 0
    thread.start()
    while thread.is_alive():
        thread.join(0.001)
        turns += 1
    assert len(encoded[0]) == 40_001
    # With Python's lock held throughout, the thread has ended, or nearly, before the first turn.
    assert turns > 5


def test_special_tokens_have_no_text() -> None:
    assert detokenized([0, 1, 2]) == ""


def test_a_special_token_typed_into_a_prompt_is_text() -> None:
    assert detokenized(BUILTIN.encode_stop("<s> </s><unk>")) == "<s> </s><unk>"
    assert not {0, 1, 2} & set(BUILTIN.encode_stop("<s> </s><unk>"))


@given(st.lists(st.one_of(texts, words)).map("".join))
def test_any_text_comes_back(text: str) -> None:
    token_ids = BUILTIN.encode_prompt(text)
    assert token_ids[0] == 1
    assert detokenized(token_ids) == text


@given(st.lists(words, min_size=1))
def test_words_count_as_one_token_each(chosen: list[str]) -> None:
    assert len(BUILTIN.encode_prompt("".join(chosen))) == 1 + len(chosen)


@given(st.lists(st.integers(0, BUILTIN.vocab_size + 10)), st.integers(1, 5))
def test_text_does_not_depend_on_how_tokens_arrive(token_ids: list[int], size: int) -> None:
    detokenizer = BUILTIN.detokenizer()
    pushed = "".join(detokenizer.push(token_ids[at : at + size]) for at in range(0, len(token_ids), size))
    assert pushed + detokenizer.flush() == detokenized(token_ids)


def test_a_character_waits_until_it_is_whole() -> None:
    detokenizer = BUILTIN.detokenizer()
    first, second = BUILTIN.encode_stop("é")
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([second]) == "é"
    assert detokenizer.push([first, 3]) == "\ufffd abc"


def test_an_id_outside_the_vocabulary_is_a_replacement_character() -> None:
    assert detokenized([3, 10**6, 4]) == " abc\ufffd able"


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(models.BPE({name: index for index, name in enumerate(alphabet)}, []))
    model.add_special_tokens(["<bos>"])
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", model.token_to_id("<bos>"))]
    )
    path = tmp_path / "tokenizer.json"
    model.save(str(path))
    return path


def test_a_tokenizer_file_brings_its_own_vocabulary(tokenizer_file: Path) -> None:
    tokenizer = open_tokenizer(tokenizer_file)
    assert isinstance(tokenizer, FileTokenizer)
    token_ids = tokenizer.encode_prompt("héllo 世界")
    assert token_ids[0] == 256
    assert (tokenizer.vocab_size, tokenizer.longest_token_bytes) == (257, len("<bos>"))
    assert tokenizer.encode_prompt("ab" * 5000) == [256, *tokenizer.encode_stop("ab") * 5000]
    assert tokenizer.encode_stop("héllo 世界") == token_ids[1:]
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.push([token_id]) for token_id in token_ids) + detokenizer.flush() == "héllo 世界"


def test_a_wrong_tokenizer_file_is_a_settings_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(SettingsError, match=r"router\.tokenizer"):
        open_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(SettingsError, match=r"router\.tokenizer"):
        open_tokenizer(path)
