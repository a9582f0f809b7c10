"""Which files a plug-in is made of."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from zipfile import ZipFile

import pytest

from lorrery.simulator.sweep import inputs
from lorrery.simulator.sweep.inputs import plugin_files


class EditableFinder:
    """Finds a package in a folder that is not on the path, as setuptools' finders of editable installs do."""

    def __init__(self, package: str, folder: Path) -> None:
        self._package, self._folder = package, folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find that package; what is in it, others find."""
        init = self._folder / "__init__.py"
        places = [str(self._folder)]
        found = name == self._package
        return spec_from_file_location(name, init, submodule_search_locations=places) if found else None


def test_the_files_of_an_editable_install_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__init__.py").touch()
    for name, text in (("own", "from . import base\n"), ("base", "")):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, EditableFinder("edited_package", tmp_path)])
    assert plugin_files("edited_package.own") == {
        "edited_package.own": tmp_path / "own.py",
        "edited_package": tmp_path / "__init__.py",
        "edited_package.base": tmp_path / "base.py",
    }


def test_modules_that_a_plug_in_names_in_calls_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    own = tmp_path / "calling"
    own.mkdir()
    text = """
import importlib
from importlib import import_module
importlib.import_module("called_alone")
import_module(".beside", __package__)
__import__("called_too")
import_module(name)
"""
    for path, content in (
        (own / "__init__.py", text),
        (own / "beside.py", ""),
        (tmp_path / "called_alone.py", ""),
        (tmp_path / "called_too.py", ""),
    ):
        path.write_text(content, encoding="utf-8")
    assert set(plugin_files("calling")) == {"calling", "calling.beside", "called_alone", "called_too"}


def test_all_of_an_installed_plug_ins_own_package_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = (tmp_path, *inputs._installed())
    monkeypatch.setattr(inputs, "_installed", lambda: installed)
    own = tmp_path / "installed_plugin"
    own.mkdir()
    (tmp_path / "other_installed.py").touch()
    (own / "__init__.py").touch()
    (own / "base.py").touch()
    (own / "queue.py").write_text("from . import base\nimport other_installed, lorrery.scheduler\n", encoding="utf-8")
    assert set(plugin_files("installed_plugin.queue")) == {
        "installed_plugin.queue", "installed_plugin", "installed_plugin.base",
    }  # fmt: skip


def test_the_file_of_a_module_in_an_archive_is_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "own.zip"
    with ZipFile(archive, "w") as file:
        file.writestr("zipped_plugin.py", "")
    monkeypatch.syspath_prepend(str(archive))
    assert plugin_files("zipped_plugin") == {"zipped_plugin": archive}
