"""A hook of mkdocs: links of docs/ to files outside of it, such as the code, lead to the repository."""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(\]\(|href=\")((?:\.\./)+[^)\"#\s]+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: object) -> str:  # noqa: ANN401  mkdocs'
    """Return a page's text with such links made absolute."""
    del files
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def absolute(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[2]))
        return found[0] if path.startswith("docs/") else f"{found[1]}{config.repo_url}/blob/main/{path}"

    return _LINK.sub(absolute, markdown)
