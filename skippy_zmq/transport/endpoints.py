"""Addresses: what they mean, and which of them may be bound or connected to."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from skippy_zmq.errors import EndpointError
from skippy_zmq.transport import ipc_path

LOOPBACK = "127.0.0.1"
EVERY_INTERFACE = "*"
EPHEMERAL_PORT = 0

_WANTED = "wanted tcp://host:port, ipc://path, host:port or a port"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)\Z", re.DOTALL)
_PORT = re.compile(r"[0-9]{1,5}\Z|\*\Z")
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address. ``tcp`` has ``host`` and ``port``, ``ipc`` has ``path``.

    ``host`` is a name or an address without brackets, ``*`` for every interface; ``port`` 0 means any free one.
    """

    transport: str
    host: str = ""
    port: int = EPHEMERAL_PORT
    path: str = ""

    def __str__(self) -> str:
        if self.transport == "ipc":
            return f"ipc://{self.path}"
        return f"tcp://{_bracketed(self.host)}:{self.port}"

    @classmethod
    def parse(cls, text: str, *, default_port: int | None = None) -> Endpoint:
        """Read an address; a missing host means this machine alone (127.0.0.1), never every interface.

        ``default_port`` is for texts that are only a host; without it they are refused. Raises EndpointError.
        """
        text = text.strip()
        if _CONTROL.search(text):
            raise EndpointError(f"endpoint {text!r}: control characters; {_WANTED}")
        match = _SCHEME.match(text)
        scheme, rest = (match[1].lower(), match[2]) if match else ("tcp", text)
        if scheme == "ipc":
            return cls("ipc", path=_ipc_path(text, rest))
        if scheme != "tcp":
            raise EndpointError(f"endpoint {text!r}: transport {scheme!r} is not supported; {_WANTED}")
        if not match and _PORT.match(rest) and rest != "*":
            return cls("tcp", LOOPBACK, _port(text, rest))
        host, port = _split(text, rest)
        if port is None:
            if default_port is None:
                raise EndpointError(f"endpoint {text!r}: no port; {_WANTED}")
            return cls("tcp", _host(text, host), default_port)
        return cls("tcp", _host(text, host) if host else LOOPBACK, _port(text, port))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _ipc_path(text: str, path: str) -> str:
    if not path or path == "*":
        raise EndpointError(f"endpoint {text!r}: wanted ipc:// and the path of a socket")
    if path.startswith("@"):
        # Abstract sockets have no owner and no mode: every user of the machine could connect.
        raise EndpointError(f"endpoint {text!r}: abstract sockets are not supported; wanted ipc:// and a path")
    return path


def _split(text: str, rest: str) -> tuple[str, str | None]:
    """Host and port text; port None where there is none."""
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        if not bracket or _literal(host) is None or ":" not in host or (tail and not tail.startswith(":")):
            raise EndpointError(f"endpoint {text!r}: wanted an IPv6 address as [address]:port")
        return host, tail[1:] if tail else None
    if rest.count(":") > 1:
        if _literal(rest) is None:
            raise EndpointError(f"endpoint {text!r}: wanted an IPv6 address as [address]:port")
        return rest, None
    host, colon, port = rest.partition(":")
    return host, port if colon else None


def _host(text: str, host: str) -> str:
    if host == EVERY_INTERFACE or _literal(host) is not None or _HOST_NAME.match(host):
        return host
    hint = "; a socket path is written ipc://path" if "/" in host else ""
    raise EndpointError(f"endpoint {text!r}: {host!r} is not a host name or address{hint}")


def _port(text: str, port: str) -> int:
    number = 0 if port == "*" else int(port) if _PORT.match(port) else -1
    if not 0 <= number <= 65535:
        raise EndpointError(f"endpoint {text!r}: port {port!r}: wanted 0 to 65535, or * for any free one")
    return number


def _literal(host: str) -> _Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class BindTarget:
    """What to hand to ``bind``; ``warning`` is non-empty where the address is open to others without keys."""

    endpoint: Endpoint
    address: str
    ipv6: bool = False
    warning: str = ""


@dataclass(frozen=True, slots=True)
class ConnectTarget:
    """What to hand to ``connect``."""

    endpoint: Endpoint
    address: str
    ipv6: bool = False


def check_bind(endpoint: Endpoint, *, encrypted: bool = False, allow_plaintext: bool = False) -> BindTarget:
    """Say how to bind ``endpoint``; raise EndpointError where it must not be.

    A tcp address other than loopback needs ``encrypted`` (CURVE keys will be enforced) or ``allow_plaintext``. The
    address judged is the very one that is bound, so a name cannot turn out to mean something else.
    """
    if endpoint.transport == "ipc":
        ipc_path.check_bindable(endpoint.path)
        return BindTarget(endpoint, str(endpoint))
    address = ipaddress.IPv4Address("0.0.0.0") if endpoint.host == EVERY_INTERFACE else _resolve(endpoint)
    bound = f"tcp://{_bracketed(str(address))}:{endpoint.port or EVERY_INTERFACE}"
    warning = ""
    if not _is_loopback(address) and not encrypted:
        risk = "anyone who reaches it can read prompts and use the pipeline"
        where = endpoint.host if endpoint.host == str(address) else f"{endpoint.host} ({address})"
        if not allow_plaintext:
            raise EndpointError(
                f"cannot bind {endpoint}: {where} is open to the network and there are no keys, so {risk};"
                " bind 127.0.0.1 or ipc://, give CURVE keys, or allow plaintext on purpose"
            )
        warning = f"{endpoint} is open to the network without encryption or authentication: {risk}"
    return BindTarget(endpoint, bound, ipv6=address.version == 6, warning=warning)


def check_connect(endpoint: Endpoint) -> ConnectTarget:
    """Say how to connect to ``endpoint``; raise EndpointError where that can never work."""
    if endpoint.transport == "ipc":
        ipc_path.check_connectable(endpoint.path)
        return ConnectTarget(endpoint, str(endpoint))
    if endpoint.port == EPHEMERAL_PORT:
        raise EndpointError(f"cannot connect to {endpoint}: wanted the port that the stage reports, not 0 or *")
    address = None if endpoint.host == EVERY_INTERFACE else _resolve(endpoint)
    if address is None or address.is_unspecified:
        raise EndpointError(f"cannot connect to {endpoint}: {endpoint.host} means every interface; wanted one host")
    # The name stays in the address, so that libzmq looks it up again when it reconnects.
    return ConnectTarget(endpoint, str(endpoint), ipv6=address.version == 6)


def _resolve(endpoint: Endpoint) -> _Address:
    """The address of the host, IPv4 first: what a lone address of a two-family name usually listens on."""
    literal = _literal(endpoint.host)
    if literal is not None:
        return literal
    try:
        found = socket.getaddrinfo(endpoint.host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise EndpointError(f"{endpoint}: cannot resolve host name {endpoint.host!r}: {reason}") from error
    addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
    return next((address for address in addresses if address.version == 4), addresses[0])


def _is_loopback(address: _Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
