"""`lorrery init`: a settings file to edit, which describes the cluster that commands use without one."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.init import HEADER, app
from lorrery.service.errors import LorreryError
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.settings.cluster import load


def init(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_it_writes_the_shipped_cluster_under_a_header_of_its_own(tmp_path: Path) -> None:
    init(tmp_path)
    written = (tmp_path / "cluster.toml").read_text(encoding="utf-8")
    assert written.startswith(HEADER)
    assert "service/" not in written, "a path that only a checkout has"
    assert load(tmp_path / "cluster.toml") == load(DEFAULT_SETTINGS)


def test_it_makes_the_folder_and_prints_the_next_command(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cluster"
    assert f"lorrery up --config {folder}/cluster.toml" in init(folder)
    assert (folder / "cluster.toml").exists()


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_file_in_the_folders_place_is_named(tmp_path: Path, force: list[str]) -> None:
    file = tmp_path / "settings.toml"
    file.touch()
    with pytest.raises(LorreryError, match=r"settings\.toml is a file; name the folder that cluster\.toml goes to"):
        CliRunner().invoke(app, [str(file), *force], catch_exceptions=False)


def test_without_a_folder_it_writes_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "lorrery up --config cluster.toml" in init()
    assert (tmp_path / "cluster.toml").exists()


def test_it_overwrites_only_when_told_to(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("mine")
    with pytest.raises(LorreryError, match="--force"):
        init(tmp_path)
    assert path.read_text() == "mine"
    init("--force", tmp_path)
    assert path.read_text() != "mine"
