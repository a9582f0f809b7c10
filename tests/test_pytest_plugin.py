"""The plugin of pytest, in test suites of its own: the fixture, its marker, and that nothing is left over."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.cluster.harness import wait_until
from tests.test_engines import group_of

pytest_plugins = "pytester"

# An editable install of an earlier version does not name the plugin.
NAMED = [] if entry_points(group="pytest11", name="lorrery") else ["-p", "lorrery.pytest_plugin"]
PLAIN = ["-p", "no:cacheprovider", "-p", "no:asyncio", *NAMED]

ROUTING = """
import pathlib, pytest

def noted(engines):
    with open("groups", "a") as file:
        print(engines.process_group, file=file)

@pytest.mark.lorrery(2, lora_modules={"sql": 16}, ports=[0, 0])
def test_routing(lorrery_engines):
    noted(lorrery_engines)
    assert [engine.adapters for engine in lorrery_engines] == [["sql"], ["sql"]]

@pytest.mark.lorrery(replicas=1)
def test_failure(lorrery_engines):
    noted(lorrery_engines)
    (engine,) = lorrery_engines
    engine.inject("delay,seconds=0.001")
    engine.complete("hi", max_tokens=1)
    assert engine.requests == {}
"""


def groups(folder: Path) -> set[int]:
    return {*map(int, (folder / "groups").read_text().split())}


@pytest.mark.cluster
async def test_the_marker_says_which_engines_and_a_failure_leaves_none(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(ROUTING)
    result = pytester.runpytest_subprocess("--strict-markers", "-W", "error", *PLAIN)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: assert {'base': 1} == {}*", "*stderr teardown*", "*faults_added*"])
    (group,) = groups(pytester.path)
    await wait_until(lambda: not group_of(group))


@pytest.mark.cluster
def test_the_example_of_the_docs_passes(pytester: pytest.Pytester) -> None:
    page = (Path(__file__).parents[1] / "docs" / "gateways.md").read_text(encoding="utf-8")
    pytester.makepyfile(page.partition("## In a test")[2].partition("```python\n")[2].partition("```")[0])
    pytester.runpytest_subprocess("-W", "error", *PLAIN).assert_outcomes(passed=1)


@pytest.mark.cluster
async def test_each_process_of_xdist_has_engines_of_its_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(ROUTING)
    result = pytester.runpytest_subprocess("-n", "2", *PLAIN)
    result.assert_outcomes(passed=1, failed=1)
    found = groups(pytester.path)
    assert len(found) == 2
    await wait_until(lambda: not [group for group in found if group_of(group)])


def test_a_suite_without_engines_imports_nothing_of_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing():
            ours = {name for name in sys.modules if name.startswith("lorrery")}
            assert ours <= {"lorrery", "lorrery.pytest_plugin"}
        """
    )
    pytester.runpytest_subprocess(*PLAIN).assert_outcomes(passed=1)


def test_wrong_arguments_of_the_marker_are_an_error_of_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.lorrery(2, ports=[0])
        def test_nothing(lorrery_engines):
            pass
        """
    )
    result = pytester.runpytest_subprocess(*PLAIN)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*2 engines on 1 ports; give as many*"])
