"""Write the dashboards: `python -m lab.dashboards`, or `make dashboards`."""

from lab.dashboards.boards import FOLDER, rendered

FOLDER.mkdir(parents=True, exist_ok=True)
wanted = rendered()
for stale in set(FOLDER.glob("*.json")) - {FOLDER / name for name in wanted}:
    stale.unlink()
for name, text in wanted.items():
    (FOLDER / name).write_text(text, encoding="utf-8")
