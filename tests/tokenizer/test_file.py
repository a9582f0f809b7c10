"""Tokenizers of others' files: whatever their kind, text comes token by token as it would come whole."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lorrery.service.errors import SettingsError
from lorrery.tokenizer.detokenize import REPLACEMENT
from lorrery.tokenizer.file import FileTokenizer, open_tokenizer

CORPUS = [
    "The cat sat on the mat, and the dog didn't mind; about 42 of them were there.",
    "Übung macht den Meister. Größe, Fuß und naïveté. 世界 и мир.",
    "def f(x):\n    return x + 1\n",
    "words that are said above all about the weather",
] * 3


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind, Llama 3's and Qwen's."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    model.add_tokens([AddedToken("<tool>", special=False), AddedToken("größer", special=False)])
    return model


def word_piece() -> tokenizers.Tokenizer:
    """BERT's."""
    model = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer(lowercase=True)
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    model.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(name, model.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return model


def unigram() -> tokenizers.Tokenizer:
    """T5's and XLM-R's."""
    model = tokenizers.Tokenizer(models.Unigram())
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    model.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", model.token_to_id("</s>"))]
    )
    return model


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama 2's, Mistral's and Gemma's: characters it does not have are spelt in bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({char for char in "".join(CORPUS).replace(" ", "▁") if char < "ß"} | {"▁"})
    vocabulary = {piece: index for index, piece in enumerate([*pieces, *letters])}
    merges = []
    for left, right in [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "a"), ("▁a", "n"), ("▁an", "d")]:
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    model = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    model.add_special_tokens(["<unk>", "<s>", "</s>"])
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return model


KINDS = (byte_level, word_piece, unigram, byte_fallback)


@cache
def opened(make: Callable[[], tokenizers.Tokenizer]) -> FileTokenizer:
    with TemporaryDirectory() as folder:
        make().save(f"{folder}/tokenizer.json")
        return FileTokenizer(Path(folder))


def streamed(tokenizer: FileTokenizer, token_ids: list[int], size: int = 1) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(detokenizer.push(token_ids[at : at + size]) for at in range(0, len(token_ids), size))


def assert_all_but_a_cut_character(text: str, whole: str) -> None:
    """Assert that a text is the whole one, but for a character that its end cuts."""
    assert whole.startswith(text)
    assert not whole[len(text) :].strip(REPLACEMENT)


PIECES = [*" ".join(CORPUS).split(), "世界", "<tool>", "größer", " ", "\n", "'s", "\ufffd", "👩\u200d🚀"]
texts = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.sampled_from(PIECES)).map(" ".join))


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, size=st.integers(1, 4))
@settings(max_examples=60)
def test_text_in_pieces_is_the_whole_text(kind: Callable[[], tokenizers.Tokenizer], text: str, size: int) -> None:
    tokenizer = opened(kind)
    token_ids = tokenizer.encode_prompt(text)
    whole = tokenizer.model.decode(token_ids, skip_special_tokens=True)
    assert_all_but_a_cut_character(streamed(tokenizer, token_ids, size), whole)


@given(data=st.data())
@settings(max_examples=60)
def test_any_tokens_of_a_byte_level_vocabulary_come_as_a_whole(data: st.DataObject) -> None:
    tokenizer = opened(byte_level)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    whole = tokenizer.model.decode(token_ids, skip_special_tokens=True)
    assert_all_but_a_cut_character(streamed(tokenizer, token_ids), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_have_the_tokens_that_frame_them_and_stop_strings_do_not(
    kind: Callable[[], tokenizers.Tokenizer],
) -> None:
    tokenizer = opened(kind)
    framed, bare = tokenizer.encode_prompt("the cat"), tokenizer.encode_stop("the cat")
    assert framed == tokenizer.model.encode("the cat").ids
    assert [token_id for token_id in framed if token_id not in tokenizer.special_ids] == bare
    assert tokenizer.encode_prompt("the cat " * 1000) == tokenizer.model.encode("the cat " * 1000).ids


def test_bytes_without_end_do_not_wait_for_ever() -> None:
    tokenizer = opened(byte_fallback)
    detokenizer = tokenizer.detokenizer()
    held = 0
    for _ in range(1000):
        held = held + 1 if not detokenizer.push([3 + 0xE4]) else 0
        assert held <= 64


def test_a_file_that_cuts_and_fills_up_batches_does_neither_to_prompts(tmp_path: Path) -> None:
    model = byte_level()
    model.enable_truncation(4)
    model.enable_padding(length=8)
    model.save(str(tmp_path / "tokenizer.json"))
    text = "The cat sat on the mat"
    assert open_tokenizer(tmp_path).encode_prompt(text) == byte_level().encode(text).ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_folder_brings_its_chat_template_and_special_tokens(folder: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}<tool>{{ m.role }}|{{ m.content }}{{ eos_token }}{% endfor %}"
    config = {
        "chat_template": template,
        "bos_token": {"content": "größer", "special": False},
        "eos_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = open_tokenizer(path)
        text = tokenizer.chat_prompt([{"role": "user", "content": "hi"}], 1000)
        assert text == "größer<tool>user|hi<|endoftext|>"
        assert tokenizer.eos_id == 0
        token_ids = tokenizer.encode_prompt(text, add_special_tokens=False)
        assert token_ids[-1] == 0
        assert [tokenizer.name(token_id) for token_id in token_ids[:2]] == ["größer", "<tool>"]
        assert tokenizer.decode(token_ids[1:]) == "<tool>user|hi<|endoftext|>"
        as_output = tokenizer.encode_stop("<tool>user|hi<|endoftext|>")
        assert 0 not in as_output
        assert streamed(tokenizer, as_output) == "<tool>user|hi<|endoftext|>"


def test_a_template_file_is_preferred_and_named_ones_have_a_default(folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert open_tokenizer(folder).chat_prompt(messages, 1000) == "user: hi\nassistant:"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "by name"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_tokenizer(folder).chat_prompt(messages, 1000) == "by name"
    (folder / "chat_template.jinja").write_text("from a file")
    assert open_tokenizer(folder).chat_prompt(messages, 1000) == "from a file"


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_the_end_of_a_sequence_is_the_models_where_the_tokenizer_does_not_say(folder: Path, file: str) -> None:
    (folder / file).write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert open_tokenizer(folder).eos_id == 7


def test_a_vocabulary_without_an_end_has_the_least_visible_one(tmp_path: Path) -> None:
    model = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(["a", "b", "Ċ", "c"])}, []))
    model.decoder = decoders.ByteLevel()
    model.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(tmp_path).eos_id == 2
    model.add_special_tokens(["<pad>"])
    model.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(tmp_path).eos_id == 4


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", "no"),
        ("tokenizer_config.json", "[]"),
        ("chat_template.jinja", "{% if %}"),
    ],
)
def test_a_folder_that_is_none_is_a_settings_error(folder: Path, file: str, content: str | None) -> None:
    path = folder / file
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(SettingsError, match=r"router\.tokenizer.*" + folder.name):
        open_tokenizer(folder)
