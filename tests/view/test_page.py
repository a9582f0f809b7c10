"""The orrery's page in a browser: what it shows of a record with known troubles, and how it is used."""

import asyncio
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page

from lab.screenshots.browser import browser, page_of
from tests.browser import expect
from tests.needs import needs_chromium
from tests.view.fake import HOSTILE, FakeFeed, fake_record, serve
from tests.view.prepared import ADAPTERS, prepared_record

pytestmark = needs_chromium


@contextmanager
def served(source) -> Iterator[str]:
    """Serve a feed or a record from a thread of its own; yields the page's address."""
    loop, started, where = asyncio.new_event_loop(), threading.Event(), []

    def told(address: str) -> None:
        where.append(f"http://{address}/")
        started.set()

    serving = loop.create_task(serve(source, started=told))

    def run() -> None:
        try:
            loop.run_until_complete(serving)
        except asyncio.CancelledError:
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(60)
        yield where[0]
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(prepared_record(tmp_path_factory.mktemp("record") / "prepared.ndjson.gz")) as url:
        yield url


@pytest.fixture(scope="module")
def opened(chromium: Browser, record: str) -> Iterator[Page]:
    """One page for all tests of the record, since a page costs more than most of them."""
    complaints: list[str] = []
    with page_of(chromium, record, still=True) as page:
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        expect(page.locator("#connection")).to_have_text("record")
        yield page
        assert complaints == []


@pytest.fixture
def page(opened: Page) -> Page:
    opened.get_by_label("Search").fill("")
    opened.keyboard.press("Escape")
    opened.get_by_role("tab", name="Tenants").click()
    return opened


def seek(page: Page, at: float) -> None:
    page.get_by_role("slider", name="Time").fill(str(at))
    expect(page.locator("#clock")).to_have_text(f"{int(at) // 60}:{int(at) % 60:02d}")


def notices(page: Page) -> str:
    return page.locator("#notices").inner_text()


def test_what_is_wrong_is_said_with_its_rule_when_it_goes_wrong_and_not_before(page: Page) -> None:
    seek(page, 15.0)
    expect(page.locator("#summary")).to_have_text("Nothing is wrong")
    seek(page, 35.0)
    expect(page.locator("#notices")).to_contain_text("worker-1 admits nothing: 12 waiting, the first for 15 s")
    assert "none has joined the batch for 10 s" in notices(page)
    assert "meek gets 9% of the tokens; greedy gets 91%" in notices(page)
    assert "flicker" not in notices(page)
    seek(page, 50.0)
    expect(page.locator("#notices")).to_contain_text("flicker thrashes: loaded again 3 times in the last minute")
    assert "worker-2" not in notices(page)
    seek(page, 61.0)
    expect(page.locator("#notices")).to_contain_text("worker-2 has been gone for 1 s")
    assert "steady" not in notices(page)


def expect_row(page: Page, table: str, name: str, figures: list[str]) -> None:
    page.get_by_role("tab", name=table).click()
    expect(page.locator("tr:visible").filter(has_text=name).locator("td")).to_have_text(figures)


def test_the_tables_and_the_strips_have_the_models_figures(page: Page) -> None:
    seek(page, 50.0)
    expect(page.locator("#strips figcaption")).to_have_text(
        [
            re.compile(r"Tokens per second\s*990"),
            re.compile(r"Time to first token\s*600 ms p50\s*600 ms p95"),
            re.compile(r"Queue\s*12 waiting\s*24 running"),
            re.compile(r"KV in use\s*20% mean\s*30% fullest"),
        ]
    )
    expect_row(page, "Workers", "worker-1", ["20%", "8", "12", "30 s", "330"])
    expect_row(page, "Adapters", "flicker", ["3", "0", "4", "3", "3"])
    expect_row(page, "Tenants", "meek", ["9%", "2", "12", "30 s", "0"])
    page.get_by_role("button", name="worker-1:").click()
    expect(page.locator("#details dl")).to_contain_text("busy, 5 s100%")


def test_a_notice_leads_to_what_it_concerns_which_is_marked(page: Page) -> None:
    seek(page, 50.0)
    page.get_by_role("button", name="meek gets").click()
    expect(page.locator("#details h2")).to_contain_text("Tenant meek".replace(" ", ""))
    page.keyboard.press("Escape")
    expect(page.locator("#details")).to_be_hidden()
    expect(page.locator("tr.warn:visible")).to_contain_text("meek")


def test_a_worker_an_adapter_and_a_tenant_show_their_figures_and_last_requests(page: Page) -> None:
    seek(page, 30.0)
    details = page.locator("#details")
    worker = page.get_by_role("button", name="worker-0: A100-80GB-SXM, ready, 8 requests running, 0 waiting, KV 10%")
    worker.click()
    expect(details).to_contain_text("1.0k of 10k")
    bars = details.get_by_role("img")
    expect(bars.first).to_have_accessible_name("queue 400 ms, adapter load 100 ms, prefill 100 ms, decode 400 ms")
    widths = [part.bounding_box()["width"] for part in bars.first.locator("i").all()]
    assert widths[0] == pytest.approx(widths[3], rel=0.05)
    assert widths[0] == pytest.approx(4 * widths[1], rel=0.05)
    details.get_by_role("button", name="steady").click()
    expect(details.locator("h2")).to_contain_text("Adapter")
    expect(details).to_contain_text("worker-2")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="greedy", exact=True).press("Enter")
    expect(details.locator("h2")).to_contain_text("greedy")
    expect(details).to_contain_text("91%")
    expect(details.locator(".requests li")).to_have_count(12)


def test_the_keyboard_moves_through_the_record(page: Page) -> None:
    seek(page, 10.0)
    now = page.locator("#timeline .now")
    page.locator("body").press("ArrowRight")
    expect(now).to_have_text("0:10.5")
    page.locator("body").press("ArrowLeft")
    page.locator("body").press("ArrowLeft")
    expect(now).to_have_text("0:09.5")
    page.locator("body").press("Shift+ArrowRight")
    expect(now).to_have_text("0:19.5")
    page.locator("body").press("Home")
    page.locator("body").press("n")
    expect(page.locator("#notices li")).not_to_have_count(0)
    page.locator("body").press("End")
    expect(now).to_have_text("1:30.0")
    page.locator("body").press("Home")
    # At its own pace the record plays for longer than anything here waits; at 120 times it is over in a second.
    page.get_by_label("Speed").select_option("1")
    page.locator("body").press(" ")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.get_by_label("Speed").select_option("120")
    expect(now).to_have_text("1:30.0")
    expect(page.get_by_role("button", name="Play (space)")).to_be_visible()


def test_search_leaves_the_names_that_have_it(page: Page) -> None:
    seek(page, 30.0)
    page.locator("body").press("/")
    page.keyboard.type("ME")
    expect(page.locator("#tables tbody tr:visible")).to_have_count(1)
    page.get_by_role("tab", name="Workers").click()
    expect(page.locator("#tables")).to_contain_text("No name has this in it.")
    page.get_by_label("Search").press("Escape")
    expect(page.locator("#table-workers tbody tr")).to_have_count(3)


def test_names_are_text(page: Page) -> None:
    seek(page, 30.0)
    page.get_by_role("tab", name="Adapters").click()
    page.get_by_role("button", name=ADAPTERS[2], exact=True).first.click()
    expect(page.locator("#details h2")).to_contain_text(ADAPTERS[2])
    assert page.locator("main img").count() == 0
    assert "Lorrery" in page.title()


def test_the_theme_is_the_systems_until_the_button_changes_it_and_the_choice_is_kept(page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert light != dark
    page.get_by_role("button", name="Theme: dark").click()
    assert page.evaluate(ground) == light
    page.reload()
    expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
    assert page.evaluate(ground) == light
    expect(page.locator("#connection")).to_have_text("record")


SIZES = [(390, 844), (768, 1024), (1024, 768), (1280, 800), (1440, 900), (2560, 1440)]


@pytest.fixture(scope="module")
def crowded(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page of a record with long names, many of them, and much that is wrong."""
    record = fake_record(tmp_path_factory.mktemp("crowded") / "fake.ndjson.gz", 28.0, num_workers=6)
    with served(record) as url, page_of(chromium, url, still=True) as page:
        expect(page.locator("#connection")).to_have_text("record")
        page.locator("body").press("End")
        expect(page.locator("#clock")).to_have_text("0:28")
        yield page


# Every text but that of a name, whose start may give way, lies within whatever cuts off or scrolls what is beyond it.
CLIPPED = """() => {
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || element.closest('.cut, .hidden, noscript')) continue;
    if (!element.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(walk.currentNode);
    for (const { left, right, top, bottom, width } of range.getClientRects()) {
      if (!width) continue;
      for (let box = element; box; box = box.parentElement) {
        const style = getComputedStyle(box);
        if (style.overflowX === 'visible' && box !== document.documentElement) continue;
        const { left: from, right: to, top: above, bottom: below } = box.getBoundingClientRect();
        const beyond = left < from - 1 || right > to + 1;
        const under = style.overflowY === 'hidden' && (top < above - 1 || bottom > below + 1);
        if (beyond || under) found.push(`${walk.currentNode.data.trim()} in ${box.tagName}#${box.id}.${box.className}`);
        if (style.overflowY !== 'visible' && style.overflowY !== 'hidden') break; // what is above it scrolls
      }
    }
  }
  return found;
}"""


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_no_text_is_cut_but_names_in_their_middle(crowded: Page, width: int, height: int) -> None:
    crowded.keyboard.press("Escape")
    crowded.set_viewport_size({"width": width, "height": height})
    for table in ("Adapters", "Workers", "Tenants"):
        crowded.get_by_role("tab", name=table).click()
        assert crowded.evaluate(CLIPPED) == []
        row = crowded.locator(f"#table-{table.lower()} tbody tr").nth(1)
        assert row.locator(".cut").bounding_box()["width"] > 30
    crowded.get_by_role("button", name="worker-3:").click()
    expect(crowded.locator("#details")).to_be_visible()
    assert crowded.evaluate(CLIPPED) == []
    crowded.keyboard.press("Escape")
    crowded.get_by_text("How to read this").click()
    assert crowded.evaluate(CLIPPED) == []
    crowded.get_by_text("How to read this").click()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nothing_is_wider_than_the_window(crowded: Page, width: int, height: int) -> None:
    crowded.set_viewport_size({"width": width, "height": height})
    assert crowded.evaluate("document.documentElement.scrollWidth") == width
    worker = crowded.get_by_role("button", name="worker-1:").element_handle()
    assert worker is not None
    # The stage learns of its new size with the frame after the one that laid out the window.
    within = "([body, width]) => body.getBoundingClientRect().x >= 0 && body.getBoundingClientRect().right <= width"
    crowded.wait_for_function(within, arg=[worker, width])


def test_a_long_name_keeps_its_end_and_is_whole_where_the_pointer_rests(crowded: Page) -> None:
    crowded.keyboard.press("Escape")
    crowded.set_viewport_size({"width": 1024, "height": 768})
    crowded.get_by_role("tab", name="Tenants").click()
    name = crowded.locator("#table-tenants .cut").filter(has_text=HOSTILE[0])
    expect(name).to_have_attribute("title", HOSTILE[0])
    start, end = name.locator("span").all()
    assert start.evaluate("element => element.scrollWidth > element.clientWidth")
    assert end.text_content() == HOSTILE[0][-7:]


def test_a_lost_worker_can_be_dismissed(page: Page) -> None:
    seek(page, 70.0)
    gone = page.get_by_role("button", name="worker-2 has been gone for 10 s")
    expect(gone).to_be_visible()
    expect(page.get_by_role("button", name="worker-2: lost")).to_be_visible()
    page.get_by_role("button", name="Dismiss", exact=True).click()
    expect(gone).to_have_count(0)
    expect(page.get_by_role("button", name="worker-2: lost")).to_have_count(0)
    page.locator("body").press("ArrowRight")
    expect(page.locator("#notices")).to_contain_text("worker-1 admits nothing")
    expect(gone).to_have_count(0)


def test_a_live_feed_is_shown_and_a_broken_one_tried_again(chromium: Browser) -> None:
    feed = FakeFeed(num_workers=3)
    with served(feed) as url, page_of(chromium, url, still=True) as page:
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#numbers")).to_contain_text("3 workers")
        feed.fails_after = 0
        expect(page.locator("#connection")).to_have_text("no cluster")
        expect(page.locator("#advice")).to_contain_text("the made-up cluster is gone")
        feed.fails_after = None
        expect(page.locator("#connection")).to_have_text("live")
        page.get_by_role("tab", name="Adapters").click()
        expect(page.locator("#table-adapters")).to_contain_text(HOSTILE[0])
        assert page.locator("main img").count() == 0


# ---- without a cluster: the modules by themselves ----------------------------------------------------------------


def test_bodies_never_overlap_nor_leave_the_stage(page: Page) -> None:
    found = page.evaluate("""async () => {
      const { layout } = await import('/stage.js');
      const wrong = [];
      for (const [width, height] of [[990, 660], [374, 400], [1700, 1200], [640, 900]]) {
        for (const number of [1, 2, 3, 4, 5, 8, 13, 16, 27, 32, 64, 100, 128]) {
          const { cell, sun, places } = layout(number, width, height);
          const room = cell / 2 - 1;
          const out = places.some(({ x, y }) => Math.abs(x) + room > width / 2 || Math.abs(y) + room > height / 2);
          const onSun = places.some(({ x, y }) => Math.hypot(x, y) < sun * 0.62 + cell * 0.4);
          const apart = places.flatMap((a, i) => places.slice(0, i).map((b) => Math.hypot(a.x - b.x, a.y - b.y)));
          const least = Math.min(Infinity, ...apart);
          if (places.length !== number || out || onSun || least < cell * 0.85) {
            wrong.push({ width, height, number, cell, least, out, onSun });
          }
        }
      }
      return wrong;
    }""")
    assert found == []


def test_colours_can_be_told_apart_by_colour_blind_people_and_against_the_ground(page: Page) -> None:
    for theme, ground in (("light", "#faf8f3"), ("dark", "#0c0f15")):
        colours = page.evaluate("(theme) => import('/colours.js').then((palette) => palette.swatches(theme))", theme)[
            :8
        ]
        for vision, matrix in VISIONS.items():
            labs = [lab(seen(linear(colour), matrix)) for colour in colours]
            least = min(math.dist(one, other) for number, one in enumerate(labs) for other in labs[:number])
            assert least > 10, (theme, vision)
        assert min(contrast(colour, ground) for colour in colours) > 2.5


def test_the_busiest_have_colours_of_their_own_and_keep_them(page: Page) -> None:
    before, after, others = page.evaluate("""async () => {
      const { Colours, NUM_DISTINCT } = await import('/colours.js');
      const colours = new Colours();
      const names = Array.from({ length: 200 }, (_, n) => `lora-${n}`);
      colours.assign(names);
      const first = names.slice(0, NUM_DISTINCT);
      const before = first.map((name) => colours.index(name));
      colours.assign([...first].reverse().concat(names.slice(NUM_DISTINCT)));
      return [before, ...[first, names.slice(NUM_DISTINCT)].map((some) => some.map((name) => colours.index(name)))];
    }""")
    assert sorted(before) == list(range(8))
    assert after == before
    assert min(others) >= 8


def test_colours_are_the_same_on_every_page_and_come_back(page: Page) -> None:
    one, other, back = page.evaluate("""async () => {
      const { Colours } = await import('/colours.js');
      const names = Array.from({ length: 40 }, (_, n) => `lora-${n}`);
      const first = names.slice(0, 8);
      const colours = (ranked) => { const made = new Colours(); made.assign(ranked); return made; };
      const [a, b] = [colours(first), colours([...first].reverse())];
      const of = (made) => first.map((name) => made.index(name));
      const before = of(a);
      a.assign(names.slice(8)); // others need the colours
      a.assign(first);
      return [before, of(b), of(a)];
    }""")
    assert one == other == back


def linear(colour: str) -> list[float]:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def seen(rgb: list[float], matrix: list[list[float]]) -> list[float]:
    return [min(1.0, max(0.0, sum(m * c for m, c in zip(row, rgb, strict=True)))) for row in matrix]


def lab(rgb: list[float]) -> tuple[float, float, float]:
    xyz = [sum(m * c for m, c in zip(row, rgb, strict=True)) for row in XYZ]
    f = [t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (xyz[0] / 0.9505, xyz[1], xyz[2] / 1.089)]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def contrast(one: str, other: str) -> float:
    light = sorted(sum(m * c for m, c in zip(XYZ[1], linear(colour), strict=True)) for colour in (one, other))
    return (light[1] + 0.05) / (light[0] + 0.05)


XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
# Machado, Oliveira and Fernandes 2009, severity 1.
VISIONS = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
