"""Configs of adapters: what is read, and what a file that does not answer holds up."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lorrery.chassis.errors import FormatError, InvalidRequest, UnknownName
from lorrery.router import peft
from lorrery.router.peft import CONFIG, MAX_CONFIG_BYTES, ConfigReader, read_config
from tests.router.http.conftest import TIMEOUT_SECONDS


def written(folder: Path, config: Any) -> str:
    """Write a config into a folder; return the folder."""
    (folder / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return str(folder)


def test_rank_and_projections_are_read(tmp_path: Path):
    assert read_config(written(tmp_path, {"r": 8, "target_modules": "q_proj"}), 64) == (8, {"q_proj"})
    assert read_config(written(tmp_path, {"r": 1, "target_modules": ["a", "b"], "x": 1}), 64) == (1, {"a", "b"})
    assert read_config(written(tmp_path, {"r": 2}), 64) == (2, frozenset())


def test_what_vllm_takes_is_taken(tmp_path: Path):
    saved = {"peft_type": "LORA", "use_dora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}}
    for more in ({}, {"modules_to_save": []}, {"modules_to_save": ["score"]}, {"rank_pattern": {"q_proj": 64}}):
        assert read_config(written(tmp_path, {"r": 8, **saved, **more}), 64).rank == 8
    assert read_config(written(tmp_path, {"r": 65}), 64).rank == 65  # what loads it refuses that


@pytest.mark.parametrize(
    ("feature", "why"),
    [
        ({"use_dora": True}, "use_dora = true; vLLM does not support DoRA"),
        ({"modules_to_save": ["score", "lm_head"]}, 'modules_to_save = ["score", "lm_head"]; vLLM supports '),
        ({"modules_to_save": "lm_head"}, 'modules_to_save = "lm_head"; '),
        ({"bias": "all"}, 'bias = "all"; vLLM supports "none" only'),
        ({"bias": None}, "bias = null; "),
        ({"peft_type": "IA3"}, 'peft_type = "IA3"; vLLM loads adapters of the type LORA only'),
        ({"rank_pattern": {"q_proj": 8, "v_proj": 65}}, "rank_pattern.v_proj = 65; max_lora_rank is 64"),
        ({"rank_pattern": {"q_proj": "8"}}, 'rank_pattern.q_proj = "8"; '),
        ({"rank_pattern": [8]}, "rank_pattern = [8]; "),
    ],
)
async def test_what_vllm_refuses_is_refused_with_field_and_value(tmp_path: Path, feature: dict[str, Any], why: str):
    with pytest.raises(InvalidRequest) as caught:
        await ConfigReader(64).read(written(tmp_path, {"r": 8, **feature}))
    assert f"cannot be loaded: adapter_config.json has {why}" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "r = null; it must be a rank, 1 or more"),
        ({"r": 0}, "r = 0; "),
        ({"r": True}, "r = true; "),
        ({"r": 2**32}, "r = 4294967296; "),
        ([], "is no JSON object; "),
        ("{", "is no JSON: "),
        ("[" * 100_000, "is no JSON: "),
        (f'{{"r": 8, "x": "{"x" * MAX_CONFIG_BYTES}"}}', f"has more than {MAX_CONFIG_BYTES} bytes"),
    ],
)
async def test_what_is_no_config_is_refused_with_the_reason(tmp_path: Path, config: Any, why: str):
    with pytest.raises(InvalidRequest) as caught:
        await ConfigReader(64).read(written(tmp_path, config))
    assert why in str(caught.value)
    assert caught.value.facts == {"field": "source_path", "value": repr(str(tmp_path))}


async def test_what_is_not_there_is_not_found(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    for folder in (tmp_path, tmp_path / "nowhere", file):
        with pytest.raises(UnknownName, match=r"No adapter found for .*: it has no adapter_config\.json"):
            await ConfigReader(64).read(str(folder))
    with pytest.raises(InvalidRequest, match="cannot be read: embedded null byte"):
        await ConfigReader(64).read("a\0b")


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_only_a_regular_file_is_read(tmp_path: Path, kind: str):
    path = tmp_path / CONFIG
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    open_files = Path("/dev/fd")
    num_open = len(list(open_files.iterdir()))
    with pytest.raises(FormatError, match="is no regular file"):
        read_config(str(tmp_path), 64)
    assert len(list(open_files.iterdir())) <= num_open


async def test_a_file_system_that_does_not_answer_costs_its_own_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peft, "CONFIG_SECONDS", 0.1)
    monkeypatch.setattr(peft, "MAX_READS", 1)
    over, read = threading.Event(), peft.read_config

    def hang(folder: str, max_lora_rank: int) -> peft.Config:
        over.wait(TIMEOUT_SECONDS)
        return read(folder, max_lora_rank)

    monkeypatch.setattr(peft, "read_config", hang)
    reader, folder = ConfigReader(64), written(tmp_path, {"r": 8})
    for _ in range(2):  # the second one waits for the thread of the first
        with pytest.raises(InvalidRequest, match=r"was not read within 0\.1 s"):
            await reader.read(folder)
    assert sum(thread.name == "adapter config" for thread in threading.enumerate()) == 1
    monkeypatch.setattr(peft, "CONFIG_SECONDS", TIMEOUT_SECONDS)
    waits = asyncio.create_task(reader.read(folder))
    over.set()
    assert (await waits).rank == 8


def test_a_process_ends_though_a_read_hangs():
    code = """
import asyncio, threading
from lorrery.router import peft
peft.CONFIG_SECONDS = 0.1
peft.read_config = lambda *_: threading.Event().wait()
try:
    asyncio.run(peft.ConfigReader(64).read("/x"))
except peft.InvalidRequest:
    print("refused")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
    )
    assert (ended.stdout, ended.stderr) == ("refused\n", "")
