"""A folder in an object store, or on any other file system of fsspec, which comes with torch.

Torch's own `FsspecWriter` is not used: it agrees on a plan first (see `writer`), assumes an empty folder, and its file
system cannot return the size of a file. The files have torch's form: its `FsspecReader` reads them.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from pipedream.core.errors import ArtifactError, install_advice
from pipedream.services.checkpoint.stores.store import MANIFEST, CheckpointStore


class ObjectStore(CheckpointStore):
    """A folder at a URL, which holds checkpoints. A folder exists when it has files.

    Any failure of the store is an OSError.

    Raises:
        ArtifactError: the protocol is unknown, or its package is not installed.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._file_system, self._path = _find_file_system(self._address)

    @classmethod
    def accepts(cls, address: str) -> bool:
        return "://" in address

    def list_names(self, folder: str = "") -> list[str]:
        self._file_system.invalidate_cache()  # others may have written
        try:
            entries = self._call(folder, self._file_system.ls, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for entry in entries if (name := posixpath.basename(entry.rstrip("/"))))

    def has_file(self, path: str) -> bool:
        return (self._read_info(path) or {}).get("type") == "file"

    def is_link(self, path: str) -> bool:
        return bool((self._read_info(path) or {}).get("islink"))

    def read_size(self, path: str) -> int:
        info = self._read_info(path)
        if info is None:
            raise FileNotFoundError(f"there is no {self.locate(path)}")
        return int(info["size"] or 0)

    @contextmanager
    def open(self, path: str) -> Iterator[IO[bytes]]:
        """Context with a file to read; fetches only the bytes that are read."""
        with (
            _raise_os_errors(str(self.locate(path))),
            self._file_system.open(self._find(path), "rb", cache_type="none") as file,
        ):
            yield file

    @contextmanager
    def create(self, path: str) -> Iterator[IO[bytes]]:
        place = self._find(path)
        with _raise_os_errors(str(self.locate(path))):
            try:
                file = self._file_system.open(place, "wb")
            except FileNotFoundError:
                # Only for a file system with folders: in an object store this would make a bucket.
                self._file_system.makedirs(posixpath.dirname(place), exist_ok=True)
                file = self._file_system.open(place, "wb")
            with file:
                yield file

    def delete(self, path: str) -> None:
        self._call(path, self._file_system.rm_file)

    def read_text(self, path: str) -> str:
        return bytes(self._call(path, self._file_system.cat_file)).decode()

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.delete(f"{name}/{MANIFEST}")  # first: without it the rest is no checkpoint
        if self._read_info(name) is not None:
            self._call(name, self._file_system.rm, recursive=True)

    def _find(self, path: str) -> str:
        """Returns a path in the file system."""
        return posixpath.join(self._path, path) if path else self._path

    def _read_info(self, path: str) -> dict[str, Any] | None:
        self._file_system.invalidate_cache()  # others may have written
        try:
            return cast(dict[str, Any], self._call(path, self._file_system.info))
        except FileNotFoundError:
            return None

    def _call(self, path: str, method: Callable[..., Any], **options: Any) -> Any:
        with _raise_os_errors(str(self.locate(path))):
            return method(self._find(path), **options)


def _find_file_system(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system, and the path in it."""
    # Imported when a URL is used: planning and local runs do not need it.
    from fsspec.core import url_to_fs

    try:
        return cast(tuple[Any, str], url_to_fs(url))
    except ImportError as error:
        advice = install_advice(error.__cause__ or error)
        raise ArtifactError(f"{url} needs a package of fsspec's that is not installed: {error}{advice}") from None
    except ValueError as error:
        raise ArtifactError(
            f"{url} cannot be used: {error}; give a folder, or the URL of a protocol of fsspec, such as s3://bucket/run"
        ) from None


@contextmanager
def _raise_os_errors(address: str) -> Iterator[None]:
    """Turns exceptions of the stores' packages into an OSError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{address}: {error}") from error
    except Exception as error:
        raise OSError(
            f"{address}: {type(error).__name__}: {error}; check the address, the network and the credentials"
        ) from error
