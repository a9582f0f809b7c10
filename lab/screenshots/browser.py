"""Chromium without a window, for pictures and for tests of pages.

The browser is the machine's own (Debian: `apt-get install chromium`); LORRERY_CHROMIUM names another. playwright drives
it, and downloads none.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def chromium() -> str:
    """Return the browser's path.

    Raises:
        FileNotFoundError: there is none.
    """
    named = os.environ.get("LORRERY_CHROMIUM")
    for name in (named,) if named else NAMES:
        if (path := shutil.which(name)) and _runs(path):
            return path
    looked = named or ", ".join(NAMES)
    raise FileNotFoundError(f"no Chromium (looked for {looked}): apt-get install chromium, or set LORRERY_CHROMIUM")


@cache
def _runs(path: str) -> bool:
    """Return whether a browser starts: Ubuntu's package only says that it is a snap."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False)  # noqa: S603  a browser
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser; without its sandbox, which needs rights that containers lack: it shows our own pages only."""
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield running
        finally:
            running.close()


@contextmanager
def page_of(
    running: Browser, url: str, *, width: int = 1440, height: int = 900, dark: bool = False, still: bool = False
) -> Iterator[Page]:
    """Open a page in a window of its own.

    Args:
        running: the browser.
        url: of the page.
        width: of the window, in CSS pixels.
        height: likewise.
        dark: whether the system prefers dark colours.
        still: whether the person prefers reduced motion.
    """
    context = running.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce" if still else "no-preference",
    )
    try:
        page = context.new_page()
        page.goto(url)
        yield page
    finally:
        context.close()
