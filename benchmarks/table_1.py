"""Table 1 of PipeDream (SOSP 2019, section 5.2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A model on a cluster.

    Attributes:
        profile: name of its file.
        model: as the paper calls it.
        cluster: 'pipedream-a' or 'pipedream-b'.
        machines: servers.
        config: that the paper chose.
        speedup: measured, of an epoch, over data parallelism on the same workers.
    """

    profile: str
    model: str
    cluster: str
    machines: int
    config: str
    speedup: float


TABLE_1 = (
    Row("vgg16", "VGG-16", "pipedream-a", 4, "15-1", 5.28),
    Row("vgg16", "VGG-16", "pipedream-b", 2, "15-1", 2.98),
    Row("resnet50", "ResNet-50", "pipedream-a", 4, "16", 1.0),
    Row("resnet50", "ResNet-50", "pipedream-b", 2, "16", 1.0),
    Row("alexnet", "AlexNet", "pipedream-a", 4, "15-1", 4.92),
    Row("alexnet", "AlexNet", "pipedream-b", 2, "15-1", 2.04),
    Row("gnmt_large", "GNMT-16", "pipedream-a", 1, "straight", 1.46),
    Row("gnmt_large", "GNMT-16", "pipedream-a", 4, "straight", 2.34),
    Row("gnmt_large", "GNMT-16", "pipedream-b", 2, "straight", 3.14),
    Row("gnmt", "GNMT-8", "pipedream-a", 1, "straight", 1.5),
    Row("gnmt", "GNMT-8", "pipedream-a", 3, "straight", 2.95),
    Row("gnmt", "GNMT-8", "pipedream-b", 2, "16", 1.0),
)
