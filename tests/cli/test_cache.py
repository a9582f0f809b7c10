"""`lorrery cache`, and the scheduler that reads what it built."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.cache import app
from lorrery.scheduler.core.prefix_cache.static_trie import StaticTrie
from lorrery.scheduler.replicas import ReplicaFactory
from lorrery.scheduler.trie_file import read_trie, write_trie
from lorrery.service.errors import FormatError
from lorrery.service.settings.cluster import load

PROMPTS = [[5, 6, 7], [5, 6, 8], [5, 9], [4]]


def corpus(folder: Path) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS), encoding="utf-8")
    return path


def test_a_built_cache_is_the_one_that_the_scheduler_builds_itself(tmp_path: Path) -> None:
    out = tmp_path / "trie.json"
    result = CliRunner().invoke(app, [str(corpus(tmp_path)), "--cache-size", "3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "3 of 3 tokens kept from 4 prompts" in result.output
    kind = "scheduler.prefix_cache.kind=static_trie"
    built = ReplicaFactory(load(None, [kind, f"scheduler.prefix_cache.trie={out}"])).prefix_cache
    from_corpus = ReplicaFactory(
        load(None, [kind, f"scheduler.prefix_cache.corpus={corpus(tmp_path)}", "scheduler.prefix_cache.cache_size=3"])
    ).prefix_cache
    assert isinstance(built, StaticTrie)
    assert isinstance(from_corpus, StaticTrie)
    assert built.paths() == from_corpus.paths() == StaticTrie.build(PROMPTS, 3).paths()


def test_without_a_corpus_it_takes_the_shipped_prompts(tmp_path: Path) -> None:
    out = tmp_path / "trie.json"
    result = CliRunner().invoke(app, ["--cache-size", "50", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "50 of 50 tokens kept" in result.output
    assert read_trie(out).num_tokens == 50


def test_text_is_tokenised_as_the_router_does(tmp_path: Path) -> None:
    lines = tmp_path / "corpus.txt"
    lines.write_text("the first time\nthe first place\n", encoding="utf-8")
    out = tmp_path / "trie.json"
    result = CliRunner().invoke(app, [str(lines), "--text", "--cache-size", "100", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert read_trie(out).match([1]) == 1  # the BOS token begins every prompt


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format_version": 2, "kind": "static_trie"}', "format version 2 is not known"),
        ('{"format_version": 1, "kind": "report"}', "holds 'report'"),
        ('{"format_version": 1, "kind": "static_trie", "parents": [3], "token_ids": [1]}', "cannot be"),
        ("[]", "is not a trie"),
    ],
)
def test_a_file_that_is_no_trie_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trie.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(FormatError, match=message):
        read_trie(path)


def test_a_trie_round_trips(tmp_path: Path) -> None:
    trie = StaticTrie.build(PROMPTS)
    write_trie(trie, tmp_path / "t.json")
    assert read_trie(tmp_path / "t.json").paths() == trie.paths()
