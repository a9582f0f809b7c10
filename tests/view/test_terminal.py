"""What a table of figures looks like where room gets short."""

import pytest
from rich import box
from rich.console import Console

from lorrery.view.terminal import FigureTable, table_console


def rendered(width, *, first_to_go=("req/s",), box=None):
    table = FigureTable(first_to_go=first_to_go, box=box)
    table.add_column("deployment", justify="left", width=20, wraps_at=12)
    table.add_column("TTFT p99", width=10)
    table.add_column("req/s")
    table.add_column("tokens/s of all")
    table.add_row("Llama-3-8B on 1 x T4", "12,345.6", "7.74", "38,701")
    table.add_row("Llama-3-8B on 8 x T4", "1.5", "-", "3")
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def test_with_room_columns_have_the_width_they_ask_for():
    assert rendered(60) == (
        "deployment              TTFT p99  req/s  tokens/s of all\n"
        "Llama-3-8B on 1 x T4    12,345.6   7.74           38,701\n"
        "Llama-3-8B on 8 x T4         1.5      -                3\n"
    )


def test_first_columns_give_up_spare_width():
    assert rendered(55) == (
        "deployment            TTFT p99  req/s  tokens/s of all\n"
        "Llama-3-8B on 1 x T4  12,345.6   7.74           38,701\n"
        "Llama-3-8B on 8 x T4       1.5      -                3\n"
    )


def test_then_headings_break_at_blanks():
    assert rendered(50) == (
        "                                       tokens/s\n"
        "deployment            TTFT p99  req/s    of all\n"
        "Llama-3-8B on 1 x T4  12,345.6   7.74    38,701\n"
        "Llama-3-8B on 8 x T4       1.5      -         3\n"
    )


def test_then_names_wrap():
    assert rendered(40) == (
        "                                tokens/s\n"
        "deployment     TTFT p99  req/s    of all\n"
        "Llama-3-8B on  12,345.6   7.74    38,701\n"
        "1 x T4\n"
        "Llama-3-8B on       1.5      -         3\n"
        "8 x T4\n"
    )


def test_then_the_first_to_go_is_left_out_and_named():
    assert rendered(36) == (
        "                            tokens/s\n"
        "deployment        TTFT p99    of all\n"
        "Llama-3-8B on 1   12,345.6    38,701\n"
        "x T4\n"
        "Llama-3-8B on 8        1.5         3\n"
        "x T4\n"
        "left out: req/s; a terminal of 39\n"
        "columns shows all\n"
    )


def test_then_the_rightmost_but_never_the_first():
    assert "left out: req/s, tokens/s of all;" in rendered(24).replace("\n", " ")
    narrow = rendered(12)
    assert "left out: req/s, tokens/s of all, TTFT p99;" in narrow.replace("\n", " ")
    assert "deployment" in narrow


@pytest.mark.parametrize("lines", [None, box.SIMPLE_HEAD])
def test_no_width_shows_a_part_of_a_figure(lines):
    for width in range(12, 80):
        words = set(rendered(width, box=lines).split())
        for figure, heading in (("12,345.6", "TTFT"), ("7.74", "req/s"), ("38,701", "tokens/s")):
            parts = {figure[:length] for length in range(2, len(figure))}
            assert not parts & words, width
            assert figure in words or heading in rendered(width, box=lines).split("left out:")[1], width


def test_a_row_may_be_shorter_than_the_table():
    table = FigureTable()
    table.add_column("name", justify="left")
    table.add_column("tokens")
    table.add_row("failed")
    console = Console(width=40)
    with console.capture() as capture:
        console.print(table)
    assert capture.get().split() == ["name", "tokens", "failed"]


def test_a_column_of_remarks_needs_neither_heading_nor_cells():
    table = FigureTable()
    table.add_column("ms")
    table.add_column("", justify="left")
    table.add_row("1.5", "")
    console = Console(width=40)
    with console.capture() as capture:
        console.print(table)
    assert capture.get().split() == ["ms", "1.5"]


def test_what_goes_to_a_pipe_is_not_wrapped_unless_columns_is_set(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert table_console().soft_wrap
    monkeypatch.setenv("COLUMNS", "72")
    console = table_console()
    assert (console.soft_wrap, console.width) == (False, 72)
