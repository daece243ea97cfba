"""Makes what passes read where a method keeps weights in the memory of the machine."""

from collections.abc import Callable, Mapping

from torch import nn

from pipedream.extensions.host_weights.copied_weights import CopiedWeights
from pipedream.extensions.host_weights.home_versions import HostVersions
from pipedream.runtime.stage.host_store import SharedWeights, StoreFormat
from pipedream.runtime.stage.versions import Versions, WeightStore


def make_home(handles: Mapping[str, nn.Parameter], shared_weights: SharedWeights, *, single: bool) -> Versions:
    """Returns the versions of a stage on the rank of its updates."""
    return HostVersions(handles, shared_weights, single=single)


def make_copies(store_format: StoreFormat, per_update: int, open_stored: Callable[[], SharedWeights]) -> WeightStore:
    """Returns the weights of passes that copy them; see `CopiedWeights`."""
    return CopiedWeights(store_format, per_update, open_stored)
