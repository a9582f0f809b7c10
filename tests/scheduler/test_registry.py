"""Adapters that the settings list: families are never spelt out to check them."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lorrery.scheduler.settings import AdapterSettings

NAMES = st.text("a1-", min_size=1, max_size=4).filter(lambda name: name[0] == "a")
SPECS = st.lists(
    st.fixed_dictionaries({"id": NAMES, "rank": st.just(8)}, optional={"count": st.integers(1, 12)}), max_size=6
)


def spelt_out(registry: list[dict[str, Any]]) -> list[str]:
    return [
        name
        for spec in registry
        for name in ([f"{spec['id']}-{n}" for n in range(spec["count"])] if "count" in spec else [spec["id"]])
    ]


@given(SPECS, st.lists(st.text("a10-", max_size=5)))
def test_names_are_looked_up_and_found_twice_as_if_all_were_spelt_out(
    registry: list[dict[str, Any]], asked: list[str]
) -> None:
    names = spelt_out(registry)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        with pytest.raises(ValidationError, match="is listed twice") as caught:
            AdapterSettings(registry=registry)  # type: ignore[arg-type]
        assert any(repr(name) in str(caught.value) for name in twice)
        return
    settings = AdapterSettings(registry=registry)  # type: ignore[arg-type]
    assert [name for name, _ in settings.expand()] == names
    assert settings.num_adapters == len(names)
    assert settings.listed([*names, *asked]) == names + [name for name in asked if name in names]
