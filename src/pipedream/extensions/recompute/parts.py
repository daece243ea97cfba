"""What this extension adds to a stage."""

from pipedream.extensions.recompute.recomputation import Recomputation

PARTS = (Recomputation,)
