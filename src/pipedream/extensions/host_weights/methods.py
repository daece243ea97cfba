"""The methods whose weights are in the memory of the machine."""

from pipedream.extensions.host_weights.roundpipe import METHODS

__all__ = ["METHODS"]
