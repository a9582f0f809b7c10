"""Every policy, by itself, works with the shipped settings."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.simulate import app
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.policies import BATCHINGS, QUEUES

SHIPPED = Path(__file__).parents[2] / "deploy" / "cluster.toml"
NEEDS = {"cluster": "scheduler.batch_num_adapters=4"}
OF_SGLANG = ["scheduler.policy=lpm", "scheduler.memory=estimated", "scheduler.batching=sglang"]
GO_WITH = {
    "policy=fcfs_tail": OF_SGLANG[1:],
    "policy=lpm": OF_SGLANG[1:],
    "policy=fcfs batching=sglang": OF_SGLANG,
    "policy=fcfs batching=vllm": ["scheduler.memory=on_demand"],
}
"""What an engine's own rules go together with."""
CHOICES = [f"policy={name}" for name in QUEUES] + [f"placement={name}" for name in PLACEMENTS]


def simulate(*overrides: str) -> tuple[int, str]:
    arguments = ["--config", str(SHIPPED), "-n", "100", "--rate", "20", "--adapters", "all"]
    for override in overrides:
        arguments += ["--set", override]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})
    return result.exit_code, result.output + str(result.exception or "")


@pytest.mark.parametrize("choice", [*CHOICES, *(f"policy=fcfs batching={name}" for name in BATCHINGS)])
def test_every_choice_alone_simulates_with_the_shipped_settings(choice: str) -> None:
    overrides = [f"scheduler.{one}" for one in choice.split()]
    overrides += [NEEDS[name] for name in NEEDS if f"policy={name}" in choice]
    overrides += GO_WITH.get(choice, [])
    exit_code, output = simulate(*overrides)
    assert exit_code == 0, output
    assert "100" in output


@pytest.mark.parametrize("policy", NEEDS)
def test_a_policy_that_needs_a_setting_names_it(policy: str) -> None:
    exit_code, output = simulate(f"scheduler.policy={policy}")
    assert exit_code != 0
    assert NEEDS[policy].partition("=")[0].removeprefix("scheduler.") in output
