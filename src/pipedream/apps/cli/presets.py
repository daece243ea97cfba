"""The clusters on which PipeDream and PipeDream-2BW were evaluated, by name.

| name | machines | of workers | inside a machine | between machines |
| --- | --- | --- | --- | --- |
| pipedream-a | 4 | 4 V100, 16 GB | PCIe 3.0 x16, 15.75 GB/s | Ethernet, 10 Gbit/s |
| pipedream-b | 2 | 8 V100, 16 GB | NVLink 2.0, 150 GB/s | Ethernet, 25 Gbit/s |
| pipedream-c | 4 | 1 Titan X, 12 GB | | Ethernet, 40 Gbit/s |
| pipedream-2bw | 8 | 8 V100, 16 GB | NVLink 2.0, 150 GB/s | Ethernet, 25 Gbit/s |

Sources. Machines, devices, memory and networks: PipeDream (SOSP 2019), section 5.1 and table 1 (A is Azure's NC24 v3,
B is AWS's p3.16xlarge, C is private); PipeDream-2BW (ICML 2021), section 5 (8 p3.16xlarge). Bandwidths inside a machine
are the standards', in one direction: PCIe 3.0 has 16 lanes of 8 GT/s with 128 of 130 bits for data; a V100 has six
NVLinks of 25 GB/s, divided among its neighbours, so that a pair has 25 or 50 of the 150 GB/s. The papers give no
latencies, so they are 0. Programs reach lower rates, which `pipedream probe` measures.
"""

from dataclasses import dataclass

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import MAX_WORKERS, Cluster, Level

_PCIE_3_X16 = 16 * 8e9 * 128 / 130 / 8
_NVLINK_2 = 6 * 25e9
_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Preset:
    """A cluster of identical machines.

    Attributes:
        machines: in the paper.
        workers: per machine.
        inside_bytes_per_s, between_bytes_per_s: speed of a worker's and a machine's port, in one direction.
    """

    machines: int
    workers: int
    inside_bytes_per_s: float
    between_bytes_per_s: float
    memory_bytes: int
    device: str
    source: str

    def cluster(self, machines: int | None = None) -> Cluster:
        count = self.machines if machines is None else machines
        inside, between = Level(self.workers, self.inside_bytes_per_s), Level(count, self.between_bytes_per_s)
        levels = tuple(level for level in (inside, between) if level.width > 1) or (between,)
        return Cluster(levels, self.memory_bytes, self.device)


PRESETS = {
    "pipedream-a": Preset(
        4, 4, _PCIE_3_X16, 10 * _GBIT, 16 * 10**9, "V100", "PipeDream's Cluster-A, Azure NC24 v3 (SOSP 2019)"
    ),
    "pipedream-b": Preset(
        2, 8, _NVLINK_2, 25 * _GBIT, 16 * 10**9, "V100", "PipeDream's Cluster-B, AWS p3.16xlarge (SOSP 2019)"
    ),
    "pipedream-c": Preset(
        4, 1, _PCIE_3_X16, 40 * _GBIT, 12 * 10**9, "Titan X", "PipeDream's Cluster-C, private (SOSP 2019)"
    ),
    "pipedream-2bw": Preset(
        8, 8, _NVLINK_2, 25 * _GBIT, 16 * 10**9, "V100", "PipeDream-2BW's, AWS p3.16xlarge (ICML 2021)"
    ),
}
"""By name."""


def cluster(name: str, machines: int | None = None) -> Cluster:
    """Returns a cluster of the papers, by default with the paper's number of machines.

    Raises:
        PlanError: an unknown name, or a number of machines out of range.
    """
    if name not in PRESETS:
        presets = "\n".join(f"  {preset_name:<14} {preset.source}" for preset_name, preset in PRESETS.items())
        raise PlanError(
            f"cluster {name!r} is neither a file nor known by that name; write a cluster's file, or "
            f"NAME[:MACHINES] as in pipedream-a:4, with one of\n{presets}"
        )
    limit = MAX_WORKERS // PRESETS[name].workers
    if machines is not None and not 1 <= machines <= limit:
        raise PlanError(f"{machines} machines of cluster {name!r} were asked for; give a number from 1 to {limit}")
    return PRESETS[name].cluster(machines)
