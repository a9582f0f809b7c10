"""All dashboards, as files."""

from pathlib import Path

from lab.dashboards import lora, overview, scheduling, services, tenants, vllm, workers

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
BOARDS = (overview, scheduling, lora, tenants, workers, services, vllm)
"""In the order in which the links at their top stand."""


def rendered() -> dict[str, str]:
    """Return the content of each file by its name."""
    return {f"{module.BOARD.name}.json": module.BOARD.to_json() for module in BOARDS}
