"""What a release is made with: workflow, forms and settings are what their readers take, and say the same."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def run(*command: str) -> str:
    result = subprocess.run(
        [Path(sys.executable).parent / command[0], *command[1:]], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", [".github/workflows/release.yml"]),
        ("github-issue-forms", [".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/engine.yml"]),
        ("github-issue-config", [".github/ISSUE_TEMPLATE/config.yml"]),
        ("citation-file-format", ["CITATION.cff"]),
    ],
)
def test_files_for_the_repositorys_host_follow_their_schema(schema: str, files: list[str]):
    run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)


@pytest.mark.parametrize(
    ("platform", "arch"), [("linux", "x86_64"), ("linux", "aarch64"), ("macos", "x86_64"), ("macos", "arm64")]
)
def test_wheels_are_built_for_every_python_and_platform(platform: str, arch: str):
    found = run("cibuildwheel", "--print-build-identifiers", "--platform", platform, "--archs", arch).split()
    name = f"manylinux_{arch}" if platform == "linux" else f"macosx_{arch}"
    assert found == [f"cp{python.replace('.', '')}-{name}" for python in PYTHONS]


def test_the_project_says_which_pythons_it_has_wheels_for():
    said = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert said == PYTHONS


def test_a_citation_has_the_projects_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == PROJECT["version"]


def test_the_registrys_page_has_absolute_links_and_pictures_only():
    page = run("hatchling", "metadata", "readme")
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_site_has_every_page():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- ([\w-]+\.md)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
