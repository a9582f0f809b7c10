"""`lorrery cache`: builds llm-mock's static prefix cache from a corpus and writes it to a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lorrery.cli.flags import VersionOption
from lorrery.scheduler.core.prefix_cache.static_trie import StaticTrie
from lorrery.scheduler.trie_file import read_corpus, write_trie
from lorrery.service.commands import Command, command_app
from lorrery.service.errors import FormatError
from lorrery.service.files.shipped import CORPUS
from lorrery.tokenizer.file import open_tokenizer

app = command_app()

_REPORT_EVERY = 256


@app.command(cls=Command)
def cache(
    out: Annotated[Path, typer.Option(help="File to write the cache to.")],
    corpus: Annotated[
        Path | None,
        typer.Argument(
            help="Prompts, one per line: JSON arrays of token ids, or text with --text. Default: the shipped prompts."
        ),
    ] = None,
    cache_size: Annotated[int, typer.Option(min=0, help="Number of tokens (edges of the trie) to keep.")] = 500,
    text: Annotated[bool, typer.Option("--text", help="The corpus is text; tokenise it as the router would.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json for --text; default: the built-in vocabulary.")
    ] = None,
    version: VersionOption = False,
) -> None:
    """Build a static prefix cache: the most common prefixes of a corpus, as llm-mock does.

    To use it, set scheduler.prefix_cache.kind = 'static_trie' and scheduler.prefix_cache.trie to the file.

    Examples:
      lorrery cache prompts.jsonl --out cache.json
      lorrery cache prompts.txt --text --cache-size 5000 --out cache.json
      lorrery simulate --set scheduler.prefix_cache.kind=static_trie --set scheduler.prefix_cache.trie=cache.json
    """
    del version
    if corpus is None:
        corpus, text = CORPUS, True
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        prompts = _tokenised(corpus, tokenizer, progress) if text else read_corpus(corpus)
        trie = StaticTrie.build(prompts, cache_size, on_kept=_reporting(progress, cache_size))
    write_trie(trie, out)
    hits = sum(trie.match(prompt) for prompt in prompts)
    typer.echo(
        f"{out}: {trie.num_tokens:,} of {cache_size:,} tokens kept from {len(prompts):,} prompts;"
        f" a prompt of the corpus finds {hits / max(len(prompts), 1):.2f} of its {_mean_length(prompts):.1f} tokens"
    )


def _reporting(progress: Progress, cache_size: int) -> Callable[[int], None]:
    task = progress.add_task("keeping tokens", total=cache_size)

    def on_kept(num_kept: int) -> None:
        if num_kept % _REPORT_EVERY == 0 or num_kept == cache_size:
            progress.update(task, completed=num_kept)

    return on_kept


def _tokenised(corpus: Path, tokenizer: Path | None, progress: Progress) -> list[list[int]]:
    encode = open_tokenizer(tokenizer).encode_prompt
    try:
        lines = [line for line in corpus.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{corpus}: {error}") from None
    return [list(encode(line)) for line in progress.track(lines, description="tokenising")]


def _mean_length(prompts: list[list[int]]) -> float:
    return sum(map(len, prompts)) / max(len(prompts), 1)
