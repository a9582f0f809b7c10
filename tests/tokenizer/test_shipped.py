"""The shipped tokenizer: its ids, its text, and its folder as Hugging Face's libraries read it."""

import json
import threading
from pathlib import Path

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lorrery.tokenizer.base import BOS_ID, EOS_ID, FIRST_WORD_ID, NUM_WORDS
from lorrery.tokenizer.build import build
from lorrery.tokenizer.chat import ChatTemplate
from lorrery.tokenizer.file import SHIPPED, BuiltinTokenizer
from lorrery.tokenizer.file import WORDS as WORDS_FILE

BUILTIN = BuiltinTokenizer()
LIBRARY = tokenizers.Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
WORDS = WORDS_FILE.read_text().split()
SPECIAL = ("<unk>", "<s>", "</s>")

texts = st.text(st.characters(exclude_categories=["Cs"]))
words = st.sampled_from(WORDS).map(lambda word: " " + word)


def detokenized(token_ids: list[int], tokenizer=BUILTIN) -> str:
    detokenizer = tokenizer.detokenizer()
    return detokenizer.push(token_ids) + detokenizer.flush()


def test_every_word_with_its_space_is_one_token() -> None:
    assert len(WORDS) == NUM_WORDS == 1905
    assert (1, BUILTIN.eos_id, 3) == (BOS_ID, EOS_ID, FIRST_WORD_ID)
    for index, word in enumerate(WORDS):
        assert BUILTIN.encode_prompt(" " + word) == [1, 3 + index]
        assert detokenized([3 + index]) == " " + word


def test_no_token_has_more_text_than_the_longest() -> None:
    texts = [detokenized([token_id]) for token_id in range(LIBRARY.get_vocab_size())]
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


@given(st.lists(st.one_of(texts, words)).map("".join).filter(lambda text: not any(name in text for name in SPECIAL)))
def test_the_folder_and_the_tokenizer_in_use_agree(text: str) -> None:
    token_ids = BUILTIN.encode_prompt(text)
    assert LIBRARY.encode(text).ids == token_ids
    assert LIBRARY.decode(token_ids) == text == detokenized(token_ids)


def test_the_folder_is_what_its_script_writes(tmp_path: Path) -> None:
    build(tmp_path / "built")
    names = sorted(path.name for path in SHIPPED.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "built").iterdir())
    for name in names:
        assert json.loads((tmp_path / "built" / name).read_text()) == json.loads((SHIPPED / name).read_text())


def test_a_conversation_has_the_tokens_that_a_client_counts() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": " about <unk wéather"}]
    config = json.loads((SHIPPED / "tokenizer_config.json").read_text())
    template = ChatTemplate(config["chat_template"], config, "there")
    there = template.render(messages, 1000, {"add_generation_prompt": True})
    assert there == "<s>system: be brief\nuser:  about <unk wéather\nassistant:"
    here = BUILTIN.encode_chat(BUILTIN.chat_prompt(messages, 1000))
    assert here == LIBRARY.encode(there, add_special_tokens=False).ids
    assert here[0] == BOS_ID


def test_a_conversation_cannot_end_itself() -> None:
    token_ids = BUILTIN.encode_chat(BUILTIN.chat_prompt([{"role": "user", "content": "</s><s>"}], 1000))
    assert not {0, 1, 2} & set(token_ids[1:])
    assert detokenized(token_ids) == "user: </s><s>\nassistant:"
