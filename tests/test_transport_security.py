"""Keys on disk, and who gets in with which key."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from transport_helpers import Transport

from skippy_zmq.errors import OptionError
from skippy_zmq.transport import (
    KeyPair,
    Link,
    LinkEventKind,
    PeerGone,
    Security,
    Server,
    generate_keys,
    load_allowed_clients,
    load_keys,
    load_public_key,
)

pytest_plugins = ("transport_fixtures",)

MakeTransport = Callable[..., Transport]


@pytest.fixture
def stage_keys(tmp_path: Path) -> KeyPair:
    return generate_keys(tmp_path / "stage")


@pytest.fixture
def client_keys(tmp_path: Path) -> KeyPair:
    return generate_keys(tmp_path / "client")


@pytest.fixture
def stage(make_transport: MakeTransport, stage_keys: KeyPair, client_keys: KeyPair) -> Transport:
    return make_transport(security=Security(stage_keys, frozenset({client_keys.public})))


def test_key_files(tmp_path: Path) -> None:
    pair = generate_keys(tmp_path / "stage")
    assert stat.S_IMODE((tmp_path / "stage").stat().st_mode) == 0o600
    assert load_keys(tmp_path / "stage") == pair
    assert load_public_key(tmp_path / "stage.pub") == pair.public
    assert pair.secret.decode() not in (tmp_path / "stage.pub").read_text()
    assert pair.secret.decode() not in repr(Security(pair))


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    pair = generate_keys(tmp_path / "stage")
    with pytest.raises(OptionError, match="never overwritten"):
        generate_keys(tmp_path / "stage")
    (tmp_path / "stage").unlink()
    with pytest.raises(OptionError, match=r"stage\.pub: already there"):
        generate_keys(tmp_path / "stage")
    assert not (tmp_path / "stage").exists()
    assert load_public_key(tmp_path / "stage.pub") == pair.public


def test_secret_open_to_others_is_refused(tmp_path: Path) -> None:
    generate_keys(tmp_path / "stage")
    (tmp_path / "stage").chmod(0o640)
    with pytest.raises(OptionError, match="mode 0640 lets other users read it; wanted 0600"):
        load_keys(tmp_path / "stage")


@pytest.mark.parametrize("content", [b"", b"secret x\npublic y\n", b"\xff\xfe", b"public only\n", bytes(2 << 20)])
def test_damaged_key_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "stage").write_bytes(content)
    (tmp_path / "stage").chmod(0o600)
    with pytest.raises(OptionError, match="stage"):
        load_keys(tmp_path / "stage")


def test_keys_that_do_not_belong_together(tmp_path: Path, stage_keys: KeyPair, client_keys: KeyPair) -> None:
    (tmp_path / "stage").write_text(f"public {client_keys.public.decode()}\nsecret {stage_keys.secret.decode()}\n")
    with pytest.raises(OptionError, match="does not belong to the secret key") as refusal:
        load_keys(tmp_path / "stage")
    assert stage_keys.secret.decode() not in str(refusal.value)


def test_allow_list(tmp_path: Path, stage_keys: KeyPair, client_keys: KeyPair) -> None:
    path = tmp_path / "allowed"
    path.write_text(f"# who may connect\n\n{stage_keys.public.decode()} stage\n{client_keys.public.decode()}\n")
    assert load_allowed_clients(path) == {stage_keys.public, client_keys.public}
    path.write_text("# nobody\n")
    with pytest.raises(OptionError, match="nobody could connect"):
        load_allowed_clients(path)
    path.write_text("not-a-key\n")
    with pytest.raises(OptionError, match="wanted a key of 40 Z85 characters"):
        load_allowed_clients(path)
    with pytest.raises(OptionError, match="absent"):
        load_allowed_clients(tmp_path / "absent")


def _keeps_out(stage: Transport, server: Server, client: Transport, link: Link) -> str:
    """Assert that nothing gets through ``link``; return the reason that it gives."""
    failure = client.event(link, LinkEventKind.HANDSHAKE_FAILED)
    with pytest.raises(PeerGone, match="is not connected"):
        link.send([b"let me in"])
    assert not link.connected
    assert server.receive() is None
    return failure.detail


@pytest.mark.parametrize("protocol", ["ipc", "tcp"])
def test_right_key_gets_in(
    make_transport: MakeTransport,
    stage: Transport,
    stage_keys: KeyPair,
    client_keys: KeyPair,
    socket_dir: Path,
    protocol: str,
) -> None:
    server = stage.server(f"ipc://{socket_dir}/stage" if protocol == "ipc" else "tcp://127.0.0.1:0")
    client = make_transport(security=Security(client_keys))
    link = client.connected(client.link(server.endpoint, server_key=stage_keys.public))
    link.send([b"hello", bytes(100_000)])
    received = stage.message(server)
    assert received.frames == [b"hello", bytes(100_000)]
    server.send(received.peer, [b"welcome"])
    assert client.message(link).frames == [b"welcome"]
    assert stage.factory.refused_handshakes == 0


def test_unknown_key_is_kept_out(
    make_transport: MakeTransport, stage: Transport, stage_keys: KeyPair, tmp_path: Path
) -> None:
    server = stage.server()
    client = make_transport(security=Security(generate_keys(tmp_path / "stranger")))
    link = client.link(server.endpoint, server_key=stage_keys.public)
    assert "refused our key" in _keeps_out(stage, server, client, link)
    assert stage.factory.refused_handshakes == 1


def test_plaintext_client_is_kept_out(make_transport: MakeTransport, stage: Transport) -> None:
    server = stage.server()
    client = make_transport()
    assert "keys" in _keeps_out(stage, server, client, client.link(server.endpoint))


def test_wrong_key_of_the_stage_is_noticed(
    make_transport: MakeTransport, stage: Transport, client_keys: KeyPair, tmp_path: Path
) -> None:
    server = stage.server()
    client = make_transport(security=Security(client_keys))
    link = client.link(server.endpoint, server_key=generate_keys(tmp_path / "impostor").public)
    _keeps_out(stage, server, client, link)


def test_client_with_keys_does_not_talk_to_a_stage_without(
    make_transport: MakeTransport, transport: Transport, stage_keys: KeyPair, client_keys: KeyPair
) -> None:
    server = transport.server()
    client = make_transport(security=Security(client_keys))
    link = client.link(server.endpoint, server_key=stage_keys.public)
    assert "keys" in _keeps_out(transport, server, client, link)


def test_empty_allow_list_lets_nobody_in(
    make_transport: MakeTransport, stage_keys: KeyPair, client_keys: KeyPair
) -> None:
    stage = make_transport(security=Security(stage_keys))
    server = stage.server()
    client = make_transport(security=Security(client_keys))
    _keeps_out(stage, server, client, client.link(server.endpoint, server_key=stage_keys.public))


def test_client_gets_in_once_it_is_let_in(
    make_transport: MakeTransport, stage: Transport, stage_keys: KeyPair, client_keys: KeyPair, tmp_path: Path
) -> None:
    """libzmq gives up after a refusal; the link does not."""
    server = stage.server()
    stranger = generate_keys(tmp_path / "stranger")
    client = make_transport(security=Security(stranger))
    link = client.link(server.endpoint, server_key=stage_keys.public)
    client.event(link, LinkEventKind.HANDSHAKE_FAILED)
    endpoint = str(server.endpoint)
    stage.drop(server)
    restarted = make_transport(security=Security(stage_keys, frozenset({stranger.public})))
    server = restarted.server(endpoint)
    client.connected(link)
    link.send([b"hello"])
    assert restarted.message(server).frames == [b"hello"]


def test_half_a_configuration_is_refused(transport: Transport, stage: Transport, stage_keys: KeyPair) -> None:
    with pytest.raises(OptionError, match="wanted both or neither"):
        transport.link("tcp://127.0.0.1:1", server_key=stage_keys.public)
    with pytest.raises(OptionError, match="wanted both or neither"):
        stage.link("tcp://127.0.0.1:1")
    with pytest.raises(OptionError, match="wanted a key of 40 Z85 characters"):
        stage.link("tcp://127.0.0.1:1", server_key=b"short")


def test_keys_open_a_public_address(stage: Transport) -> None:
    server = stage.server("0.0.0.0:0")
    assert server.warning == ""
