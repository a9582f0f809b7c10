"""`lorrery keys`: API keys for a router's clients."""

import secrets
from typing import Annotated

import typer

from lorrery.cli.flags import VersionOption
from lorrery.router.access import KEY_PREFIX, digest
from lorrery.service.commands import Command, command_app
from lorrery.service.errors import SettingsError
from lorrery.service.names import why_no_name

_RANDOM_BYTES = 32

app = command_app("Create API keys for clients.", no_args_is_help=True)


@app.callback()
def _keys(version: VersionOption = False) -> None:
    del version


@app.command(cls=Command)
def new(
    tenant: Annotated[str, typer.Option(help="Tenant of requests with this key.")],
    name: Annotated[
        str | None,
        typer.Option(help="Name of the key in logs and messages. Unset: the tenant's name and a random part."),
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="PATTERN", help="Adapter that the key may use; repeatable. Unset: all."),
    ] = None,
    load_adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--load-adapter",
            metavar="PATTERN",
            help="Adapter that the key may load and unload; repeatable. Unset: none.",
        ),
    ] = None,
    operator: Annotated[bool, typer.Option("--operator", help="Allow all operator calls.")] = False,
) -> None:
    """Create an API key: print it once, and its entry for the file named by router.keys.

    The key goes to standard error, so that `>> keys.toml` appends only the entry. Add quotas by hand; docs/security.md
    lists them. Routers reread the file by themselves.

    Examples:
      lorrery keys new --tenant acme
      lorrery keys new --tenant acme --name acme-ci --adapter 'acme-*' --load-adapter 'acme-*'
      lorrery keys new --tenant ops --operator
    """
    name = name or f"{tenant}-{secrets.token_hex(3)}"
    for option, value in (("--tenant", tenant), ("--name", name)):
        if (why := why_no_name(value)) is not None:
            raise SettingsError(f"{option} {why}")
    for option, patterns, unset in (("--adapter", adapters, "all"), ("--load-adapter", load_adapters, "none")):
        if patterns and not all(patterns):
            raise SettingsError(f"{option} '' matches no adapter; give a name or pattern, or leave it out for {unset}")
    key = KEY_PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    lines = ["[[keys]]", f"name = {_quoted(name)}", f'sha256 = "{digest(key)}"', f"tenant = {_quoted(tenant)}"]
    for field, patterns in (("adapters", adapters), ("load_adapters", load_adapters)):
        if patterns:
            lines.append(f"{field} = [{', '.join(map(_quoted, patterns))}]")
    if operator:
        lines.append("operator = true")
    typer.echo(f"key (shown once): {key}", err=True)
    typer.echo("\n".join(lines) + "\n")


def _quoted(text: str) -> str:
    """Return a TOML string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
