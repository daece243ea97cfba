"""`pipedream probe`."""

from pathlib import Path

from pipedream.apps.cli.options import JSON, OUTPUT, print_json
from pipedream.apps.cli.workers import is_rank_0, is_worker, start_workers
from pipedream.core.artifact import encode
from pipedream.core.flags import option
from pipedream.core.progress import progress


def probe(
    workers: int | None = option(None, "Number of local worker processes.", least=2, unset="none; use torchrun"),
    device: str = option("cpu", "Device of the workers.", metavar="cpu|cuda"),
    seconds: float = option(10.0, "Approximate time to spend.", least=0.5),
    output: Path | None = OUTPUT,
    as_json: bool = JSON,
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
        start_workers(workers, "pipedream.services.probe.probe")
    from pipedream.runtime.comm.process_group import leave_group
    from pipedream.services.probe.probe import probe as probed

    with progress(f"measuring the cluster, for about {seconds:g} s"):
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
