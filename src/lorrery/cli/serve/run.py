"""Runs the cluster that the flags of `lorrery serve` describe."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import typer

from lorrery.cli.serve.settings import Engine, settings_file
from lorrery.cli.up_cluster import Printer, in_words, run_until_stopped
from lorrery.router.access import digest
from lorrery.service.faults.kinds import check_faults
from lorrery.service.files.writing import temporary_folder
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.processes import ForkServer
from lorrery.service.settings.reading import setting_variables


async def run(fork_server: ForkServer, engine: Engine) -> int:
    """Run an engine until a signal or the exit of one of its processes; return the exit code.

    One line goes to standard output, once it serves; all other output to standard error.
    """
    printer = Printer(engine.num_workers, error=True)
    for name in setting_variables():
        del os.environ[name]
        printer.say(f"{name} does not count here, where flags say everything; --set SECTION.KEY=VALUE does")
    with temporary_folder("serve") as folder:
        if engine.api_keys:
            engine = replace(engine, values={**engine.values, "router.keys": str(_keys_file(folder, engine.api_keys))})
        file = folder / "cluster.toml"
        file.write_text(settings_file(engine), encoding="utf-8")
        settings = engine.settings
        own = [f"router.http={settings.router.http}"]
        if "router.listen" in engine.values:
            own.append(f"router.listen={settings.router.listen}")
        own += engine.overrides  # an address in the file gives way to a free port, one that is given here does not
        cluster = LocalCluster(
            file, own, engine.num_workers, show=printer.show, free_ports=True, fork_server=fork_server
        )
        faults = settings.planned_faults()
        check_faults(faults, workers=cluster.worker_names, adapters=settings.adapters_of(faults))

        def ready() -> Iterable[str]:
            scheme = "http" if settings.http_tls.cert is None else "https"
            counts = f"{in_words(cluster.worker_kinds)}, adapters: {settings.adapters.num_adapters}"
            names = ", ".join(settings.served_model_names)
            typer.echo(
                f"ready: {scheme}://{cluster.http_address} serves {names} on {counts};"
                f" Lorrery's gRPC at {cluster.router_address}"
            )
            return ()

        return await run_until_stopped(cluster, restart=False, say=printer.say, ready=ready)


def _keys_file(folder: Path, keys: Iterable[str]) -> Path:
    """Write a file with the keys' digests; every key is an operator's."""
    entries = (
        f'[[keys]]\nname = "api-key-{number}"\nsha256 = "{digest(key)}"\ntenant = "anybody"\noperator = true\n'
        for number, key in enumerate(dict.fromkeys(keys))
    )
    path = folder / "keys.toml"
    path.write_text("\n".join(entries), encoding="utf-8")
    return path
