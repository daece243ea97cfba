"""What this extension adds to a stage."""

from pipedream.extensions.host_weights.copied_weights import CopiesInModules
from pipedream.extensions.host_weights.cpu_optimizer import CpuOptimizerWeights

PARTS = (CpuOptimizerWeights, CopiesInModules)
