"""`pipedream probe`."""

from __future__ import annotations

from typing import Annotated

import typer

from pipedream.cli.options import Device, Json, Output, print_json
from pipedream.cli.shared.workers import is_rank_0, is_worker, start_workers
from pipedream.core.artifact import encode


def probe(
    workers: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", show_default="none; use torchrun", help="Number of local worker processes."),
    ] = None,
    device: Device = "cpu",
    seconds: Annotated[float, typer.Option(min=0.5, metavar="SECONDS", help="Approximate time to spend.")] = 10.0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure the cluster that the workers run on.

    Measures links, all-reduces, speeds and memory. Start it with torchrun on every machine, as the training would be
    started; rank 0 prints and writes. On one machine --workers starts the processes.

    \b
    Examples:
      torchrun --nnodes 2 --nproc-per-node 4 ... -m pipedream probe -o cluster.json
      pipedream probe --workers 2
    """
    if not is_worker() and workers is not None:
        start_workers(workers)
    from pipedream.runtime.comm.process_group import leave_group
    from pipedream.workflows.probe import probe as probed

    survey = probed(device=device, most_s=seconds)
    leave_group()
    cluster = survey.cluster()
    if not is_rank_0():
        return
    if output is not None:
        cluster.save(output)
    if as_json:
        print_json({"cluster": encode(cluster), "measured": encode(survey)})
    else:
        print(f"{survey}\n\n{cluster}" + (f"\nwritten to {output}" if output is not None else ""))
