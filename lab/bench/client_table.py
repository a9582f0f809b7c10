"""Shows the figures of `lab.bench.clients` as tables in a terminal."""

from statistics import median

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lab.bench.clients import PEER_STREAMS, Clients

SSE_AIM = 0.8


def client_table(result: Clients) -> Group:
    """Show the cost of an event over SSE and gRPC, and the tokens per CPU second of other servers."""
    edges = Table(title="Clients: CPU of the router per event, SSE beside gRPC in the same run")
    for name in ("streams", "events/s, SSE", "gRPC, us", "SSE, us", f"SSE / gRPC (aim <= {SSE_AIM})"):
        edges.add_column(name, justify="right")
    for one in result.edges:
        rate = median(window.events / window.seconds for window in one.sse)
        grpc, sse = (median(window.us_per_event for window in windows) for windows in (one.grpc, one.sse))
        edges.add_row(f"{one.num_streams}", f"{rate:,.0f}", f"{grpc:.1f}", f"{sse:.1f}", f"{one.ratio:.2f}")
    servers = Table(title=f"Clients: tokens per CPU second of the whole server, {PEER_STREAMS} streams")
    for name in ("server", "tokens/s", "tokens per CPU second", "Lorrery / it"):
        servers.add_column(name, justify="left" if name == "server" else "right")
    for name, windows in result.servers.items():
        rate = median(window.tokens / window.seconds for window in windows)
        each = median(window.tokens_per_cpu_second for window in windows)
        servers.add_row(name, f"{rate:,.0f}", f"{each:,.0f}", f"{result.ratio(name):.2f}")
    skipped = [Text(f"skipped {name}: {why}", style="dim") for name, why in result.skipped.items()]
    return Group(edges, servers, *skipped)
