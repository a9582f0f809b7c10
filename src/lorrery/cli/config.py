"""`lorrery config`: prints the effective settings and the origin of each."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from lorrery.cli.flags import ConfigOption, SetOption, VersionOption, takes_deployment, with_deployment
from lorrery.service.commands import Command, command_app
from lorrery.service.errors import SettingsError
from lorrery.service.files.reading import dotted, parse_toml, to_value
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.settings.cluster import Settings, load, origins
from lorrery.service.settings.reading import Key, leaves

DEFAULT = "default"
_MOST_COLUMNS = 60
"""Widest column before the origin; a longer value shifts its own origin to the right."""
_CREDENTIALS: Key = ("tracing", "headers")
"""Table whose values are not shown."""

app = command_app()


@app.command("config", cls=Command)
@takes_deployment("engine", "model", "gpu", "tensor_parallel", "weight_dtype", "kv_dtype", before="everything")
def show(
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]...", help="Settings or sections, such as scheduler.max_num_seqs or worker."),
    ] = None,
    config: ConfigOption = DEFAULT_SETTINGS,
    overrides: SetOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Include defaults.")] = False,
    version: VersionOption = False,
    **given: Any,  # noqa: ANN401  the table's options
) -> None:
    """Print the effective settings, and where each comes from.

    Sources are defaults, an engine's preset, the settings file, environment variables, and the command line (--set, and
    options that stand for a setting). Without a KEY, prints those that are not defaults. The output is a settings file,
    in which unset settings are comments, as are values of tracing.headers, which are credentials and are not shown.

    Examples:
      lorrery config
      lorrery config --engine vllm --gpu H100-SXM scheduler worker
      lorrery config --all --set scheduler.policy=vtc_fair scheduler.policy
    """
    del version
    overrides = with_deployment(given, overrides)
    settings, found = load(config, overrides), origins(config, overrides)
    known = [key for key, _ in leaves(settings.model_dump())]
    asked = {text: _read_key(text) for text in keys or ()}
    for text, key in asked.items():
        if not any(_is_of(one, key) for one in known):
            near = "".join(f"; did you mean {one}?" for one in get_close_matches(text, map(dotted, known), n=1))
            raise SettingsError(f"{text}: no such setting{near} (lorrery config --all shows all)")
    lines = list(_lines(settings, found, asked.values(), everything=everything or bool(keys)))
    width = min(max((len(line) for line, _ in lines), default=0), _MOST_COLUMNS)
    for line, origin in lines:
        typer.echo(f"{line:<{width}}  # {origin.replace('--set', 'command line')}")


def _read_key(text: str) -> Key:
    """Parse a key as it is printed, `a."b.c"`, or as `--set` takes it, where every dot separates names."""
    try:
        ((key, _),) = leaves(parse_toml(f"{text} = 0"))
    except ValueError:
        return tuple(text.split("."))
    return key


def _is_of(key: Key, other: Key) -> bool:
    """Return whether `key` equals `other` or lies in that section."""
    return key[: len(other)] == other


def _lines(
    settings: Settings, found: dict[Key, str], keys: Iterable[Key], *, everything: bool
) -> Iterator[tuple[str, str]]:
    """Yield each requested setting with its origin."""
    keys = tuple(keys)
    for key, value in leaves(settings.model_dump()):
        origin = found.get(key, DEFAULT)
        if (not keys or any(_is_of(key, one) for one in keys)) and (everything or origin != DEFAULT):
            yield _line(key, value), origin


def _line(key: Key, value: object) -> str:
    if value is None:
        return f"# {dotted(key)} is unset"
    if len(key) > len(_CREDENTIALS) and _is_of(key, _CREDENTIALS):
        return f"# {dotted(key)} is set, and not shown"
    return f"{dotted(key)} = {to_value(value)}"
