"""Folders in an object store, or on any other file system of fsspec, which comes with torch.

Torch's own `FsspecWriter` is not used: it agrees on a plan first (see `writer`), assumes an empty folder, and its file
system cannot return the size of a file. The files have torch's form: its `FsspecReader` reads them.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

from pipedream.core.artifact import write_text
from pipedream.core.errors import ArtifactError, install_advice


class RemotePath:
    """A file or folder at a URL, with the methods of `pathlib.Path` that checkpoints need.

    Any failure of the store is an OSError. A file exists once it is closed.

    Raises:
        ArtifactError: the protocol is unknown, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        self._url = url if url.endswith("://") else url.rstrip("/")
        self._file_system, self._path = _find_file_system(self._url)

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str | os.PathLike[str]) -> RemotePath:
        return RemotePath(posixpath.join(self._url, os.fspath(name)))

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        head = self._url.rpartition("/")[0]
        return RemotePath(f"{head}/" if head.endswith(":/") else head)

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def resolve(self) -> RemotePath:
        return self

    def exists(self) -> bool:
        return self._read_info() is not None

    def is_dir(self) -> bool:
        return (self._read_info() or {}).get("type") == "directory"

    def is_file(self) -> bool:
        return (self._read_info() or {}).get("type") == "file"

    def is_symlink(self) -> bool:
        return bool((self._read_info() or {}).get("islink"))

    def stat(self) -> SimpleNamespace:
        info = self._read_info()
        if info is None:
            raise FileNotFoundError(f"there is no {self}")
        return SimpleNamespace(st_size=int(info["size"] or 0))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yields the files and folders in this folder whose names match."""
        self._file_system.invalidate_cache()  # others may have written
        try:
            entries = self._call(self._file_system.ls, self._path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            entries = []
        names = [name for entry in entries if (name := posixpath.basename(entry.rstrip("/")))]
        yield from (self / name for name in sorted(names) if fnmatchcase(name, pattern))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: a folder exists when it has files."""

    def read_text(self, encoding: str = "utf-8") -> str:
        return bytes(self._call(self._file_system.cat_file, self._path)).decode(encoding)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def write_bytes(self, data: bytes) -> None:
        with self.open("wb") as file:
            file.write(data)

    @contextmanager
    def open(self, mode: str) -> Iterator[IO[bytes]]:
        """Context with the opened file; reading fetches only the bytes that are read."""
        options = {"cache_type": "none"} if mode == "rb" else {}
        with _raise_os_errors(self):
            try:
                file = self._file_system.open(self._path, mode, **options)
            except FileNotFoundError:
                if mode == "rb":
                    raise
                # Only for a file system with folders: in an object store this would make a bucket.
                self._file_system.makedirs(posixpath.dirname(self._path), exist_ok=True)
                file = self._file_system.open(self._path, mode)
            with file:
                yield file

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._call(self._file_system.rm_file, self._path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_folder(self) -> None:
        """Removes all files, if there are any."""
        if self.exists():
            self._call(self._file_system.rm, self._path, recursive=True)

    def _read_info(self) -> dict[str, Any] | None:
        self._file_system.invalidate_cache()  # others may have written
        try:
            return cast(dict[str, Any], self._call(self._file_system.info, self._path))
        except FileNotFoundError:
            return None

    def _call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with _raise_os_errors(self):
            return method(*args, **options)


AnyPath = Path | RemotePath


def is_url(folder: object) -> bool:
    """Returns whether a folder is given as a URL of fsspec, e.g. 's3://bucket/run'."""
    return isinstance(folder, str) and "://" in folder


def any_path(folder: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Returns the path of a folder, which is a URL or on disk."""
    if isinstance(folder, RemotePath):
        return folder
    if is_url(folder):
        return RemotePath(str(folder))
    if isinstance(folder, os.PathLike) and (url := re.match(r"(\w{2,}:)/(.+)", os.fspath(folder))):
        raise ArtifactError(
            f"a Path of {url[1]}//{url[2]} has lost a slash and is no URL; give the URL as a text (str)"
        )
    return Path(folder)


def write_text_at(path: AnyPath, text: str) -> None:
    """Writes a file, on disk atomically; raises an `ArtifactError` or OSError if it cannot."""
    if isinstance(path, Path):
        write_text(path, text)
    else:
        path.write_text(text)


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
def _raise_os_errors(path: RemotePath) -> Iterator[None]:
    """Turns exceptions of the stores' packages into an OSError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: {error}") from error
    except Exception as error:
        raise OSError(
            f"{path}: {type(error).__name__}: {error}; check the address, the network and the credentials"
        ) from error
