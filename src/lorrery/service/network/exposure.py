"""Warns if a service is accessible without credentials to everyone who can reach it."""

from ipaddress import ip_address

from lorrery.service.settings.sections import TlsSettings
from lorrery.service.telemetry.log import get_logger


def warn_if_exposed(setting: str, listen: str, tls: TlsSettings, *, protected: bool, cure: str) -> None:
    """Log a warning if a service listens beyond loopback and needs no credentials, or receives keys without TLS.

    Args:
        setting: origin of `listen`.
        listen: HOST:PORT.
        tls: of the server.
        protected: whether callers need credentials.
        cure: what to set.
    """
    if is_loopback(listen):
        return
    log = get_logger("service")
    if not protected:
        log.warning("open_to_everybody", setting=setting, listen=listen, why="callers show no credentials", cure=cure)
    elif tls.cert is None:
        log.warning(
            "credentials_in_the_clear", setting=setting, listen=listen, why="no TLS", cure="set server_tls.cert and key"
        )


def is_loopback(listen: str) -> bool:
    """Return whether HOST:PORT is reachable from this machine only."""
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
