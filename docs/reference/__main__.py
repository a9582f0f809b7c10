"""Write docs/settings.md, docs/grpc.md and docs/serve.md: `python -m docs.reference`, or `make docs`."""

from docs.reference.grpc_page import grpc_page
from docs.reference.pages import DOCS
from docs.reference.serve_page import serve_page
from docs.reference.settings_page import settings_page

for name, page in (("settings.md", settings_page()), ("grpc.md", grpc_page()), ("serve.md", serve_page())):
    (DOCS / name).write_text(page, encoding="utf-8")
