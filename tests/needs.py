"""Marks of tests that need a program beyond Python: skipped without it, unless TESTS_NO_SKIPS is set, as in CI.

`make test` installs what it can, and prints a line for what it cannot.
"""

import os
import shutil

import pytest

from lab.screenshots.browser import chromium

OPENSSL = shutil.which("openssl") or "openssl"


def _has_chromium() -> bool:
    try:
        chromium()
    except FileNotFoundError:
        return False
    return True


def _needs(*, has: bool, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not has and not os.environ.get("TESTS_NO_SKIPS"), reason=reason)


needs_chromium = _needs(has=_has_chromium(), reason="no Chromium to show pages with")
needs_openssl = _needs(has=shutil.which(OPENSSL) is not None, reason="no openssl to make certificates with")
