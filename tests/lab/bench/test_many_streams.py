"""How the benchmark of many streams sums up."""

from lab.bench.many_streams import ManyStreams, Window


def _window(tokens: float, cpu_seconds: float, client_share: float = 0.2) -> Window:
    return Window(1.0, tokens, tokens / 2, cpu_seconds, client_share, 0.001)


def test_rounds_are_compared_one_by_one():
    few = [_window(100, 0.01), _window(100, 0.02), _window(100, 0.03)]
    many = [_window(200, 0.01), _window(200, 0.04), _window(200, 0.12)]
    edge = ManyStreams("HTTP", "router", {64: few, 1000: many})
    assert (edge.ratio(64), edge.ratio(1000), edge.void) == (1, 1, "")
    assert edge.median(64, lambda window: window.us_per_message) == 400


def test_a_client_that_takes_a_core_voids_the_figures():
    edge = ManyStreams("gRPC", "router", {64: [_window(100, 0.01), _window(100, 0.01, 0.95)]})
    assert edge.void == "the gRPC clients took 95% of a core"
