"""Says so, loudly, where a service can be called by anybody who reaches it."""

from ipaddress import ip_address

from lorrery.chassis.log import get_logger
from lorrery.chassis.sections import TlsSettings


def warn_if_exposed(setting: str, listen: str, tls: TlsSettings, *, protected: bool, cure: str) -> None:
    """Log a warning where a service listens on more than loopback, and lets everybody in or reads keys in the clear.

    Args:
        setting: where `listen` comes from.
        listen: HOST:PORT.
        tls: of the server.
        protected: whether callers have to show anything.
        cure: what to set.
    """
    if is_loopback(listen):
        return
    log = get_logger("chassis")
    if not protected:
        log.warning("open_to_everybody", setting=setting, listen=listen, why="callers show no credentials", cure=cure)
    elif tls.cert is None:
        log.warning(
            "credentials_in_the_clear", setting=setting, listen=listen, why="no TLS", cure="set server_tls.cert and key"
        )


def is_loopback(listen: str) -> bool:
    """Return whether HOST:PORT can be reached from this machine only."""
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
