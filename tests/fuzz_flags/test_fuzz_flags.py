"""Every subcommand under wrong and hostile values; a part of what `make fuzz-flags` runs."""

import subprocess
import sys

import pytest

from lorrery.cli.app import PARTS
from tests.fuzz_flags import fuzz
from tests.fuzz_flags.cases import draw_case, leaves, setting_keys
from tests.fuzz_flags.fuzz import is_wrong

NUM_CASES = 30


@pytest.mark.timeout(240)
def test_whatever_is_given_ends_with_a_documented_exit_code_and_no_traceback() -> None:
    # A process of its own, since a process with threads must not fork.
    command = [sys.executable, "-m", "tests.fuzz_flags.fuzz", "--seed", "1", "--cases", str(NUM_CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{NUM_CASES} cases, 0 wrong" in done.stdout


@pytest.mark.parametrize(
    ("code", "output", "wrong"),
    [
        (2, "lorrery: error: --rate is nan", False),
        (1, "Traceback (most recent call last):\n  ...", True),
        (70, "", True),
        (-9, "", True),
        (0, "x.py:3: RuntimeWarning: overflow", True),
    ],
)
def test_a_traceback_a_warning_a_kill_and_an_unknown_code_are_wrong(code: int, output: str, wrong: bool) -> None:
    assert is_wrong(code, output) is wrong


def test_every_option_is_drawn_sooner_or_later() -> None:
    assert {leaf.words[0] for leaf in leaves()} == set(PARTS)
    assert "scheduler.policy" in setting_keys()
    given = {
        (case.arguments[0], one) for number in range(8000) for case in [draw_case(1, number)] for one in case.arguments
    }
    for leaf in leaves():
        for parameter in leaf.parameters:
            names = {(leaf.words[0], one) for one in (*parameter.opts, *parameter.secondary_opts)}
            assert parameter.param_type_name == "argument" or names & given, (leaf.words, parameter.name)


def test_a_case_is_the_same_again() -> None:
    assert [draw_case(7, number) for number in range(50)] == [draw_case(7, number) for number in range(50)]
    assert draw_case(7, 3) != draw_case(8, 3)


def test_a_long_run_says_how_far_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "run", lambda case: (int(case.number == 3), ""))
    lines: list[str] = []
    outcome = fuzz.fuzz(1, range(2 * fuzz.CASES_PER_LINE + 1), show=lines.append)
    assert lines == ["100 of 201 cases done, 0 wrong", "200 of 201 cases done, 0 wrong"]
    assert sum(outcome.codes.values()) == 201
