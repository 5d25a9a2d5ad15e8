"""What an address means, and which addresses may be bound (who can reach a stage) or connected to (Z02)."""

from __future__ import annotations

import contextlib
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_helpers import Transport

from skippy_zmq.errors import EndpointError
from skippy_zmq.transport import Endpoint, check_bind, check_connect

pytest_plugins = ("transport_fixtures",)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("5555", "tcp://127.0.0.1:5555"),
        (":5555", "tcp://127.0.0.1:5555"),
        ("tcp://:5555", "tcp://127.0.0.1:5555"),
        ("0", "tcp://127.0.0.1:0"),
        ("localhost:5555", "tcp://localhost:5555"),
        ("node-7.example:5555", "tcp://node-7.example:5555"),
        ("tcp://10.0.0.7:5555", "tcp://10.0.0.7:5555"),
        ("TCP://10.0.0.7:5555", "tcp://10.0.0.7:5555"),
        ("[::1]:5555", "tcp://[::1]:5555"),
        ("tcp://[::]:5555", "tcp://[::]:5555"),
        ("*:5555", "tcp://*:5555"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:0"),
        ("  tcp://127.0.0.1:1\n", "tcp://127.0.0.1:1"),
        ("ipc:///run/stage 0.sock", "ipc:///run/stage 0.sock"),
        ("ipc://stage.sock", "ipc://stage.sock"),
    ],
)
def test_parse(text: str, wanted: str) -> None:
    endpoint = Endpoint.parse(text)
    assert str(endpoint) == wanted
    assert Endpoint.parse(wanted) == endpoint


@pytest.mark.parametrize(("text", "host"), [("localhost", "localhost"), ("::1", "::1"), ("[::1]", "::1"), ("*", "*")])
def test_host_alone_needs_a_default_port(text: str, host: str) -> None:
    assert Endpoint.parse(text, default_port=7000) == Endpoint("tcp", host, 7000)
    with pytest.raises(EndpointError, match="no port"):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tcp://",
        "inproc://stage",
        "pgm://eth0;239.192.1.1:5555",
        "http://127.0.0.1:80",
        "tcp://10.0.0.1:5555;10.0.0.2:5555",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://host:\uff15\uff15",
        "tcp://host:port",
        "tcp://host:",
        "tcp://ho st:5555",
        "tcp://host,other:5555",
        "tcp://user@host:5555",
        "tcp://[::1:5555",
        "tcp://[localhost]:5555",
        "tcp://[::1]5555",
        "fe80::zz:5555",
        "/run/stage.sock",
        "ipc://",
        "ipc://*",
        "ipc://@abstract",
        "tcp://ho\0st:1",
        "ipc:///run/\0stage",
        "-" + "a" * 300 + ":1",
    ],
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(EndpointError):
        Endpoint.parse(text)


@given(st.text())
def test_parse_never_raises_anything_else(text: str) -> None:
    with contextlib.suppress(EndpointError):
        endpoint = Endpoint.parse(text)
        assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "text", ["5555", "localhost:5555", "127.0.0.1:5555", "127.3.2.1:5555", "[::1]:5555", "[::ffff:127.0.0.1]:1"]
)
def test_loopback_needs_nothing(text: str) -> None:
    target = check_bind(Endpoint.parse(text))
    assert target.warning == ""
    assert "*" not in target.address


PUBLIC = ["*:5555", "0.0.0.0:5555", "[::]:5555", "192.0.2.1:5555", "[2001:db8::1]:5555", "[::ffff:192.0.2.1]:5555"]


@pytest.mark.parametrize("text", PUBLIC)
def test_public_bind_needs_keys_or_consent(text: str) -> None:
    endpoint = Endpoint.parse(text)
    with pytest.raises(EndpointError, match="anyone who reaches it can read prompts and use the pipeline") as refusal:
        check_bind(endpoint)
    assert str(endpoint) in str(refusal.value)
    assert "without encryption or authentication" in check_bind(endpoint, allow_plaintext=True).warning
    assert check_bind(endpoint, encrypted=True).warning == ""


def _names(monkeypatch: pytest.MonkeyPatch, **addresses: list[str]) -> None:
    def lookup(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(None, None, None, "", (address, 0)) for address in addresses[host]]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)


def test_names_are_judged_by_the_address_that_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    _names(monkeypatch, me=["127.0.1.1"], node=["::1", "192.0.2.9"], six=["2001:db8::9"])
    assert check_bind(Endpoint.parse("me:1")).address == "tcp://127.0.1.1:1"
    with pytest.raises(EndpointError, match=r"node \(192\.0\.2\.9\) is open to the network"):
        check_bind(Endpoint.parse("node:1"))
    target = check_bind(Endpoint.parse("six:1"), allow_plaintext=True)
    assert (target.address, target.ipv6) == ("tcp://[2001:db8::9]:1", True)
    assert check_connect(Endpoint.parse("six:1")).ipv6
    for check in (check_bind, check_connect):
        with pytest.raises(EndpointError, match="cannot resolve host name 'nowhere'"):
            check(Endpoint.parse("nowhere:1"))


@pytest.mark.parametrize("text", ["127.0.0.1:0", "127.0.0.1:*", "*:5555", "0.0.0.0:5555", "[::]:5555"])
def test_connect_wants_one_host_and_a_port(text: str) -> None:
    with pytest.raises(EndpointError, match="cannot connect to"):
        check_connect(Endpoint.parse(text))


@pytest.mark.parametrize("text", ["0", "localhost:0", "127.0.0.1:*"])
def test_bound_to_loopback_alone(transport: Transport, text: str) -> None:
    server = transport.server(text)
    assert server.endpoint.host == "127.0.0.1"
    assert server.endpoint.port > 0
    with socket.create_connection(("127.0.0.1", server.endpoint.port), timeout=5):
        pass
    with pytest.raises(OSError, match=r".+"):
        socket.create_connection(("127.0.0.2", server.endpoint.port), timeout=5)


def test_public_bind_on_purpose_warns_once(transport: Transport) -> None:
    server = transport.server("*:0", allow_plaintext=True)
    assert "read prompts" in server.warning
    assert "\n" not in server.warning
    assert server.endpoint.host == "0.0.0.0"
    transport.exchange(transport.connected(transport.link(f"127.0.0.1:{server.endpoint.port}")), server)


def test_address_in_use_is_named(transport: Transport) -> None:
    taken = transport.server().endpoint
    with pytest.raises(EndpointError, match=rf"cannot bind {taken}: address already in use"):
        transport.server(str(taken))


def test_address_of_another_machine_is_named(transport: Transport) -> None:
    with pytest.raises(EndpointError, match=r"cannot bind tcp://192\.0\.2\.1:5555: \w+"):
        transport.server("192.0.2.1:5555", allow_plaintext=True)
