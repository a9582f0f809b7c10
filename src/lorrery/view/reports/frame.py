"""The frame of every page: one file with its style and script in it, nothing fetched."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lorrery.service.installed import VERSION

__all__ = ["page"]

_HERE = Path(__file__).parent


def page(template: str, *, kind: str, title: str, beside: str, beside_it: str, **values: object) -> str:
    """Render a page.

    Args:
        template: extends `frame.html`.
        kind: of page, above its title.
        title: of it.
        beside: a line below the title; empty: none.
        beside_it: where the same figures are for programs.
        values: what the template needs.
    """
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    css, js = (Markup((_HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))  # noqa: S704  our own
    return environment.get_template(template).render(
        css=css, js=js, version=VERSION, kind=kind, title=title, beside=beside, beside_it=beside_it, **values
    )
