"""What this extension adds to a stage."""

from pipedream.extensions.host_weights.copied_weights import CopiesInModules

PARTS = (CopiesInModules,)
