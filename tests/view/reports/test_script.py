"""The page in a browser: what its script adds, and that it fits a telephone, a wide screen and paper."""

import pytest

from lab.screenshots.browser import browser, page_of
from lorrery.view.reports.report import report
from tests.browser import expect
from tests.needs import needs_chromium
from tests.view.reports.runs import failed, poisson, row, write

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    rows = [
        row(i, i * 0.1, adapter_id=f"lora-{i % 7}", ttft=0.1 + 0.05 * (i % 7), tenant_id="x" * 90) for i in range(300)
    ]
    one = write(folder / "one", [*rows, failed(300, 30, detail="the queue is full " * 20)])
    several = [one, *(write(folder / (name * 20), poisson(150)) for name in ("b", "c"))]
    with browser() as running:
        yield running, {"one": report(one), "three": report(*several, file=folder / "three.html")}


def test_headings_sort_and_a_pointer_shows_values(pages):
    running, files = pages
    wrong = []
    with page_of(running, files["one"].as_uri(), width=1400) as page:
        page.on("pageerror", lambda error: wrong.append(str(error)))
        table = page.locator("#groups table").first
        heading = table.get_by_role("columnheader", name="TTFT p50")
        heading.click()
        expect(table.locator("tbody tr").first.locator("td").first).to_have_text("lora-6")
        heading.press("Enter")
        expect(table.locator("tbody tr").first.locator("td").first).to_have_text("lora-0")
        plot = page.locator("#latency .plot").first
        plot.hover()
        expect(page.locator("#tip")).to_be_visible()
        expect(page.locator("#tip")).to_contain_text("%")
        page.mouse.move(2, 2)
        expect(page.locator("#tip")).to_be_hidden()
        assert wrong == []


@pytest.mark.parametrize(("which", "width"), [("one", 390), ("three", 390), ("three", 1600)])
def test_nothing_hangs_over_the_edge(pages, which, width):
    running, files = pages
    with page_of(running, files[which].as_uri(), width=width, dark=width == 390) as page:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(20, 24, 28)" if width == 390 else "rgb(255, 255, 255)"
        )
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
