from lorrery.service.names import Recent


def test_the_oldest_entry_goes_first() -> None:
    recent: Recent[str, int] = Recent(2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        recent.put(key, value)
    assert (len(recent), "a" in recent, "b" in recent, "c" in recent) == (2, True, False, True)
    assert (recent.pop("a"), recent.pop("a"), len(recent)) == (3, None, 1)
