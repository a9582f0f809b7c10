"""The page of a plan: simulating what it exports gives its figures."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lorrery.cli.plan import app
from lorrery.cli.plan_export import engine_command
from lorrery.cli.serve import app as serve
from lorrery.service.settings.cluster import Settings, changed
from lorrery.simulator.plan.level import level_of
from lorrery.simulator.plan.shapes import Shape
from lorrery.simulator.plan.trials import load_of
from lorrery.simulator.plan.trials import serve as simulated
from lorrery.worker.device.capacity import Workload

ASKED = (
    *("--engine", "vllm", "--model", "Llama-3.1-8B", "--gpu", "L40S", "--tp", "2", "--set", "worker.weight_dtype=fp8"),
    *("--adapters", "12", "--rank", "16", "--search", "adapters.max_loras=6", "--search", "scheduler.max_num_seqs=48"),
    *("--rate", "30", "--prompt", "200:600", "--output", "50:150", "--requests", "300", "--seeds", "1"),
    *("--slo", "ttft_p95=2", "--slo", "tokens_per_second=1000"),
)
LEVEL = level_of((("ttft_p95", 2.0), ("tokens_per_second", 1000.0)))
WORK = Workload((200, 600), (50, 150), 12)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("page")
    page, figures = folder / "plan.html", folder / "plan.json"
    result = CliRunner().invoke(app, [*ASKED, "--jobs", "1", "--page", str(page), "--json", str(figures)])
    assert result.exit_code == 0, (result.output, result.exception)
    return page.read_text(encoding="utf-8"), json.loads(figures.read_text(encoding="utf-8"))["search"]


def figures_of(settings: Settings, replicas: int) -> dict[str, float]:
    return dict(simulated(settings, load_of(WORK, 30, 300), LEVEL, replicas, gives_up=False).figures)


def told(found: dict[str, Any]) -> dict[str, float]:
    return {name: found["proofs"][-1]["seeds"][0][name] for name in found["limits"]}


def test_simulating_the_exported_flags_gives_the_pages_figures(asked: tuple[str, dict[str, Any]], tmp_path: Path):
    command = shlex.split(asked[1]["deploy"]["A replica's engine"])
    assert command[:2] == ["vllm", "serve"]
    flags = [*command[2:], "--gpu", "L40S", "--lora-modules", *(f"plan-r16-{number}=16" for number in range(12))]
    result = CliRunner().invoke(serve, [*flags, "--print-config"])
    assert result.exit_code == 0, (result.output, result.exception)
    placement = {"scheduler.placement": re.search(r"placement (\w+)", asked[1]["shape"])[1]}
    assert figures_of(changed(tomllib.loads(result.stdout), placement), asked[1]["replicas"]) == told(asked[1])


def test_simulating_the_exported_helm_values_gives_the_pages_figures(asked: tuple[str, dict[str, Any]]):
    (values,) = (text for title, text in asked[1]["deploy"].items() if title.startswith("Helm"))
    config, replicas = re.fullmatch(r"config: \|\n(.*)worker:\n  replicas: (\d+)\n", values, re.DOTALL).groups()
    settings = changed(tomllib.loads(re.sub(r"^  ", "", config, flags=re.MULTILINE)))
    assert int(replicas) == asked[1]["replicas"]
    assert figures_of(settings, int(replicas)) == told(asked[1])


def test_a_page_has_the_answer_what_surrounds_it_and_how_far_to_believe_it(asked: tuple[str, dict[str, Any]]):
    page, found = asked
    for title in ("The answer", "What more or less money buys", "If the load is another", "Deploy it"):
        assert f"<h2>{title}</h2>" in page
    assert f"{found['replicas']} x {found['shape']}" in page
    assert "nearest measured runs" in page
    assert page.count('class="chart"') == 2
    assert len(found["variations"]) == 7
    assert {one["num_replicas"] for one in found["offers"]} >= {found["replicas"], found["replicas"] + 1}
    chosen = next(one for one in found["offers"] if one["num_replicas"] == found["replicas"])
    assert chosen["figures"] == told(found)


def test_sglangs_flags_have_its_names():
    own = {"worker.tensor_parallel": 2, "adapters.max_loras": 6, "worker.weight_dtype": "fp8", "worker.gpu": "H100-SXM"}
    registry = {"adapters.registry": [{"id": "a", "rank": 8, "count": 9}]}
    settings = changed({"engine": "sglang", "model": "Llama-3.1-8B"}, {**own, **registry})
    command = engine_command(Shape((), settings, "H100-SXM", 2, None, 1.0, 1))
    assert command == (
        "python -m sglang.launch_server --model-path Llama-3.1-8B --enable-lora --tp-size 2 --quantization fp8"
        " --max-loras-per-batch 6"
    )
