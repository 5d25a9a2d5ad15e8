"""Files of a repository on a Hugging Face hub: one commit of it, checked by size and hash, or out of the cache.

huggingface_hub does the transfers, into its own cache: into a file of another name that takes its place once it is
whole. Beside what it keeps there, we keep what a branch pointed to, what a commit consists of, and which files were
hashed, so that a later start needs no network and hashes nothing twice.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippy_zmq.errors import ModelFileError, RetryableError, SkippyError
from skippy_zmq.sources.hub_records import MAX_FILE_BYTES, HubFile, Listing, Records
from skippy_zmq.sources.relative_names import checked_name, shortened

if TYPE_CHECKING:
    from huggingface_hub import HfApi

log = logging.getLogger("skippy_zmq.sources")

DEFAULT_REVISION = "main"
COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_LISTING_SECONDS = 10.0
_REQUESTS_AT_ONCE = 16
_PARTIAL_CONTENT = 206
_ATTEMPTS = 2  # of a file that arrives damaged; huggingface_hub itself goes on after a lost connection
_NETWORK_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
_MOST_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One commit of ``repository``. ``folder``: where its files are, once fetched. ``offline``: the hub is not asked.

    ``partial``: the hub never told what the commit consists of; ``files`` is then only what the cache holds.
    """

    repository: str
    commit: str
    folder: Path
    files: tuple[HubFile, ...]
    offline: bool
    partial: bool = False

    @property
    def revision(self) -> str:
        """What a stage states of its origin: equal in all stages of a pipeline."""
        return f"{self.repository}@{self.commit}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.files)

    def __str__(self) -> str:
        return f"hf://{self.revision}"


class Hub:
    """A hub as the environment names it (HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE), or as the arguments do.

    ``progress``: bars on a terminal. ``note``: told, in one line, what a person should know.
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        cache: str | Path | None = None,
        token: str | None = None,
        offline: bool | None = None,
        progress: bool = True,
        note: Callable[[str], object] = log.warning,
    ) -> None:
        from huggingface_hub import constants

        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self.cache = Path(cache or constants.HF_HUB_CACHE).expanduser()
        self.offline = bool(constants.HF_HUB_OFFLINE) if offline is None else offline
        self._token = token
        self._progress = progress
        self._note = note

    def snapshot(self, repository: str, revision: str = DEFAULT_REVISION) -> Snapshot:
        """Resolve ``revision`` (a branch, a tag or a commit) once. Only a commit that is known needs no network.

        Raises ModelFileError where it does not exist or may not be read, RetryableError where neither the hub nor the
        cache knows it.
        """
        records = self._records(repository)
        if COMMIT.match(revision) and (listing := records.listing(revision)) is not None:
            return self._snapshot(repository, listing, offline=self.offline)
        if self.offline:
            return self._cached(repository, revision, "HF_HUB_OFFLINE is set")
        try:
            listing = self._ask(repository, revision)
        except SkippyError:
            raise
        except Exception as error:
            if not _is_network(error):
                raise
            return self._cached(repository, revision, f"{self.endpoint} cannot be reached ({_first_line(error)})")
        records.keep(revision, listing)
        return self._snapshot(repository, listing, offline=False)

    def fetch(self, snapshot: Snapshot, names: Sequence[str]) -> dict[str, Path]:
        """The paths of these files, each whole and with the hash the hub stated; fetched where they are not.

        Raises ModelFileError for files that do not exist, cannot be had offline or stay damaged, RetryableError where
        a transfer failed.
        """
        known = {file.name: file for file in snapshot.files}
        absent = [name for name in names if name not in known]
        if absent:
            where = "the cache, and the hub is not asked" if snapshot.partial else "the repository"
            raise ModelFileError(f"{snapshot}: not in {where}: {shortened(absent, _MOST_NAMES_SHOWN)}")
        records = self._records(snapshot.repository)
        found: dict[str, Path] = {}
        damaged: dict[str, str] = {}
        for name in dict.fromkeys(names):
            path = snapshot.folder / name
            if path.is_file():
                problem = records.problem(path, known[name], self._hashing(name, known[name]))
                if problem:
                    damaged[name] = problem
                else:
                    found[name] = path
        missing = [name for name in dict.fromkeys(names) if name not in found]
        if missing and snapshot.offline:
            texts = [f"{name} ({damaged[name]})" if name in damaged else name for name in missing]
            raise ModelFileError(
                f"{snapshot}: {len(missing)} of {len(set(names))} files that are needed are not whole in the cache, "
                f"and the hub is not asked: {shortened(texts, _MOST_NAMES_SHOWN)}"
            )
        self._check_space(snapshot, [known[name] for name in missing])
        for name in missing:
            found[name] = self._transfer(snapshot, known[name], records, again=name in damaged)
        return found

    def cached(self, snapshot: Snapshot, name: str) -> Path | None:
        """The path of a file that is whole in the cache."""
        file = next((file for file in snapshot.files if file.name == name), None)
        path = snapshot.folder / name
        if file is None or not path.is_file():
            return None
        return None if self._records(snapshot.repository).problem(path, file, lambda _bytes: None) else path

    def head(self, snapshot: Snapshot, name: str, nbytes: int) -> bytes:
        """The first ``nbytes`` of a file, or all of a shorter one, without keeping it; errors as of ``fetch``."""
        path = self.cached(snapshot, name)
        if path is not None:
            with path.open("rb") as file:
                return file.read(nbytes)
        with _translated(f"{snapshot}/{name}", self.endpoint):
            data, _ = self._read(self._address(snapshot, name), 0, nbytes)
        return data[:nbytes]

    def spans(self, snapshot: Snapshot, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """The bytes of a file at these (offset, length), without keeping them; None where the hub has no part of it.

        Some hubs send whole files only. Errors as of ``fetch``.
        """
        what = f"{snapshot}/{name}"
        with _translated(what, self.endpoint):
            address = self._address(snapshot, name)

        def read(span: tuple[int, int]) -> bytes | None:
            start, length = span
            with _translated(what, self.endpoint):
                data, is_part = self._read(address, start, length)
            if is_part and len(data) != length:
                raise RetryableError(f"{what}: wanted {length} bytes from byte {start}, got {len(data)}")
            return data if is_part else None

        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            try:
                found = []
                for data in pool.map(read, spans):
                    if data is None:
                        return None
                    found.append(data)
                return found
            finally:
                pool.shutdown(cancel_futures=True)

    def outline_path(self, snapshot: Snapshot, name: str) -> Path | None:
        """Where an outline of a file belongs; None where it is not known by a hash."""
        file = next((file for file in snapshot.files if file.name == name), None)
        known_by = "" if file is None else file.sha256 or file.blob
        return self._records(snapshot.repository).outline(known_by) if known_by else None

    def _address(self, snapshot: Snapshot, name: str) -> tuple[str, dict[str, str]]:
        """Where the bytes of a file are, and the headers to ask for them with."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        if snapshot.offline:
            raise ModelFileError(f"{snapshot}: {name} is not in the cache, and the hub is not asked")
        headers = build_hf_headers(token=self._token)
        url = hf_hub_url(snapshot.repository, name, revision=snapshot.commit, endpoint=self.endpoint)
        target = get_hf_file_metadata(url, token=self._token, endpoint=self.endpoint).location
        if _host(target) != _host(url):
            headers.pop("authorization", None)  # a signed address of another host: it must not learn the token
        return target, headers

    def _read(self, address: tuple[str, dict[str, str]], start: int, nbytes: int) -> tuple[bytes, bool]:
        """Bytes from ``start`` on, at most one block too many, and whether only they were sent."""
        from huggingface_hub.utils import get_session, hf_raise_for_status

        target, headers = address
        headers = headers | {"Range": f"bytes={start}-{start + nbytes - 1}", "Accept-Encoding": "identity"}
        data = bytearray()
        with get_session().stream("GET", target, headers=headers, timeout=_LISTING_SECONDS) as response:
            hf_raise_for_status(response)
            sent = response.headers.get("content-range", "")
            is_part = response.status_code == _PARTIAL_CONTENT and sent.startswith(f"bytes {start}-")
            if is_part or start == 0:
                for block in response.iter_bytes():  # a server may send the whole file all the same
                    data += block
                    if len(data) >= nbytes:
                        break
        return bytes(data), is_part

    def _records(self, repository: str) -> Records:
        return Records(self.cache / ("models--" + repository.replace("/", "--")), self.endpoint)

    def _snapshot(self, repository: str, listing: Listing, *, offline: bool) -> Snapshot:
        folder = self._records(repository).snapshots / listing.commit
        return Snapshot(repository, listing.commit, folder, listing.files, offline, listing.partial)

    def _cached(self, repository: str, revision: str, why: str) -> Snapshot:
        records = self._records(repository)
        commit = revision if COMMIT.match(revision) else records.commit_of(revision)
        listing = records.listing(commit) or records.listing_of_folder(commit) if commit else None
        if listing is None:
            name = f"hf://{repository}" + ("" if revision == DEFAULT_REVISION else f"@{revision}")
            raise RetryableError(f"{name}: {why}, and the cache in {self.cache} does not hold it")
        self._note(f"hf://{repository}@{revision}: {why}; using the cached commit {listing.commit}")
        return self._snapshot(repository, listing, offline=True)

    def _ask(self, repository: str, revision: str) -> Listing:
        what = f"hf://{repository}@{revision}"
        try:
            with _translated(what, self.endpoint, network=False):
                info = self._api().model_info(
                    repository, revision=revision, files_metadata=True, timeout=_LISTING_SECONDS, token=self._token
                )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelFileError(
                f"{what}: {self.endpoint} does not answer as a hub does: {_first_line(error)}"
            ) from None
        commit = info.sha or ""
        if not COMMIT.match(commit):
            raise ModelFileError(f"{what}: {self.endpoint} names no commit, got {commit[:60]!r}")
        files = []
        for item in info.siblings or ():
            name = checked_name(item.rfilename, f"hf://{repository}@{commit}")
            size = item.size if isinstance(item.size, int) and 0 <= item.size <= MAX_FILE_BYTES else None
            sha256 = str(getattr(item.lfs, "sha256", None) or "")
            files.append(HubFile(name, size, sha256, "" if sha256 else str(item.blob_id or "")))
        return Listing(commit, tuple(files))

    def _api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=self._token)

    def _check_space(self, snapshot: Snapshot, files: Sequence[HubFile]) -> None:
        needed = sum(file.size or 0 for file in files)
        place = next(path for path in (self.cache, *self.cache.absolute().parents) if path.exists())
        free = shutil.disk_usage(place).free
        if needed > free:
            raise ModelFileError(f"{snapshot}: wanted {needed} bytes of space in {self.cache}, {free} are free")

    def _transfer(self, snapshot: Snapshot, file: HubFile, records: Records, *, again: bool) -> Path:
        from huggingface_hub import hf_hub_download

        problem = ""
        for attempt in range(_ATTEMPTS):
            try:
                with _translated(f"{snapshot}/{file.name}", self.endpoint), self._bars():
                    path = Path(
                        hf_hub_download(
                            snapshot.repository,
                            file.name,
                            revision=snapshot.commit,
                            cache_dir=self.cache,
                            endpoint=self.endpoint,
                            token=self._token,
                            force_download=again or bool(problem),
                        )
                    )
            except RetryableError:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            problem = records.problem(path, file, self._hashing(file.name, file), fresh=True)
            if not problem:
                return path
        raise ModelFileError(f"{snapshot}/{file.name}: {problem}, though it was fetched {_ATTEMPTS} times")

    @contextmanager
    def _bars(self) -> Iterator[None]:
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

        if self._progress or are_progress_bars_disabled():
            yield
            return
        disable_progress_bars()
        try:
            yield
        finally:
            enable_progress_bars()

    def _hashing(self, name: str, file: HubFile) -> Callable[[int], object]:
        """A bar for what is hashed; told how many bytes were."""
        if not self._progress:
            return lambda _bytes: None
        from tqdm import tqdm

        bar = tqdm(
            total=file.size,
            desc=f"checking {name[-40:]}",
            unit="B",
            unit_scale=True,
            leave=False,
            disable=None,
            delay=1.0,
        )

        def report(nbytes: int) -> None:
            bar.update(nbytes)
            if file.size is not None and bar.n >= file.size:
                bar.close()

        return report


@contextmanager
def _translated(what: str, endpoint: str, *, network: bool = True) -> Iterator[None]:
    """Errors of huggingface_hub as ours; ``network``: those of the network too."""
    from huggingface_hub import errors

    try:
        yield
    except SkippyError:
        raise
    except errors.GatedRepoError as error:
        raise ModelFileError(f"{what}: access is gated: accept its terms on {endpoint}, then set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelFileError(f"{what}: the repository has no such revision") from error
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise RetryableError(
                f"{what}: {endpoint} did not deliver it ({_first_line(error.__cause__ or error)})"
            ) from error
        raise ModelFileError(f"{what}: the repository has no such file") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelFileError(f"{what}: {endpoint} has no such repository, or HF_TOKEN may not read it") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            raise ModelFileError(f"{what}: {endpoint} refuses access (status {status}): check HF_TOKEN") from error
        if not network:
            raise
        raise RetryableError(f"{what}: {endpoint} answered {_first_line(error)}") from error
    except Exception as error:
        if not network or not _is_network(error):
            raise
        raise RetryableError(f"{what}: the transfer failed: {_first_line(error)}") from error


def _is_network(error: BaseException) -> bool:
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK_LIBRARIES


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0].strip() if lines and lines[0].strip() else type(error).__name__


def _host(url: str) -> Any:
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    return parts.scheme, parts.netloc
