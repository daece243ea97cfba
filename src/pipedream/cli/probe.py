"""The command `probe`: measures the links and workers of a cluster, and writes the cluster's file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipedream.cli.options import Device, Json, print_json
from pipedream.core.artifact import encode

__all__ = ["probe"]


def probe(
    workers: Annotated[
        int | None, typer.Option(min=2, help="Local worker processes, to try it on one machine; else use torchrun.")
    ] = None,
    device: Device = "cpu",
    seconds: Annotated[float, typer.Option(min=0.5, help="About how long it may take.")] = 10.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write the cluster to.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the cluster that the workers run on: links, sums, speeds, memory; write its file.

    Started by torchrun on every machine as the training would be. Rank 0 writes and prints.
    """
    launched = "TORCHELASTIC_RUN_ID" in os.environ or "WORLD_SIZE" in os.environ
    if not launched and workers is not None:
        from pipedream.runtime.failure.launch import launch  # torch is loaded only where workers run

        raise typer.Exit(launch(workers, ["-m", "pipedream.cli", *sys.argv[1:]]))
    from pipedream.runtime.comm.process_group import leave_group
    from pipedream.workflows.probe import probe as probed

    survey = probed(device=device, most_s=seconds)
    leave_group()
    cluster = survey.cluster()
    if int(os.environ.get("RANK", "0")) != 0:
        return
    if output is not None:
        cluster.save(output)
    if as_json:
        print_json({"cluster": encode(cluster), "measured": encode(survey)})
    else:
        print(f"{survey}\n\n{cluster}" + (f"\nwritten to {output}" if output is not None else ""))
