"""pytest's plugin: the fixture `lorrery_engines`, which the marker `lorrery` configures (docs/gateways.md).

    @pytest.mark.lorrery(3, lora_modules={"sql": 16})
    def test_routing(lorrery_engines): ...

pytest imports this in every run of an environment with Lorrery, so all else is imported when a test uses the fixture.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lorrery.testing import Fleet


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "lorrery(replicas=3, model=..., **flags): what lorrery_engines starts, as for lorrery.engines"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what the fixture needs in the background, if a test that will run uses it."""
    if not session.config.option.collectonly and any(
        "lorrery_engines" in getattr(item, "fixturenames", ()) for item in session.items
    ):
        from lorrery.testing import prepare

        prepare()


@pytest.fixture
def lorrery_engines(request: pytest.FixtureRequest) -> "Iterator[Fleet]":
    """Engines that serve OpenAI's API on free ports; the arguments of `lorrery.engines` are those of the marker."""
    import lorrery

    closest = request.node.get_closest_marker("lorrery")
    arguments = closest if closest is not None else pytest.mark.lorrery.mark
    with lorrery.engines(*arguments.args, **arguments.kwargs) as fleet:
        yield fleet
