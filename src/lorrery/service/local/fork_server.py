"""The process from which a local cluster's services are forked: `python -m lorrery.service.local.fork_server FD`.

Importing a service takes two seconds of CPU, forking a process that has imported it a few milliseconds. So this process
imports all services once, and forks itself for each message on the socket FD. That is safe because it runs no event
loop, starts no thread and creates no gRPC object; all of that happens in the child. A child then behaves like `python
-m lorrery.SERVICE`, with its own environment and command line (in `ps`), in this process's group.

A message is a length (32 bits), sent with two descriptors (for the output, and a pipe for the report), followed by that
many bytes of JSON: `service`, `arguments`, `folder`, `environment`. The report consists of two numbers (32 bits): the
pid, and at the end the exit code, -n after signal n. When the other end of the socket is closed, this process ends, and
its children with it, as they do if it is killed.
"""

import contextlib
import gc
import json
import os
import selectors
import socket
import struct
import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from lorrery.service.entry_point import exit_on_signals, set_up_grpc
from lorrery.service.installed import has_extra
from lorrery.service.linux import die_with

# Without it, `ps` shows this process's command line for each of its children.
setproctitle = import_module("setproctitle") if has_extra("titles") else None

SERVICES = ("router", "scheduler", "worker", "view")
READY = b"!"
"""Sent once, after the services are imported."""
LENGTH = struct.Struct("!I")
REPORTED = struct.Struct("!i")


def main() -> None:
    """Fork services until the socket is closed. Never returns: children run a service and exit with it."""
    exit_on_signals()
    set_up_grpc()
    control = socket.socket(fileno=int(sys.argv[1]))
    serve(control, import_services())


def import_services() -> dict[str, ModuleType]:
    """Import all services, and read what each of them would read from shipped files."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's library would start threads on import
    if setproctitle is not None:
        setproctitle.getproctitle()  # it locates the title's memory now, and could not after the environment changes
    gc.disable()  # objects made by imports are permanent
    modules = {service: import_module(f"lorrery.{service}.__main__") for service in SERVICES}
    modules["router"].prepare()
    presets = import_module("lorrery.service.settings.presets")
    presets.catalogue_with()
    presets.presets()
    gc.collect()
    gc.enable()
    gc.freeze()  # keeps a child's garbage collector from touching the pages that it shares with this process
    return modules


def serve(control: socket.socket, modules: Mapping[str, ModuleType]) -> NoReturn:
    """Fork a service for each message on a socket, until it is closed; `modules`: from `import_services`."""
    control.sendall(READY)
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    pid, report = key.data
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _report_exit(pid, report)
                    continue
                message = _receive(control)
                if message is None:
                    os._exit(0)
                wanted, output, report = message
                # The child alone holds the other end: it closes when the child ends, however it ends.
                ended, alive = os.pipe()
                server, pid = os.getpid(), os.fork()
                if pid == 0:
                    _close_all(selector)
                    os.close(report)
                    os.close(ended)
                    _become(modules[wanted["service"]], wanted, output, server)
                os.close(output)
                os.close(alive)
                _tell(report, pid)
                selector.register(ended, selectors.EVENT_READ, (pid, report))


def _receive(control: socket.socket) -> tuple[dict[str, Any], int, int] | None:
    """Return the next message and its two descriptors; None: the socket is closed."""
    try:
        length, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, 2)
    except ConnectionResetError:  # the other end has closed without reading everything
        return None
    if not length:
        return None
    output, report = descriptors
    (size,) = LENGTH.unpack(length)
    return json.loads(control.recv(size, socket.MSG_WAITALL)), output, report


def _report_exit(pid: int, report: int) -> None:
    _, status = os.waitpid(pid, 0)
    _tell(report, os.waitstatus_to_exitcode(status))
    os.close(report)


def _tell(report: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the other end no longer reads
        os.write(report, REPORTED.pack(number))


def _close_all(selector: selectors.BaseSelector) -> None:
    """Close, in a child, the fork server's descriptors: the socket, and those of the other children."""
    for key in list(selector.get_map().values()):
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()  # via the object, which would otherwise close a reused number later
        else:
            os.close(key.fd)
            os.close(key.data[1])
    selector.close()


def _become(module: ModuleType, wanted: dict[str, Any], output: int, server: int) -> None:
    """Run the service in a child; never returns."""
    die_with(server)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    os.close(nothing)
    os.close(output)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    sys.argv = [str(module.__file__), *wanted["arguments"]]
    if setproctitle is not None:
        name = module.__name__.removesuffix(".__main__")
        setproctitle.setproctitle(" ".join([sys.executable, "-m", name, *wanted["arguments"]]))
    module.main()
    sys.exit()


if __name__ == "__main__":
    main()
