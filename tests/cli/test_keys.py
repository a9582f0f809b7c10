from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.keys import app
from lorrery.router.access import KEY_PREFIX, read_keys
from lorrery.service.errors import SettingsError


def new(*arguments: str) -> tuple[str, str]:
    """Return the key, and the file's entry."""
    result = CliRunner().invoke(app, ["new", *arguments])
    assert result.exit_code == 0, result.output
    return result.stderr.split()[-1], result.stdout


def test_a_new_key_is_found_by_the_entry_that_is_printed_with_it(tmp_path: Path):
    path = tmp_path / "keys.toml"
    key, entry = new("--tenant", "acme", "--adapter", "acme-*", "--load-adapter", 'a"\\b', "--operator")
    other, other_entry = new("--tenant", "acme")
    path.write_text(entry + other_entry)
    assert key.startswith(KEY_PREFIX)
    assert key not in path.read_text()
    keys = read_keys(path)
    found, second = keys.find(key), keys.find(other)
    assert found is not None
    assert second is not None
    assert (found.tenant, found.adapters, found.load_adapters, found.operator) == (
        "acme", ("acme-*",), ('a"\\b',), True
    )  # fmt: skip
    assert (second.adapters, second.operator) == (("*",), False)
    assert found.name != second.name
    assert keys.find("another") is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tenant", "two words"],
        ["--tenant", "a", "--name", "a\tb"],
        ["--tenant", "a", "--adapter", "a-*", "--adapter", ""],
        ["--tenant", "a", "--load-adapter", ""],
    ],
)
def test_a_name_that_cannot_be_is_refused(arguments: list[str]):
    result = CliRunner().invoke(app, ["new", *arguments])
    assert isinstance(result.exception, SettingsError)
