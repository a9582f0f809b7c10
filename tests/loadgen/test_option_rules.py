"""Options that play no part in what is asked for are refused, with what it would take."""

from typing import Any

import pytest

from lorrery.loadgen.option_rules import check
from lorrery.loadgen.options import LoadOptions
from lorrery.service.errors import SettingsError

ADAPTERS = {"num_adapters": 8}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workload": "azure", "rate": 7.0}, "--rate 7 goes with --workload poisson, constant, .* --speed-up F plays"),
        ({"workload": "mooncake", "cv": 7.0}, "--cv 7 goes with --workload poisson, slora, chat, sharegpt only"),
        ({"workload": "constant", "cv": 3.0}, "--cv 3 goes with .* only; --workload is constant$"),
        ({"workload": "azure", "input_range": (7, 7)}, "--input-range 7:7 goes with .* --workload is azure; its req"),
        ({"workload": "azure", "output_range": (8, 16)}, "--output-range 8:16 goes with"),
        (
            {"alpha": 0.5, **ADAPTERS},
            "--alpha 0.5 goes with --workload slora only; .* the skew of others is --adapter-",
        ),
        ({"think": 3.0}, "--think 3 goes with --workload chat, sharegpt only; --workload is poisson$"),
        (
            {"rate": 4.0, "concurrency": 4},
            r"--rate 4 needs times, and a closed loop \(-c\) does not use the workload's",
        ),
        ({"cv": 4.0, "concurrency": 4}, "--cv 4 needs times"),
        ({"bursts": "factor=5,for=10", "concurrency": 4}, "--bursts factor=5,for=10 needs times"),
        ({"drift": "shift,every=3", "concurrency": 4, **ADAPTERS}, "--drift shift,every=3 needs times"),
        ({"workload": "mooncake", "jitter": 3.0, "concurrency": 4}, "--jitter 3 needs times"),
        ({"speed_up": 2.0, "concurrency": 4}, "--speed-up 2 needs times"),
        ({"drift": "shift,every=3"}, "--drift shift,every=3 needs adapters: add --adapters all, or --num-adapters N"),
        ({"adapter_exponent": 2.0}, "--adapter-exponent 2 needs adapters"),
        ({"workload": "slora", "alpha": 0.5}, "--alpha 0.5 needs adapters"),
    ],
)
def test_an_option_that_plays_no_part_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check(LoadOptions(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"workload": "constant", "rate": 7.0},
        {"workload": "slora", "alpha": 0.5, "cv": 2.0, "rate": 3.0, "input_range": (7, 9), **ADAPTERS},
        {"workload": "chat", "think": 3.0, "rate": 7.0, "cv": 2.0, "output_range": (7, 9)},
        {"workload": "chat", "speed_up": 2.0, "concurrency": 4},  # it divides think times too
        {"workload": "azure", "speed_up": 2.0, "drift": "shift,every=3", "adapters": "all"},
        {"adapter_exponent": 2.0, "num_adapters": 0},  # as one point of a sweep over --num-adapters
    ],
)
def test_an_option_that_plays_a_part_is_taken(options: dict[str, Any]) -> None:
    check(LoadOptions(**options))
