"""The screen fits every terminal, shows what it says, and no name can break it."""

import io

import msgspec
import pytest
from rich.console import Console

from lorrery.view import frame as f
from lorrery.view.top.run import keys_of, press
from lorrery.view.top.screen import VIEWS, Look, compose, whole
from lorrery.view.top.tables import plain
from tests.view.test_model import frames, model_of

EVIL = "\x1b[2J\x1b]0;owned\x07\r\n\t\x9b31m\u202eevil\u200b\udc80 [bold]x[/bold]"


@pytest.fixture(scope="module")
def many():
    return model_of(frames(3, every=1.0, num_workers=64))


def shown(model, look, width, height) -> list[str]:
    lines = compose(model, look, width, height)
    assert len(lines) == height
    assert all(line.cell_len <= width for line in lines), [line.plain for line in lines if line.cell_len > width]
    return [line.plain for line in lines]


@pytest.mark.parametrize("view", [*VIEWS, "help"])
@pytest.mark.parametrize("size", [(80, 24), (40, 12), (200, 60), (20, 5), (1, 1)])
def test_every_view_fits_every_terminal(many, view: str, size: tuple[int, int]) -> None:
    shown(many, Look(view), *size)


def test_eighty_by_twenty_four_shows_what_matters(many) -> None:
    text = "\n".join(shown(many, Look(), 80, 24))
    for word in ("tokens/s", "requests/s", "running", "waiting", "TTFT p50", "KV", "WORKER", "BATCH", "OLDEST", "TOK/S",
                 "BUSY", "LORA", "q quit", "worker-1 ", "!"):  # fmt: skip
        assert word in text, text


def test_a_narrow_terminal_keeps_the_names_and_the_counts(many) -> None:
    text = shown(many, Look(), 40, 24)
    heading = next(line for line in text if "WORKER" in line)
    assert all(word in heading for word in ("BATCH", "WAIT", "KV"))
    assert "GPU" not in heading


def test_sixty_four_workers_scroll_to_the_end_in_natural_order(many) -> None:
    look = Look()
    first = [line.split()[0] for line in shown(many, look, 80, 24) if line.startswith(" worker-")]
    assert first[:3] == ["worker-0", "worker-1", "worker-2"]
    press(look, "page down", 10)
    assert not any(line.startswith(" worker-0 ") for line in shown(many, look, 80, 24))
    press(look, "end", 10)
    last = shown(many, look, 80, 24)
    assert any(line.startswith(" worker-63 ") for line in last)
    assert any("/64" in line for line in last)
    press(look, "home", 10)
    assert any(line.startswith(" worker-0 ") for line in shown(many, look, 80, 24))


def column(lines: list[str], heading: str) -> list[str]:
    names = next(line for line in lines if heading in line)
    end = names.index(heading) + len(heading)
    begin = names.rindex(" ", 0, names.index(heading)) + 1
    rows = lines[lines.index(names) + 1 :]
    return [line[begin:end].strip() for line in rows]


def test_keys_sort_reverse_filter_and_change_the_view(many) -> None:
    look = Look()
    press(look, "2", 10)
    assert look.view == "adapters"
    runs = [int(cell) for cell in column([line.plain for line in whole(many, look, 160, ["adapters"])], "RUN▼")[:20]]
    assert runs == sorted(runs, reverse=True)
    press(look, "r", 10)
    assert "RUN▲" in "\n".join(shown(many, look, 80, 24))
    press(look, "s", 10)
    assert "WAIT▼" in "\n".join(shown(many, look, 80, 24))
    press(look, "S", 10)
    for key in keys_of("/LORA-r8-2\r"):
        press(look, key, 10)
    text = "\n".join(shown(many, look, 80, 24))
    assert "filter: LORA-r8-2" in text
    assert "lora-r8-20" in text
    assert "base model" not in text
    press(look, "escape", 10)
    assert "base model" in "\n".join(shown(many, look, 80, 24))
    press(look, "tab", 10)
    assert look.view == "tenants"
    press(look, "shift tab", 10)
    press(look, "shift tab", 10)
    assert look.view == "workers"


def test_keys_are_told_from_the_bytes_of_terminals() -> None:
    assert list(keys_of("q\x1b[A\x1bOB\x1b[6~\x1b[Z\x1b\t \x7fü\x00\x1b[200~")) == [
        "q", "up", "down", "page down", "shift tab", "escape", "tab", "space", "backspace", "ü"
    ]  # fmt: skip
    assert [press(Look(), key, 1) for key in ("q", "space", "left", "right", "+", "-", "x")] == [
        "quit", "pause", "back", "on", "faster", "slower", "dismiss"
    ]  # fmt: skip


def test_no_name_can_move_the_cursor_recolour_or_reorder_the_screen() -> None:
    (made,) = frames(0.5, num_workers=2)
    evil = msgspec.structs.replace(
        made,
        adapters_new=[EVIL] * len(made.adapters_new),
        tenants_new=[EVIL + str(number) for number in range(len(made.tenants_new))],
        workers=[msgspec.structs.replace(worker, id=EVIL, gpu=EVIL) for worker in made.workers],
        shards=[f.Shard(EVIL, False)],
        events=[f.EventRow(0.1, "refused", EVIL)],
    )
    model = model_of([evil])
    for view in VIEWS:
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, color_system=None, width=100, height=40, legacy_windows=False)
        for line in compose(model, Look(view, text="EVIL"), 100, 40):
            console.print(line, soft_wrap=True)
        text = out.getvalue()
        assert "evil" in text
        assert not set(text) & set("\x1b\x07\r\t\x9b\u202e\u200b\udc80") - {"\x1b"}
        assert "\x1b[2J" not in text
        assert "\x1b]0" not in text
        text.encode()


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("sql-lora", "sql-lora"),
        ("Ünï 🪐", "Ünï 🪐"),
        ("", ""),
        ("a\x1b[2J", "a\\x1b[2J"),
        ("\u202e", "\\u202e"),
        ("\n", "\\n"),
    ],
)
def test_what_a_terminal_would_obey_is_spelled_out(name: str, safe: str) -> None:
    assert plain(name) == safe


def test_without_unicode_the_screen_is_ascii() -> None:
    made = []
    for frame in frames(5):
        adapters, tenants = (["name"] * len(names) for names in (frame.adapters_new, frame.tenants_new))
        made.append(msgspec.structs.replace(frame, adapters_new=adapters, tenants_new=tenants, events=[]))
    for view in VIEWS:
        for line in compose(model_of(made), Look(view, unicode=False), 80, 24):
            line.plain.encode("ascii")
