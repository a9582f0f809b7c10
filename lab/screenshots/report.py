"""docs/figures/report.png: bursts on two workers with more adapters than they hold at once, and a queue that fills."""

from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import lorrery
from lab.screenshots.browser import browser, page_of

WIDTH, HEIGHT = 1200, 1720

CLUSTER = {"adapters.max_loras": 8, "adapters.max_cpu_loras": 16, "scheduler.max_waiting_requests": 150}
WORKLOAD = {
    "rate": 14,
    "duration": 400,
    "bursts": "factor=4,for=20,share=0.2",
    "adapters": "all",
    "adapter_exponent": 0.6,
    "input_range": "32:1500",
    "output_range": "16:400",
    "seed": 7,
}


def take(folder: Path) -> list[Path]:
    """Simulate, report, and write the top of the page as a picture."""
    figure = folder.absolute() / "report.png"
    with TemporaryDirectory() as place, chdir(place):  # the page names its folder as it was given
        lorrery.simulate(None, WORKLOAD, workers=2, overrides=CLUSTER).write("out/bursts")
        page_file = lorrery.report("out/bursts").absolute()
        with browser() as running, page_of(running, page_file.as_uri(), width=WIDTH, height=HEIGHT) as page:
            page.screenshot(path=figure)
    return [figure]
