"""What both pages are made with: where they lie, and Markdown's paragraphs and tables."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"

DO_NOT_EDIT = "<!-- Made by `make docs` from {}: edit that, not this page. -->"


WIDTH = 120
"""Columns of prose, as in all of docs."""


def paragraph(text: str) -> list[str]:
    """Return the lines of a paragraph."""
    return [*textwrap.wrap(sentence(text), WIDTH, break_long_words=False, break_on_hyphens=False), ""]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; `|` inside a cell is escaped."""
    lines = [headings, ["---"] * len(headings), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def sentence(text: str) -> str:
    """Return a text on one line."""
    return " ".join(text.split())
