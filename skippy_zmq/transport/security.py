"""CURVE keys: making, storing and reading them; who may connect.

A key is 40 characters of Z85 (https://rfc.zeromq.org/spec/32/). The secret file holds one line ``secret KEY`` and one
``public KEY``, mode 0600; beside it, the same name with ``.pub`` appended holds the public key alone, for others.
An allow-list is a text file: one public key per line, anything after it on the line is a note; a line that starts with
"# " is a comment (``#`` by itself can begin a key).
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from skippy_zmq.errors import OptionError

_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")
_MAX_KEY_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Public and secret key in Z85, 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Security:
    """Keys of this process; its servers let in only the public keys in ``allowed_clients`` (none: nobody)."""

    keys: KeyPair
    allowed_clients: frozenset[bytes] = frozenset()


def generate_keys(path: str | Path) -> KeyPair:
    """Make a key pair and write ``path`` (0600) and ``path.pub``; raise OptionError where one of them exists."""
    _require_curve()
    public, secret = zmq.curve_keypair()
    text = f"public {public.decode()}\nsecret {secret.decode()}\n"
    public_path = Path(f"{path}.pub")
    if public_path.exists():
        raise OptionError(f"key file {public_path}: already there; keys are never overwritten")
    _write_new(Path(path), text, 0o600)
    _write_new(public_path, f"{public.decode()}\n", 0o644)
    return KeyPair(public, secret)


def load_keys(path: str | Path) -> KeyPair:
    """Read what ``generate_keys`` wrote. Raises OptionError: unreadable, open to other users, or no such keys in it."""
    _require_curve()
    text = _read(path, private=True)
    entries = dict(line.split(None, 1) for line in text.splitlines() if len(line.split(None, 1)) == 2)
    if set(entries) != {"public", "secret"}:
        raise OptionError(f"key file {path}: wanted one line 'public KEY' and one line 'secret KEY'")
    pair = KeyPair(_key(path, entries["public"].strip()), _key(path, entries["secret"].strip()))
    if zmq.curve_public(pair.secret) != pair.public:
        raise OptionError(f"key file {path}: the public key does not belong to the secret key")
    return pair


def load_public_key(path: str | Path) -> bytes:
    """The one public key in a ``.pub`` file; raises OptionError."""
    keys = _listed(path)
    if len(keys) != 1:
        raise OptionError(f"key file {path}: wanted one public key, got {len(keys)}")
    return keys[0]


def load_allowed_clients(path: str | Path) -> frozenset[bytes]:
    """All public keys of an allow-list; raises OptionError, for an empty list too."""
    keys = _listed(path)
    if not keys:
        raise OptionError(f"allow-list {path}: no key in it, so nobody could connect")
    return frozenset(keys)


def check_public_key(key: bytes, what: str) -> bytes:
    """Return ``key``; raise OptionError naming ``what`` where it is not a key in Z85."""
    return _key(what, key.decode("ascii", "replace"))


def _listed(path: str | Path) -> list[bytes]:
    words = (line.split() for line in _read(path, private=False).splitlines())
    return [_key(path, line[0]) for line in words if line and line[0] != "#"]


def _key(path: str | Path, text: str) -> bytes:
    if not _KEY.match(text):
        # The text is left out: it may be most of a secret key.
        raise OptionError(f"{path}: wanted a key of 40 Z85 characters, got {len(text)} characters that are not one")
    return text.encode()


def _read(path: str | Path, *, private: bool) -> str:
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if private and stat.S_IMODE(mode) & 0o077:
                raise OptionError(
                    f"key file {path}: mode {stat.S_IMODE(mode):04o} lets other users read it; wanted 0600"
                )
            data = file.read(_MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise OptionError(f"key file {path}: {error.strerror}") from error
    if len(data) > _MAX_KEY_FILE_BYTES:
        raise OptionError(f"key file {path}: more than {_MAX_KEY_FILE_BYTES} bytes: not a key file")
    try:
        return data.decode("ascii")
    except UnicodeDecodeError as error:
        raise OptionError(f"key file {path}: not a text file of keys") from error


def _write_new(path: Path, text: str, mode: int) -> None:
    try:
        # O_EXCL also refuses to write through a link that somebody else put there.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise OptionError(f"key file {path}: already there; keys are never overwritten") from error
    except OSError as error:
        raise OptionError(f"key file {path}: {error.strerror}") from error
    with os.fdopen(fd, "w") as file:
        file.write(text)


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise OptionError("CURVE keys: the installed libzmq was built without CURVE; install pyzmq from its wheel")
