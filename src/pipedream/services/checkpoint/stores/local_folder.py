"""A folder on this machine's disk, or on one that machines share.

A checkpoint is written in a folder whose name begins with a dot, and renamed, which is atomic. It is renamed back
before it is removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pipedream.core.artifact import check_regular, write_text
from pipedream.core.errors import ArtifactError
from pipedream.services.checkpoint.stores.store import CheckpointStore, Lock, name_process, parse_minibatches


class LocalFolder(CheckpointStore):
    """A folder on disk, which holds checkpoints; it need not exist yet."""

    on_disk = True

    def __init__(self, address: str | os.PathLike[str]) -> None:
        self._path = Path(address)
        super().__init__(str(self._path))

    @classmethod
    def accepts(cls, address: str) -> bool:
        return True

    @property
    def identity(self) -> str:
        return str(self._path.resolve())

    @property
    def name(self) -> str:
        return self._path.name or self._path.resolve().name

    def locate(self, path: str) -> Path:
        return self._path / path

    def above(self) -> LocalFolder:
        path = self._path if self._path.name not in ("", "..") else self._path.resolve()
        return LocalFolder(path.parent)

    def resolve(self) -> LocalFolder:
        return LocalFolder(self._path.resolve())

    def list_names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._path / folder))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []

    def has_file(self, path: str) -> bool:
        return self.locate(path).is_file()

    def is_link(self, path: str) -> bool:
        return self.locate(path).is_symlink()

    def read_size(self, path: str) -> int:
        return self.locate(path).stat().st_size

    @contextmanager
    def open(self, path: str) -> Iterator[IO[bytes]]:
        check_regular(self.locate(path))
        with self.locate(path).open("rb") as file:
            yield file

    @contextmanager
    def create(self, path: str) -> Iterator[IO[bytes]]:
        with self.locate(path).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def delete(self, path: str) -> None:
        self.locate(path).unlink()

    def read_text(self, path: str) -> str:
        check_regular(self.locate(path))
        return self.locate(path).read_text(encoding="utf-8")

    def write_text(self, path: str, text: str) -> None:
        """Writes a file, atomically."""
        write_text(self.locate(path), text)

    def write_files(self, folder: Path) -> None:
        """Does nothing: the files are made here."""

    def choose_local_folder(self) -> Path:
        return self._path

    def make_folder(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)

    def lock(self) -> Lock:
        return FolderLock(self._path)

    def exists(self, name: str) -> bool:
        return self.locate(name).exists()

    def list_leftovers(self) -> list[str]:
        return [name[1:] for name in self.list_names() if parse_minibatches(name[1:]) is not None and name[0] == "."]

    @contextmanager
    def write(self, name: str, file: str) -> Iterator[IO[bytes]]:
        self._scratch(name).mkdir(exist_ok=True)
        with self.create(f".{name}/{file}") as opened:
            yield opened

    def commit(self, name: str) -> None:
        self._scratch(name).rename(self.locate(name))
        with suppress(OSError):  # not every file system lets a folder be flushed
            descriptor = os.open(self._path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def abandon(self, name: str) -> None:
        shutil.rmtree(self._scratch(name), ignore_errors=True)

    def remove(self, name: str) -> None:
        self.locate(name).rename(self._scratch(name))
        self.abandon(name)

    def set_aside(self, name: str) -> None:
        replaced = self.locate(f"{name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        self.locate(name).rename(replaced)

    def _scratch(self, name: str) -> Path:
        """Returns the folder in which a checkpoint is written."""
        return self._path / f".{name}"


class FolderLock:
    """A folder's lock, held until `release` or the end of this process; makes the folder if needed.

    Raises:
        ArtifactError: another run holds it, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / ".lock"
        try:
            self._made_folder = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = descriptor = self._open_locked()
            os.ftruncate(descriptor, 0)
            os.write(descriptor, name_process().encode())
        except OSError as error:
            raise ArtifactError(f"cannot write into the folder {folder}: {error}; choose another one") from None
        self._closed = weakref.finalize(self, os.close, descriptor)
        os.register_at_fork(after_in_child=self._closed)  # otherwise a loader's process would hold it too

    def _open_locked(self) -> int:
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 1000).decode(errors="replace")
                os.close(descriptor)
                raise ArtifactError(
                    f"another run writes into the folder {self._folder} ({holder}); wait for its end, or choose "
                    "another folder"
                ) from None
            except OSError:
                return descriptor  # the file system has no locks
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    return descriptor
            os.close(descriptor)  # the file was removed before it was locked: try again

    def check(self) -> None:
        """Raises an `ArtifactError` if the folder was removed."""
        try:
            is_here = os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except OSError:
            is_here = False
        if not is_here:
            raise ArtifactError(
                f"the folder {self._folder} was removed or replaced while this run was writing into it; give the run "
                "a folder of its own"
            )

    def release(self) -> None:
        """Removes the lock, and the folder if the lock created it and it is empty."""
        if self._closed.alive:
            with suppress(OSError):
                self._path.unlink()
                if self._made_folder:
                    self._folder.rmdir()
            self._closed()
