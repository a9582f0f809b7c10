"""`lorrery config`: the values that hold, and where each comes from."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.config import app
from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import load


def shown(*arguments: str | Path) -> dict[str, tuple[str, str]]:
    """Return the lines as setting -> (value, origin)."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    found = {}
    for line in result.output.splitlines():
        setting, _, origin = line.rpartition("  # ")
        name, _, value = setting.strip().partition(" = ")
        found[name] = value.strip(), origin
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(
        'model = "Llama-3.1-8B"\nengine = "vllm"\n[scheduler]\nmax_num_seqs = 9\n[worker]\ngpu = "H100-SXM"\n'
        '[[workers]]\n[[workers]]\ngpu = "L40S"\n'
    )
    return path


def test_each_value_says_where_it_comes_from(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORRERY_SCHEDULER__SEED", "5")
    found = shown("--config", file, "--set", "worker.weight_dtype=fp8", "--kv-dtype", "fp8", "scheduler", "worker")
    assert found["scheduler.max_num_seqs"] == ("9", f"file {file}")
    assert found["scheduler.max_num_batched_tokens"] == ("8192", "engine = 'vllm'")
    assert found["scheduler.seed"] == ("5", "environment LORRERY_SCHEDULER__SEED")
    assert found["worker.weight_dtype"] == ('"fp8"', "command line")
    assert found["worker.kv_dtype"] == ('"fp8"', "command line")
    assert found["worker.lora.launch_us"][1] == "default"
    of_group = shown("--config", file, "--set", "worker.group=1", "worker.gpu", "scheduler.max_num_batched_tokens")
    assert of_group["worker.gpu"] == ('"L40S"', "workers.1")
    assert of_group["scheduler.max_num_batched_tokens"] == ("2048", "engine = 'vllm'")


def test_an_engine_of_a_later_source_wins_over_the_file(file: Path):
    found = shown("--config", file, "--engine", "sglang", "scheduler.max_num_seqs", "scheduler.batching")
    assert found["scheduler.max_num_seqs"] == ("2048", "engine = 'sglang'")
    assert shown("--config", file, "--set", "engine=sglang", "--set", "scheduler.max_num_seqs=3")[
        "scheduler.max_num_seqs"
    ] == ("3", "command line")


def test_what_is_printed_is_a_settings_file_of_the_same_settings(file: Path, tmp_path: Path):
    result = CliRunner().invoke(app, ["--config", str(file), "--all"])
    again = tmp_path / "again.toml"
    again.write_text(result.output)
    assert "scheduler" in tomllib.loads(result.output)
    assert load(again) == load(file)


def test_a_key_that_there_is_not_is_named(file: Path):
    with pytest.raises(SettingsError, match=r"scheduler\.max_seqs: no such setting; did you mean .*max_num_seqs"):
        shown("--config", file, "worker", "scheduler.max_seqs")


WEIGHTS = """
[adapters]
registry = [{ id = "org/a.b", rank = 8 }, { id = "c+d", rank = 4, count = 2 }]
[scheduler]
policy = "vtc_fair"
fair_weights = { "org/a.b" = 2.5, "c+d-1" = 1e-5, "\\"\U0001f600" = 3 }
"""
OPTIONS = """
[scheduler]
policy = "tests.cli.test_config:Odd"
[scheduler.policy_options]
most = inf
least = -inf
since = 2026-01-02
at = 2026-01-02T03:04:05Z
none = {}
"a.b" = [{ "c/d" = inf }, {}]
[scheduler.policy_options.deep]
"x=y" = 07:32:00
[[workers]]
gpu = "A40"
lora = {}
"""


@pytest.mark.parametrize("text", [WEIGHTS, OPTIONS])
def test_odd_settings_are_printed_as_a_settings_file_of_the_same_settings(text: str, tmp_path: Path):
    file, again = tmp_path / "odd.toml", tmp_path / "again.toml"
    file.write_text(text)
    for arguments in ((), ("--all",)):
        result = CliRunner().invoke(app, ["--config", str(file), *arguments])
        again.write_text(result.output)
        assert load(again) == load(file)


def test_names_with_dots_and_empty_tables_are_found(tmp_path: Path):
    file = tmp_path / "own.toml"
    file.write_text(WEIGHTS)
    found = shown("--config", file, 'scheduler.fair_weights."org/a.b"', "tracing.headers")
    assert found == {
        'scheduler.fair_weights."org/a.b"': ("2.5", f"file {file}"), "tracing.headers": ("{}", "default"),
    }  # fmt: skip
    assert len(shown("--config", file, "scheduler.fair_weights")) == 3


def test_headers_of_tracing_are_not_shown(tmp_path: Path):
    file = tmp_path / "own.toml"
    file.write_text('[tracing.headers]\n"x.key" = "secret"\nauthorization = "Bearer secret"\n')
    result = CliRunner().invoke(app, ["--config", str(file), "--set", "tracing.headers.more=secret"])
    assert "secret" not in result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert f'# tracing.headers."x.key" is set, and not shown # file {file}' in lines
    assert "# tracing.headers.more is set, and not shown # command line" in lines
    assert not tomllib.loads(result.output)
