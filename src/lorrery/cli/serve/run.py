"""Runs the clusters that the flags of `lorrery serve` describe: an engine, or a fleet of equal, independent ones."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from lorrery.cli.serve.settings import Engine, settings_file
from lorrery.cli.up_cluster import Printer, in_words, run_until_cancelled
from lorrery.router.access import digest
from lorrery.service.entry_point import handled_by, stop_signals
from lorrery.service.faults.kinds import check_faults
from lorrery.service.files.writing import temporary_folder, write_output
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.overrides import check_kv_event_ports, kv_event_endpoints
from lorrery.service.local.processes import ForkServer, Show
from lorrery.service.settings.reading import setting_variables


async def run(fork_server: ForkServer, engine: Engine, ports: Sequence[int | None], announce: Path | None) -> int:
    """Run an engine per port until a signal, or until all have ended; return the exit code, the highest of them.

    Standard output gets one line per engine, once all serve; all other output goes to standard error.

    Args:
        fork_server: starts the services.
        engine: what the flags describe.
        ports: of HTTP; None: as the flags say.
        announce: file to write the addresses to, as `description` has them, once all serve.

    Raises:
        LorreryError: an engine did not start; the others have been stopped.
    """
    printer = Printer(engine.num_workers, num_clusters=len(ports), error=True)
    for name in drop_setting_variables():
        printer.say(f"{name} does not count here, where flags say everything; --set SECTION.KEY=VALUE does")
    with temporary_folder("serve") as folder:
        clusters = clusters_of(engine, ports, Path(folder), fork_server, printer.show)
        serving: set[LocalCluster] = set()

        def ready(cluster: LocalCluster) -> Iterable[str]:
            serving.add(cluster)
            if len(serving) == len(clusters):
                if announce is not None:
                    write_output(announce, json.dumps({"engines": [description(one) for one in clusters]}) + "\n")
                for one in clusters:
                    typer.echo(_ready_line(one))
            return ()

        return await _run_all(clusters, printer.say, ready)


async def _run_all(
    clusters: Sequence[LocalCluster], say: Callable[[str], None], ready: Callable[[LocalCluster], Iterable[str]]
) -> int:
    received: list[signal.Signals] = []
    runs = []
    for number, cluster in enumerate(clusters):
        label = f"engine {number}: " if len(clusters) > 1 else ""

        def say_of(line: str, label: str = label) -> None:
            say(label + line)

        running = run_until_cancelled(cluster, received, restart=False, say=say_of, ready=partial(ready, cluster))
        runs.append(asyncio.create_task(running, name=f"engine {number}"))

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        for run in runs:
            run.cancel()

    with handled_by(asyncio.get_running_loop(), on_signal, stop_signals()):
        await asyncio.wait(runs, return_when=asyncio.FIRST_EXCEPTION)
        for run in runs:
            run.cancel()  # of those that still run, if one did not start
        await asyncio.wait(runs)
    for run in runs:
        if not run.cancelled() and (error := run.exception()) is not None:
            raise error
    return max(128 + received[0] if run.cancelled() else run.result() for run in runs)


def drop_setting_variables() -> list[str]:
    """Remove settings from this process's environment, where services would read them; return their names."""
    names = setting_variables()
    for name in names:
        del os.environ[name]
    return names


def clusters_of(
    engine: Engine, ports: Sequence[int | None], folder: Path, fork_server: ForkServer, show: Show
) -> list[LocalCluster]:
    """Return one cluster per port, not entered yet.

    Args:
        engine: what the flags describe.
        ports: of HTTP; None: as the flags say.
        folder: for the files that the services read, which must stay as long as they run.
        fork_server: starts the services.
        show: called with every line of a process; with several clusters its name is `1/worker-0`.

    Raises:
        SettingsError: a fault names an unknown worker or adapter, or ports of KV events meet.
    """
    if engine.api_keys:
        engine = replace(engine, values={**engine.values, "router.keys": str(_keys_file(folder, engine.api_keys))})
    file = folder / "cluster.toml"
    file.write_text(settings_file(engine), encoding="utf-8")
    settings = engine.settings
    assert settings.router.http is not None, "a flag's or its default"
    host, _, own_port = settings.router.http.rpartition(":")
    check_kv_event_ports(settings, len(ports) * engine.num_workers * settings.worker.gpus)
    clusters = []
    for number, port in enumerate(ports):
        own = [f"router.http={host}:{own_port if port is None else port}"]
        if "router.listen" in engine.values:
            own.append(f"router.listen={settings.router.listen}")
        # An address in the file gives way to a free port, one that is given here does not.
        own += engine.overrides
        if number:
            own += kv_event_endpoints(settings, number * engine.num_workers * settings.worker.gpus)

        def show_of(name: str, line: str, prefix: str = f"{number}/" if len(ports) > 1 else "") -> None:
            show(prefix + name, line)

        clusters.append(
            LocalCluster(file, own, engine.num_workers, show=show_of, free_ports=True, fork_server=fork_server)
        )
    faults = settings.planned_faults()
    check_faults(faults, workers=clusters[0].worker_names, adapters=settings.adapters_of(faults))
    return clusters


def description(cluster: LocalCluster) -> dict[str, Any]:
    """Return where a running engine is reached, and its processes, for JSON."""
    processes = cluster.processes.values()
    return {
        "url": _url(cluster),
        "grpc": cluster.router_address,
        "models": list(cluster.settings.served_model_names),
        "metrics": {entry.name: entry.metrics for entry in processes if entry.metrics},
        "others": {entry.name: entry.others for entry in processes if entry.others},
        "pids": {entry.name: entry.pid for entry in processes},
    }


def _url(cluster: LocalCluster) -> str:
    return f"{'http' if cluster.settings.http_tls.cert is None else 'https'}://{cluster.http_address}"


def _ready_line(cluster: LocalCluster) -> str:
    settings = cluster.settings
    names, counts = ", ".join(settings.served_model_names), in_words(cluster.worker_kinds)
    return (
        f"ready: {_url(cluster)} serves {names} on {counts}, adapters: {settings.adapters.num_adapters};"
        f" Lorrery's gRPC at {cluster.router_address}"
    )


def _keys_file(folder: Path, keys: Iterable[str]) -> Path:
    """Write a file with the keys' digests; every key is an operator's."""
    entries = (
        f'[[keys]]\nname = "api-key-{number}"\nsha256 = "{digest(key)}"\ntenant = "anybody"\noperator = true\n'
        for number, key in enumerate(dict.fromkeys(keys))
    )
    path = folder / "keys.toml"
    path.write_text("\n".join(entries), encoding="utf-8")
    return path
