"""Configs of adapters: what is read, and what a file that does not answer holds up."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from lorrery.router import peft
from lorrery.router.peft import CONFIG, MAX_CONFIG_BYTES, AdapterReader, read_adapter, read_config
from lorrery.service.errors import FormatError, InvalidRequest, UnknownName
from tests.router.adapter_folder import of_header, weights, write_adapter
from tests.router.http.conftest import TIMEOUT_SECONDS


def written(folder: Path, config: Any) -> str:
    """Write a config into a folder; return the folder."""
    (folder / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return str(folder)


ALL = {"lora_alpha": 8, "target_modules": []}
"""What a config needs beside its rank."""


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
        ({"use_dora": True}, "use_dora = true; vLLM does not support DoRA; give an adapter without it"),
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
        await AdapterReader(64).read(written(tmp_path, {"r": 8, **ALL, **feature}))
    assert f"cannot be loaded: adapter_config.json has {why}" in str(caught.value)


@pytest.mark.parametrize("name", ["r", "lora_alpha", "target_modules"])
def test_a_config_without_a_field_that_vllm_needs_is_refused(tmp_path: Path, name: str):
    with pytest.raises(FormatError, match=f"adapter_config.json has no {name}; "):
        read_adapter(write_adapter(tmp_path, **{name: None}), 64)


TENSOR = '"x": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}'


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"", "is cut short"),
        (b"1234567", "is cut short"),
        (weights()[:-1], "is cut short, or has bytes of no tensor"),
        (weights() + b"x", "is cut short, or has bytes of no tensor"),
        (b"x" * 200, "has no header"),
        (b"\xff" * 200, "has no header"),
        (of_header(b"{}"), "has no tensors"),
        (of_header(b'{"__metadata__": {}}'), "has no tensors"),
        (of_header(b"[]"), "has an invalid header"),
        (of_header(b"[" * 100_000), "has an invalid header"),
        (of_header(b"\xff\xfe"), "has an invalid header"),
        (of_header(f"{{{TENSOR}}}".replace("F16", "F17").encode(), 4), "has an invalid header"),
        (of_header(f"{{{TENSOR}}}".replace("[2]", "[3]").encode(), 4), "has an invalid header"),
        (of_header(f"{{{TENSOR}}}".replace("[2]", f"[{'9' * 5_000}]").encode(), 4), "has an invalid header"),
        (of_header(f"{{{TENSOR}}}".replace("[2]", "[4294967296" + ",4294967296" * 2_000 + "]").encode(), 4), "invalid"),
        (of_header(f"{{{TENSOR}}}".replace("[2]", "[-2]").encode(), 4), "has an invalid header"),
        (of_header(f"{{{TENSOR}}}".replace("[0, 4]", "[-4, 0]").encode(), 4), "has an invalid header"),
        (of_header(f"{{{TENSOR}, {TENSOR.replace('x', 'y')}}}".encode(), 4), "has bytes of no tensor"),
    ],
)
def test_weights_that_cannot_be_read_are_refused(tmp_path: Path, file: bytes, why: str):
    with pytest.raises(FormatError, match=f"adapter_model.safetensors .*{why}"):
        read_adapter(write_adapter(tmp_path, file), 64)


def test_weights_of_safetensors_or_of_pytorch_must_be_there(tmp_path: Path):
    folder = write_adapter(tmp_path)
    assert read_adapter(folder, 64) == (8, {"q_proj", "v_proj"})
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(FormatError, match=r"neither adapter_model\.safetensors nor adapter_model\.bin"):
        read_adapter(folder, 64)
    for name in ("adapter_model.pt", "adapter_model.bin"):  # the second one is read first
        path = tmp_path / name
        for content in (b"", b"junk"):
            path.write_bytes(content)
            with pytest.raises(FormatError, match=f"{name} is no file of PyTorch"):
                read_adapter(folder, 64)
        with ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", b"")
        assert read_adapter(folder, 64).rank == 8
        path.write_bytes(b"\x80\x02\x8a")  # as before PyTorch 1.6
        assert read_adapter(folder, 64).rank == 8


def test_what_vllm_takes_by_mistake_is_taken_with_its_quirks(tmp_path: Path):
    folder = write_adapter(tmp_path, peft_type="PREFIX_TUNING")
    assert read_adapter(folder, 64, quirks=True).rank == 8
    with pytest.raises(FormatError, match="peft_type"):
        read_adapter(folder, 64)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"r": None}, "r = null; it must be a rank, 1 or more"),
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
        await AdapterReader(64).read(written(tmp_path, config | ALL if isinstance(config, dict) else config))
    assert why in str(caught.value)
    assert caught.value.facts == {"field": "source_path", "value": repr(str(tmp_path))}


async def test_what_is_not_there_is_not_found(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    for folder in (tmp_path, tmp_path / "nowhere", file):
        with pytest.raises(UnknownName, match=r"No adapter found for .*: it has no adapter_config\.json"):
            await AdapterReader(64).read(str(folder))
    with pytest.raises(InvalidRequest, match="cannot be read: embedded null byte"):
        await AdapterReader(64).read("a\0b")


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
    over, read = threading.Event(), peft.read_adapter

    def hang(folder: str, max_lora_rank: int, *, quirks: bool) -> peft.Config:
        over.wait(TIMEOUT_SECONDS)
        return read(folder, max_lora_rank, quirks=quirks)

    monkeypatch.setattr(peft, "read_adapter", hang)
    reader, folder = AdapterReader(64), write_adapter(tmp_path)
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
peft.read_adapter = lambda *_, **__: threading.Event().wait()
try:
    asyncio.run(peft.AdapterReader(64).read("/x"))
except peft.InvalidRequest:
    print("refused")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
    )
    assert (ended.stdout, ended.stderr) == ("refused\n", "")
