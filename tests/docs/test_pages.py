"""Pages of docs are wrapped at one width, their links lead somewhere, and what they count is right."""

import re
from pathlib import Path

import pytest

from tests.worker.device.known import CATALOGUE

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
OTHERS = sorted(path for room in ("deploy", "lab", "tests", "validation") for path in (ROOT / room).rglob("*.md"))
"""Pages beside what they describe."""
WIDTH = 120
CODE = ("lab", "loadgen", "router", "scheduler", "src/lorrery", "tests", "worker")
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_FREE = re.compile(r"\||#| {4}|<|`[^`]*`$|!?\[[^\]]*\]\(\S+\)$|\[[^\]]*\]: ")
"""Tables, headings, code, HTML, a link or code span alone may be longer."""
_LINK = re.compile(r"\]\((?!https?://|mailto:)([^()\s]*)\)")


def prose(page: Path) -> str:
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page as GitHub makes them: of its headings, and those it sets itself."""
    text = prose(page)
    headings = [re.sub(r"\]\([^)]*\)", "", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    made = [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]
    return {*made, *re.findall(r'<a id="([^"]+)">', text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_is_no_wider_than_the_others(page: Path) -> None:
    assert [line for line in prose(page).splitlines() if len(line) > WIDTH and not _FREE.match(line)] == []


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in _LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_code_names_pages_that_exist() -> None:
    """Messages, comments, settings, dashboards and alerts name pages by their paths."""
    missing = set()
    for folder in ROOT.glob("*/"):
        if folder.name.startswith(".") or folder.name in ("build", "dist", "out", "src", "docs"):
            continue
        for path in folder.rglob("*"):
            if path.suffix in (".py", ".toml", ".yml", ".yaml", ".json", ".js", ".proto") and path.is_file():
                for name in re.findall(r"(?<!/)\bdocs/([\w-]+\.md)(#[\w-]+)?", path.read_text(encoding="utf-8")):
                    page = ROOT / "docs" / name[0]
                    if not page.exists() or (name[1] and name[1][1:] not in anchors(page)):
                        missing.add(f"{path.relative_to(ROOT)}: {''.join(name)}")
    assert sorted(missing) == []


def test_files_that_pages_name_exist() -> None:
    """By a path of the tree or its end; another project's file follows "its" or a commit."""
    known = [f"/{path.relative_to(ROOT)}" for room in CODE for path in (ROOT / room).rglob("*.py")]
    missing = {
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(r"(?<!its )(?<!` )`([\w./-]+/[\w-]+\.py)`", prose(page))
        if not any(path.endswith(f"/{name}") for path in known)
    }
    assert sorted(missing) == []


def test_counts_of_models_and_gpus_are_right() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "step-time.md"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"(\d+) GPUs and (\d+) models", text) == [
            (str(len(CATALOGUE.gpus)), str(len(CATALOGUE.models)))
        ], page.name
