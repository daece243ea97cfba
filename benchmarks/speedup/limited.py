"""A model that fits only when it is cut: the memory of each of two workers is limited.

Each row runs in processes of its own, to which the kernel gives no more than LIMIT_BYTES (RLIMIT_DATA), Python and
torch included.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from curve import BY_NAME, LATENCY_S, WORKER, M, find_speeds, make_request, predict, profile_all
from models import LARGE
from scaffold import format_table
from worker_processes import stop_processes, worker_processes

from pipedream import Cluster
from pipedream.core.units import format_bytes, format_link
from pipedream.slow_links import slow_network

LIMIT_BYTES = 1_400_000_000
VARIANTS = (
    "torch DDP", "torch DDP, fp16", "torch FSDP", "torch FSDP, bfloat16", "1F1B, full", "1F1B, full, int8",
    "1F1B, full, int4", "2BW, full", "2BW, full, int8", "2BW, full, int4", "torch local SGD, every 8", "PowerSGD 4",
    "DiLoCo, every 30",
)  # fmt: skip
LINKS = {"test": (), "short": (12.5e6,), "full": (50e6, 12.5e6)}


def measure(size: str, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns a row for each link and variant; one that ran out of memory has a reason instead of figures."""
    rows: list[dict[str, Any]] = []
    with slow_network((2,), (None,)) as network:
        with worker_processes(network, 2, WORKER, "large", str(M)) as workers:
            profiles = profile_all(workers, VARIANTS, 0.0)
            alone = workers.ask({"do": "solo", "steps": 4, "patience_s": 5.0})["samples_per_s"]
        speeds = find_speeds(profiles, alone)
        for bytes_per_s in LINKS[size]:
            network.limit(bytes_per_s)
            cluster = Cluster.flat(2, bytes_per_s, latency_s=LATENCY_S)
            for name in ("one worker", *VARIANTS):
                row: dict[str, Any] = {"variant": name, "bytes_per_s": bytes_per_s, "limit_bytes": LIMIT_BYTES}
                plan, variant = None, BY_NAME.get(name)
                if variant is not None:
                    plan = variant.plan(profiles, cluster)
                    if variant.runs != "fsdp":  # which has no plan
                        row["peak_bytes"] = max(stage.peak_bytes for stage in plan.stages)
                        row["predicted_per_s"] = predict(name, plan, profiles, speeds)
                # After a failure the workers may not part in peace.
                with (
                    suppress(subprocess.TimeoutExpired),
                    worker_processes(network, 2, WORKER, "large", str(M), limit_bytes=LIMIT_BYTES) as workers,
                ):
                    request = make_request(variant, plan) | {"patience_s": 0.0}
                    if request["do"] == "fsdp":  # as many samples an update as the pipelines
                        request["microbatches"] = M // 2
                    if request["do"] == "fsdp" or (plan is not None and len(plan.stages) > 1):
                        request["meta"] = True
                    row |= workers.ask(request)
                    if "why" in row:
                        stop_processes(workers.workers)
                rows.append(row)
                log(f"{name} over {format_link(bytes_per_s)}: {row}")
    return rows


def tables(rows: list[dict[str, Any]]) -> str:
    """Returns a table: a row for each variant, the rates over each link, and the memory."""
    if not rows:
        return ""
    links = list(dict.fromkeys(row["bytes_per_s"] for row in rows))
    lines = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == name]
        cells = [_format_rate(next(row for row in mine if row["bytes_per_s"] == link)) for link in links]
        peaks = [format_bytes(row["peak_bytes"]) if "peak_bytes" in row else "-" for row in mine[:1]]
        rises = [format_bytes(max(row["rise_bytes"] for row in mine)) if "rise_bytes" in mine[0] else "-"]
        lines.append([name, *cells, *peaks, *rises])
    heads = "|".join(["", *map(format_link, links), "peak planned", "memory grew by"])
    text = (
        f"{LARGE.title}, {format_bytes(rows[0]['limit_bytes'])} of memory for each worker. Samples per second of both"
    )
    return f"{text} (of the predicted ones):\n\n{format_table(heads, 'lr', lines)}"


def _format_rate(row: dict[str, Any]) -> str:
    if "why" in row:
        return "out of memory" if re.search("memory|new thread", row["why"]) else row["why"]
    share = f" ({row['samples_per_s'] / row['predicted_per_s']:.0%})" if "predicted_per_s" in row else ""
    return f"{row['samples_per_s']:.3g}{share}"
