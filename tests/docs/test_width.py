"""Prose of docs/*.md wraps at one width; tables, code, headings, HTML, a link or code span alone may be longer."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
WIDTH = 120
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_FREE = re.compile(r"\||#| {4}|<|`[^`]*`$|!?\[[^\]]*\]\(\S+\)$|\[[^\]]*\]: ")


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_prose_is_no_wider_than_the_others(page):
    prose = _FENCED.sub("", page.read_text(encoding="utf-8")).splitlines()
    assert [line for line in prose if len(line) > WIDTH and not _FREE.match(line)] == []
