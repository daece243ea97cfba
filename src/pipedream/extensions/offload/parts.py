"""What this extension adds to a stage."""

from pipedream.extensions.offload.saved_tensors import OffloadedStage

PARTS = (OffloadedStage,)
