"""The cluster of this machine's GPUs, under a short name."""

from pipedream.services.probe.machine import probe_gpus as probe_gpus
