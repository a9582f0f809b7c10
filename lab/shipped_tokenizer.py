"""Writes the folder of the shipped tokenizer from its words.txt: `python -m lab.shipped_tokenizer`.

It needs no download, and a mock's output has the same length everywhere: ids 3..1907 are 1,905 English words, each with
its leading space one token in the usual tokenizers too, so a client that tokenizes the text again gets the same number.

| id | token |
|---|---|
| 0, 1, 2 | `<unk>`, `<s>` (begins a sequence), `</s>` (ends it) |
| 3..1907 | " " + word, in the order of words.txt |
| 1908..2163 | the bytes 0..255 |
| 2164.. | beginnings of words that are not words themselves, needed for merges |

A byte-level BPE: every merge extends the beginning of a word by one letter, so a space and the text after it become the
longest beginning of a word, and the rest single bytes. A space begins a piece of text, so merges never cross words, and
a word with its space is always one token.
"""

import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from lorrery.tokenizer.base import BOS_ID, EOS_ID
from lorrery.tokenizer.chat import PLAIN_TEMPLATE
from lorrery.tokenizer.detokenize import byte_names
from lorrery.tokenizer.file import SHIPPED, TOKENIZER_FILE, WORDS

UNK, BOS, EOS = "<unk>", "<s>", "</s>"


def build(folder: Path) -> None:
    """Write the folder, replacing its contents."""
    model = tokenizers.Tokenizer(_bpe(WORDS.read_text(encoding="utf-8").split()))
    model.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in (UNK, BOS, EOS)])
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    model.decoder = decoders.ByteLevel()
    model.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, model.token_to_id(BOS))]
    )
    special = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    files = {
        "tokenizer_config.json": {
            **special,
            "added_tokens_decoder": {
                str(model.token_to_id(name)): {
                    "content": name,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for name in (UNK, BOS, EOS)
            },
            "chat_template": PLAIN_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        "special_tokens_map.json": special,
        "generation_config.json": {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID},
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "vocab_size": model.get_vocab_size(),
            "max_position_embeddings": 131072,
        },
    }
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.save(str(folder / TOKENIZER_FILE), pretty=False)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _bpe(words: list[str]) -> models.BPE:
    names = byte_names()
    space = names[ord(" ")]
    whole = [space + word for word in words]
    beginnings = sorted({word[:length] for word in whole for length in range(2, len(word) + 1)})
    between = [beginning for beginning in beginnings if beginning not in set(whole)]
    vocabulary = {name: index for index, name in enumerate([UNK, BOS, EOS, *whole, *names, *between])}
    return models.BPE(vocabulary, [(beginning[:-1], beginning[-1]) for beginning in beginnings])


if __name__ == "__main__":
    build(SHIPPED)
