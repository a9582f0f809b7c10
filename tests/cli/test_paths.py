"""Paths that are empty: in a script, a variable that is not set."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lorrery.cli.app import part_named
from lorrery.cli.simulate import app as simulate
from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import Settings
from lorrery.service.settings.reading import load
from lorrery.worker.build import read_profile_file

OPTIONS = [
    ("init", ""),
    ("config", "--config"),
    ("up", "--monitoring"),
    ("serve", "--tokenizer"),
    ("serve", "--ssl-certfile"),
    ("load", "--out"),
    ("load", "--trace"),
    ("simulate", "--config"),
    ("simulate", "--journal"),
    ("simulate", "--out"),
    ("simulate", "--trace"),
    ("web", ""),
    ("top", ""),
    ("report", "folder"),
    ("report", "-o"),
    ("faults", "list", "--config"),
    ("monitoring", ""),
    ("demo", "--out"),
    ("plan", "--plot"),
    ("calibrate", "x.csv", "--catalogue"),
    ("cache", "--out"),
    ("tokenizer", ""),
    ("certs", ""),
    ("validate", "slora", "--json"),
    ("validate", "golden", ""),
    ("validate", "golden", "--against"),
    ("validate", "golden", "--out"),
]


@pytest.mark.parametrize("arguments", OPTIONS, ids=" ".join)
@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
def test_an_empty_path_is_refused(
    arguments: tuple[str, ...], joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    part, *given = arguments
    if given[-1].startswith("-"):
        given = [*given[:-1], f"{given[-1]}="] if joined and given[-1] != "-o" else [*given, ""]
    elif given[-1]:
        given = [*given, ""]
    app: typer.Typer = part_named(part)
    done = CliRunner().invoke(app, given, env={"COLUMNS": "100"})
    assert done.exit_code == 2, done.output
    assert "the path is empty; name one, or leave it out" in done.output
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_for_a_record_is_not_the_usual_one(tmp_path: Path) -> None:
    for given in (["--record", ""], ["--record="]):
        done = CliRunner().invoke(simulate, ["-n", "1", "--out", str(tmp_path / "out"), *given])
        assert isinstance(done.exception, SettingsError)
        assert str(done.exception).startswith("--record: the path is empty; name one, or give --record alone")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["worker.profile", "router.tokenizer", "scheduler.prefix_cache.trie", "cluster_token"])
def test_an_empty_path_in_the_settings_is_unset(key: str) -> None:
    found: object = load(Settings, overrides=[f"{key}="])
    for name in key.split("."):
        found = getattr(found, name)
    assert found is None


def test_a_folder_for_a_profile_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        read_profile_file(tmp_path)
    assert str(caught.value) == f"{tmp_path}: Is a directory"
