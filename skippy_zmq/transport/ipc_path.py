"""Paths of Unix sockets. libzmq's bind unlinks whatever is at the path, so everything is asked before it gets there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import sys
from pathlib import Path

from skippy_zmq.errors import EndpointError

# sizeof(sockaddr_un.sun_path) less the terminating zero.
MAX_PATH_BYTES = 103 if sys.platform == "darwin" else 107


def check_length(path: str) -> None:
    """Raise EndpointError for a path that does not fit into a socket address."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise EndpointError(f"ipc://{path}: path of {length} bytes: a socket path can have at most {MAX_PATH_BYTES}")


def check_connectable(path: str) -> None:
    """Raise EndpointError where something other than a socket is at ``path``. Nothing there yet is fine."""
    check_length(path)
    kind = _kind(path, follow=True)
    if kind not in ("", "socket"):
        raise EndpointError(f"cannot connect to ipc://{path}: that is {kind}, wanted a socket")


def check_bindable(path: str) -> None:
    """Raise EndpointError unless ``path`` is free or a socket nobody listens on; touches nothing."""
    check_length(path)
    parent = Path(path).parent
    if not parent.is_dir():
        raise EndpointError(f"cannot bind ipc://{path}: directory {parent} does not exist")
    kind = _kind(path, follow=False)
    if kind not in ("", "socket"):
        raise EndpointError(f"cannot bind ipc://{path}: that is {kind}, which a bind would replace; left as it is")
    if kind and _is_live(path):
        raise EndpointError(f"cannot bind ipc://{path}: another process is listening on it")


class IpcClaim:
    """The right to bind a path, held until the listener is gone; a file beside the path (``.lock``) carries it.

    It covers the two moments at which a look at the path says nothing: between another starter's check and its bind,
    and between the end of a listener and the removal of its file. The kernel drops it when the process dies.
    """

    def __init__(self, path: str) -> None:
        """Claim ``path`` and check it; raise EndpointError where somebody else has it or it cannot be bound."""
        check_length(path)
        self._path = Path(path)
        self._lock_path = Path(f"{path}.lock")
        self._bound: os.stat_result | None = None
        if not self._lock_path.parent.is_dir():
            check_bindable(path)
        self._fd = _lock(path, self._lock_path)
        try:
            check_bindable(path)
        except BaseException:
            self.release()
            raise

    def note_bound(self) -> None:
        """The listener is there: remember its file, which ``release`` removes."""
        with contextlib.suppress(FileNotFoundError):
            self._bound = self._path.lstat()

    def release(self) -> None:
        """Give the path up, remove the listener's file and the lock file; may be called twice."""
        if self._fd < 0:
            return
        # libzmq leaves the file behind; another one under that name is not ours to remove.
        if self._bound is not None and _is_still(self._path, self._bound):
            with contextlib.suppress(OSError):
                self._path.unlink()
        # Unlinked while still locked: whoever opened it meanwhile sees that the name is gone and starts over.
        with contextlib.suppress(OSError):
            self._lock_path.unlink()
        os.close(self._fd)
        self._fd = -1


def _lock(path: str, lock_path: Path) -> int:
    """Descriptor of the locked lock file."""
    while True:
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EndpointError(f"cannot bind ipc://{path}: lock file {lock_path}: {error.strerror}") from error
        keep = False
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size:
                raise EndpointError(f"cannot bind ipc://{path}: {lock_path} is there and is not an empty lock file")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise EndpointError(
                        f"cannot bind ipc://{path}: cannot lock {lock_path}: {error.strerror}"
                    ) from error
                raise EndpointError(f"cannot bind ipc://{path}: another process is listening on it") from error
            keep = _is_still(lock_path, status)
            if keep:
                return fd
        finally:
            if not keep:
                os.close(fd)


def _is_still(path: Path, status: os.stat_result) -> bool:
    try:
        now = path.lstat()
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (status.st_dev, status.st_ino)


def _kind(path: str, *, follow: bool) -> str:
    """What is at ``path``, in words: "" where nothing is, "socket" for a socket."""
    try:
        mode = Path(path).stat(follow_symlinks=follow).st_mode
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise EndpointError(f"ipc://{path}: {error.strerror}") from error
    kinds = {
        stat.S_IFSOCK: "socket",
        stat.S_IFREG: "an ordinary file",
        stat.S_IFDIR: "a directory",
        stat.S_IFLNK: "a symbolic link",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")


def _is_live(path: str) -> bool:
    """Whether a process listens on the socket at ``path``; anything but a plain refusal counts as yes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
