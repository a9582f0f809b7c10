"""Write pages of docs/ and the chart's schema, made from the code: `python -m lab.reference`, or `make docs`."""

from lab.reference.chart_schema import chart_schema
from lab.reference.engines_page import engines_page
from lab.reference.grpc_page import grpc_page
from lab.reference.metrics_page import metrics_page
from lab.reference.pages import DOCS
from lab.reference.settings_page import settings_page

PAGES = {
    "settings.md": settings_page,
    "grpc.md": grpc_page,
    "metrics.md": metrics_page,
    "engines.md": engines_page,
    "../deploy/helm/lorrery/values.schema.json": chart_schema,
}
"""Path from docs/, and the function that returns the text."""

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
