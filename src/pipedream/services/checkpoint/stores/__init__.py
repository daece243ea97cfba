"""Where checkpoints are kept: a store per file of this folder, which is scanned."""

import os
import re

from pipedream.core.errors import ArtifactError
from pipedream.core.extensions import import_folder
from pipedream.services.checkpoint.stores.local_folder import LocalFolder
from pipedream.services.checkpoint.stores.object_store import ObjectStore
from pipedream.services.checkpoint.stores.store import CheckpointStore

Folder = str | os.PathLike[str] | CheckpointStore
"""A store, or its address."""


def open_store(folder: Folder) -> CheckpointStore:
    """Returns the store at an address; see `find_kind`.

    Raises:
        ArtifactError: the address cannot be used, or needs a package that is not installed.
    """
    if isinstance(folder, CheckpointStore):
        return folder
    if isinstance(folder, os.PathLike) and (url := re.match(r"(\w{2,}:)/(.+)", os.fspath(folder))):
        raise ArtifactError(
            f"a Path of {url[1]}//{url[2]} has lost a slash and is no URL; give the URL as a text (str)"
        )
    return find_kind(folder)(os.fspath(folder))


def find_kind(folder: str | os.PathLike[str]) -> type[CheckpointStore]:
    """Returns the kind of store that accepts an address, else that of any URL, or of this machine's disk.

    Stores that were defined elsewhere count once their module is imported.
    """
    import_folder(__name__)
    general: list[type[CheckpointStore]] = [ObjectStore, LocalFolder]
    kinds = [*(kind for kind in CheckpointStore.kinds if kind not in general), *general]
    return next(kind for kind in kinds if kind.accepts(os.fspath(folder)))
