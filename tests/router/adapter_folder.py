"""Folders of adapters as PEFT writes them, and as they should not be."""

import json
import struct
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def weights(rank: int = 8, width: int = 16) -> bytes:
    """Return a file of safetensors with one projection of one layer."""
    size = rank * width * 2
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    header = {
        f"{prefix}.lora_A.weight": {"dtype": "BF16", "shape": [rank, width], "data_offsets": [0, size]},
        f"{prefix}.lora_B.weight": {"dtype": "BF16", "shape": [width, rank], "data_offsets": [size, 2 * size]},
    }
    return of_header(json.dumps(header).encode(), 2 * size)


def of_header(header: bytes, num_bytes: int = 0) -> bytes:
    """Return a file of safetensors with this header."""
    return struct.pack("<Q", len(header)) + header + bytes(num_bytes)


def write_adapter(folder: Path, file: bytes | None = None, **config: Any) -> str:
    """Write an adapter; return its folder. A value of None in `config` leaves the field out."""
    folder.mkdir(exist_ok=True)
    fields = {name: value for name, value in (CONFIG | config).items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    (folder / "adapter_model.safetensors").write_bytes(weights() if file is None else file)
    return str(folder)
