"""The shipped tokenizer: its ids, its text, and its folder as Hugging Face's libraries read it."""

import json
import threading
from pathlib import Path

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lab.shipped_tokenizer import build
from lorrery.tokenizer.base import BOS_ID, EOS_ID, FIRST_WORD_ID, NUM_WORDS
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
    return tokenizer.detokenizer().push(token_ids)


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


def test_special_tokens_are_no_text_of_an_output_and_have_names_elsewhere() -> None:
    assert detokenized([0, 1, 5, 2]) == " about"
    assert BUILTIN.decode([0, 1, 5, 2]) == "<unk><s> about</s>"
    assert BUILTIN.decode([5, 10**6, 2**32 - 1]) == " about"
    assert BUILTIN.decode(BUILTIN.encode_stop("é")[:1]) == "\ufffd"


@given(st.lists(st.one_of(texts, words, st.sampled_from(SPECIAL))).map("".join), st.booleans())
def test_the_name_of_a_special_token_in_a_prompt_is_that_token(text: str, framed: bool) -> None:
    token_ids = BUILTIN.encode_prompt(text, add_special_tokens=framed)
    assert token_ids == LIBRARY.encode(text, add_special_tokens=framed).ids
    assert sum(token_id in (0, 1, 2) for token_id in token_ids) == framed + sum(map(text.count, SPECIAL))
    assert BUILTIN.decode(token_ids) == ("<s>" if framed else "") + text


def test_the_name_of_a_special_token_in_an_output_is_text() -> None:
    assert detokenized(BUILTIN.encode_stop("<s> </s><unk>")) == "<s> </s><unk>"
    assert not {0, 1, 2} & set(BUILTIN.encode_stop("<s> </s><unk>"))


@given(st.lists(st.one_of(texts, words, st.sampled_from(SPECIAL))).map("".join))
def test_any_text_comes_back(text: str) -> None:
    assert detokenized(BUILTIN.encode_stop(text)) == text


@given(st.lists(words, min_size=1))
def test_words_count_as_one_token_each(chosen: list[str]) -> None:
    assert len(BUILTIN.encode_prompt("".join(chosen))) == 1 + len(chosen)


@given(st.lists(st.integers(0, BUILTIN.vocab_size + 10)), st.integers(1, 5))
def test_text_does_not_depend_on_how_tokens_arrive(token_ids: list[int], size: int) -> None:
    detokenizer = BUILTIN.detokenizer()
    pushed = "".join(detokenizer.push(token_ids[at : at + size]) for at in range(0, len(token_ids), size))
    assert pushed == detokenized(token_ids)


def test_a_character_waits_until_it_is_whole() -> None:
    detokenizer = BUILTIN.detokenizer()
    first, second = BUILTIN.encode_stop("é")
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([second]) == "é"
    assert detokenizer.push([first, 3]) == "\ufffd abc"
    assert detokenizer.push([first]) == ""  # an output that ends here has no text of it, as in vLLM


def test_an_id_outside_the_vocabulary_is_a_replacement_character() -> None:
    assert detokenized([3, 10**6, 4]) == " abc\ufffd able"


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
    assert BUILTIN.chat_prompt(messages, 1000) == there
    here = BUILTIN.encode_prompt(there, add_special_tokens=False)
    assert here == LIBRARY.encode(there, add_special_tokens=False).ids
    assert here[0] == BOS_ID
