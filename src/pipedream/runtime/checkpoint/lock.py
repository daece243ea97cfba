"""A lock on a folder: two runs do not write into it at the same time.

It is the kernel's (`flock` on the file ``.lock``), so a run that was killed holds it no longer. On NFS it also holds
between hosts; a host that is lost holds it until the server gives it up. Where the file system has no locks, there is
no protection.

An object store has no locks either. There the run that began last has the folder; one that began earlier finds another
name in ``.lock``, and saves nothing more.
"""

from __future__ import annotations

import fcntl
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from pipedream.core.errors import ArtifactError
from pipedream.runtime.checkpoint.remote import RemotePath


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
            os.write(descriptor, _name_process().encode())
        except OSError as error:
            raise ArtifactError(f"cannot write into the folder {folder}: {error}; choose another one") from None
        self._closed = weakref.finalize(self, os.close, descriptor)
        os.register_at_fork(after_in_child=self._closed)  # or a loader's process would hold it, too

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
            os.close(descriptor)  # its holder has just removed the file

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
        """Removes the lock, and the folder if it was made for it and is empty."""
        if self._closed.alive:
            with suppress(OSError):
                self._path.unlink()
                if self._made_folder:
                    self._folder.rmdir()
            self._closed()


class RemoteLock:
    """A folder in an object store, until another run begins to write into it.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: RemotePath) -> None:
        self._folder = folder
        self._path = folder / ".lock"
        self._text = f"{_name_process()}, {uuid4().hex}"
        self._path.write_text(self._text)

    def check(self) -> None:
        """Raises an `ArtifactError` if another run has the folder."""
        try:
            holder = self._path.read_text()
        except FileNotFoundError:
            holder = "its .lock was removed"
        if holder != self._text:
            raise ArtifactError(
                f"another run has begun to write into the folder {self._folder} ({holder}); give each run a folder of "
                "its own"
            )

    def release(self) -> None:
        """Removes the lock if it is this run's."""
        with suppress(ArtifactError, OSError):
            self.check()
            self._path.unlink()


def _name_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
