"""Where checkpoints are kept: a store per file of this folder, which is scanned."""

import os
import pkgutil
import re
from importlib import import_module

from pipedream.core.errors import ArtifactError
from pipedream.runtime.checkpoint.stores.local_folder import LocalFolder
from pipedream.runtime.checkpoint.stores.object_store import ObjectStore
from pipedream.runtime.checkpoint.stores.store import CheckpointStore

Folder = str | os.PathLike[str] | CheckpointStore
"""A store, or its address."""


def open_store(folder: Folder) -> CheckpointStore:
    """Returns the store at an address: of the kind that accepts its text, else at a URL or on this machine's disk.

    Stores that were defined elsewhere count once their module is imported.

    Raises:
        ArtifactError: the address cannot be used, or needs a package that is not installed.
    """
    if isinstance(folder, CheckpointStore):
        return folder
    if isinstance(folder, os.PathLike) and (url := re.match(r"(\w{2,}:)/(.+)", os.fspath(folder))):
        raise ArtifactError(
            f"a Path of {url[1]}//{url[2]} has lost a slash and is no URL; give the URL as a text (str)"
        )
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    address = os.fspath(folder)
    general: list[type[CheckpointStore]] = [ObjectStore, LocalFolder]
    kinds = [*(kind for kind in CheckpointStore.kinds if kind not in general), *general]
    return next(kind for kind in kinds if kind.accepts(address))(address)
