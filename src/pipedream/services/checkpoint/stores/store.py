"""What a store of checkpoints does, in terms of files that it lists, opens, creates and deletes."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import socket
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, ClassVar, Protocol, Self
from uuid import uuid4

from pipedream.core.errors import ArtifactError

MANIFEST = "checkpoint.json"
"""Name of the file that describes a checkpoint; a folder without it is not a checkpoint."""

COPY_BYTES = 16 << 20  # at once
_PREFIX = "minibatch-"


def name_checkpoint(minibatches: int) -> str:
    """Returns the name of a checkpoint, e.g. 'minibatch-00000091' after 91 minibatches."""
    return f"{_PREFIX}{minibatches:08d}"


def parse_minibatches(name: str) -> int | None:
    """Returns the number in the name of a checkpoint."""
    match = re.fullmatch(rf"{_PREFIX}(\d+)", name)
    return int(match[1]) if match else None


class Lock(Protocol):
    """Keeps other runs from writing into a store."""

    def check(self) -> None:
        """Raises an `ArtifactError` if it holds no more."""

    def release(self) -> None:
        """Removes it if it is this run's."""


class CheckpointStore(ABC):
    """A folder that holds checkpoints, each by its name, and files beside them; or that is a checkpoint.

    Paths are relative to it, with slashes. A failure is an OSError that names the file. A subclass of five methods is
    complete, if its files need no rename: they are written in their final place and the manifest last, which is removed
    first. Then a checkpoint without a manifest is left over from a killed save.
    """

    kinds: ClassVar[list[type[CheckpointStore]]] = []
    on_disk: ClassVar[bool] = False
    """Whether it is a folder on this machine: others may have their own, each with its part of a checkpoint."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        CheckpointStore.kinds.append(cls)

    def __init__(self, address: str) -> None:
        self._address = address if address.endswith("://") else address.rstrip("/")

    @classmethod
    @abstractmethod
    def accepts(cls, address: str) -> bool:
        """Returns whether an address, by its scheme or suffix, is one of such a store."""

    @abstractmethod
    def list_names(self, folder: str = "") -> list[str]:
        """Returns the names of the files and folders in a folder, in order; none if there is no such folder."""

    @abstractmethod
    def read_size(self, path: str) -> int:
        """Returns the bytes of a file."""

    @abstractmethod
    def open(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Context with a file to read and seek in."""

    @abstractmethod
    def create(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Context with a new file to write, which exists from the end of the context."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Deletes a file."""

    def __str__(self) -> str:
        return self._address

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointStore) and (type(self), self.identity) == (type(other), other.identity)

    def __hash__(self) -> int:
        return hash(self.identity)

    @property
    def identity(self) -> str:
        """The same for all addresses of a store."""
        return self._address

    @property
    def name(self) -> str:
        return self._address.rpartition("/")[2]

    def locate(self, path: str) -> Path | str:
        """Returns the address of a file or folder in it, as users get it."""
        return posixpath.join(self._address, path) if path else self._address

    def within(self, folder: str) -> Self:
        """Returns the store in a folder of this one."""
        return type(self)(str(self.locate(folder)))

    def above(self) -> Self:
        """Returns the store that this one is a folder of."""
        head = self._address.rpartition("/")[0]
        return type(self)(f"{head}/" if head.endswith(":/") else head)

    def resolve(self) -> CheckpointStore:
        """Returns the folder that this one is a link to, or itself."""
        return self

    @property
    def minibatches(self) -> int:
        """Of a checkpoint: the number in its name; 0 if it was renamed."""
        return parse_minibatches(self.resolve().name) or 0

    def has_file(self, path: str) -> bool:
        try:
            self.read_size(path)
        except FileNotFoundError:
            return False
        return True

    def is_link(self, path: str) -> bool:
        """Returns whether a file is a link, which may lead out of the store."""
        return False

    def read_text(self, path: str) -> str:
        with self.open(path) as file:
            return file.read().decode()

    def write_text(self, path: str, text: str) -> None:
        with self.create(path) as file:
            file.write(text.encode())

    def write_files(self, folder: Path) -> None:
        """Copies a run folder's files, which are made on disk, into the store, without those that begin with a dot."""
        for source in sorted(folder.rglob("[!.]*")):
            if source.is_file():
                with source.open("rb") as reader, self.create(source.relative_to(folder).as_posix()) as writer:
                    shutil.copyfileobj(reader, writer, COPY_BYTES)

    def choose_local_folder(self) -> Path:
        """Returns the folder on disk in which a run's files are made, which are then copied."""
        # Inside of runs/ also for /x and ../x: the store's own file may have that place.
        parts = Path(self._address.replace("://", "/")).parts
        return Path("runs", *(part for part in parts if part not in ("/", "..")))

    def make_folder(self) -> None:
        """Makes the folder, in stores whose folders exist without files."""
        return

    def lock(self) -> Lock:
        """Locks it for this run; raises an `ArtifactError` or OSError if it cannot."""
        return LastLock(self)

    def names(self) -> list[str]:
        """Returns the names of its checkpoints, also of those without a manifest, the oldest first."""
        numbers = {name: number for name in self.list_names() if (number := parse_minibatches(name)) is not None}
        return sorted(numbers, key=numbers.__getitem__)

    def exists(self, name: str) -> bool:
        """Returns whether a checkpoint was committed, or a part of it."""
        return self.has_file(f"{name}/{MANIFEST}")

    def list_leftovers(self) -> list[str]:
        """Returns the names of checkpoints that were begun, and neither committed nor abandoned."""
        return [name for name in self.names() if not self.exists(name)]

    def write(self, name: str, file: str) -> AbstractContextManager[IO[bytes]]:
        """Context with a new file of a checkpoint that is not committed yet."""
        return self.create(f"{name}/{file}")

    def commit(self, name: str) -> None:
        """Makes a checkpoint visible, whose files are written, the manifest last."""
        return

    def abandon(self, name: str) -> None:
        """Removes what is written of a checkpoint that is not committed."""
        self.remove(name)

    def remove(self, name: str) -> None:
        """Removes a checkpoint, in an order that leaves none without some of its files."""
        with suppress(FileNotFoundError):
            self.delete(f"{name}/{MANIFEST}")
        for file in self.list_names(name):
            self.delete(f"{name}/{file}")

    def set_aside(self, name: str) -> None:
        """Renames a checkpoint so that it is not resumed from; may raise a FileNotFoundError if there is none."""
        replaced = f"{name}.replaced"
        self.remove(replaced)
        for file in self.list_names(name):
            with self.open(f"{name}/{file}") as reader, self.create(f"{replaced}/{file}") as writer:
                shutil.copyfileobj(reader, writer, COPY_BYTES)
        self.remove(name)


class LastLock:
    """A lock for stores without locks: it holds until another run begins to write there, and finds that out.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._text = f"{name_process()}, {uuid4().hex}"
        store.write_text(".lock", self._text)

    def check(self) -> None:
        """Raises an `ArtifactError` if another run has taken the folder."""
        try:
            holder = self._store.read_text(".lock")
        except FileNotFoundError:
            holder = "its .lock was removed"
        if holder != self._text:
            raise ArtifactError(
                f"another run has begun to write into the folder {self._store} ({holder}); give each run a folder of "
                "its own"
            )

    def release(self) -> None:
        """Removes the lock if it is this run's."""
        with suppress(ArtifactError, OSError):
            self.check()
            self._store.delete(".lock")


def name_process() -> str:
    """Returns who holds a lock."""
    return f"process {os.getpid()} on {socket.gethostname()}"
