"""Two machines, as far as one can be two: network namespaces that one link joins.

Each has its own addresses, its own loopback and no way to the other but that link, so a worker that offers the
wrong address to the others, or meets them on loopback, is found out here.
"""

import json
import re
import time
from pathlib import Path

import pytest
import torch
from commands import Started
from failing_recipe import SOON_S, written
from marks import long
from two_machines import machines, on_both, started_on_both

import pipedream
import pipedream as pd
from pipedream.apps.training.recipe import load_recipe
from pipedream.slow_links import LINK, Network

__all__ = ["machines"]  # the fixture

pytestmark = [pytest.mark.network, pytest.mark.processes]
DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")


SCRIPT = f"""
import sys, pipedream, torch
from functools import partial
from pipedream.apps.training.recipe import load_recipe
pipedream.run(lambda seed: load_recipe({DIGITS!r}, seed=seed), shape="straight", minibatches=45, out="run")
print("trained", file=sys.stderr)
batch = torch.randn(8, 64)
options = dict(loss=torch.nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1))
for clusters in ([], [pipedream.Cluster.local(2)]):
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    profile = pipedream.profile(model, batch, runs=1)
    plan = pipedream.plan(profile, *clusters, shape="pipeline")
    with pipedream.Pipeline(model, plan, **options) as pipeline:
        losses = [done.loss for done in pipeline.train([(batch, batch)], epochs=3)]
    print(pipeline.rank, len(losses), plan.cluster.bandwidth_bytes_per_s)
    print("trained", file=sys.stderr)
"""


def test_two_machines_are_measured_and_give_the_losses_of_one_process(machines: Network, tmp_path: Path) -> None:
    """In a run, and in a script, where a plan for a single machine warns."""
    rate = 80e6 / 8
    machines.limit(rate)
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    first, second = on_both(machines, "static", (str(tmp_path / "script.py"),), tmp_path)
    assert re.search(r"^2 machines, measured in \d+\.\d s: Cluster of .*; levels: 2 x ", first.out, re.M), first.out
    plan = pd.Plan.load(tmp_path / "machine0" / "run" / "plan.json")
    assert plan.cluster.bandwidth_bytes_per_s == pytest.approx(rate, rel=0.15)
    assert plan.cluster.is_limited
    torch.set_num_threads(1)  # as many as each of the workers has
    recipe = lambda seed: load_recipe(DIGITS, seed=seed)  # noqa: E731
    pipedream.run(recipe, plan=plan, minibatches=45, out=tmp_path / "here", quiet=True)
    losses = [json.loads((tmp_path / folder / "losses.json").read_text()) for folder in ("machine0/run", "here")]
    assert len(losses[0]) == 46, "the 45 asked for, and the one that was in flight"
    assert losses[0] == losses[1]
    summary = json.loads((tmp_path / "machine0" / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["configuration"]["processes"] == 2
    elsewhere = tmp_path / "machine1" / "run"
    names = [] if not elsewhere.exists() else [path.name for path in elsewhere.iterdir()]
    assert names in ([], ["checkpoints"]), "rank 0 writes the rest of the run folder"

    *_, line, figures, _ = first.out.splitlines()
    figures_1, _ = second.out.splitlines()  # of the run, nothing
    assert line.startswith("2 machines, measured in ")
    assert (figures.split()[:2], figures_1.split()[:2]) == (["0", "3"], ["1", "3"])
    assert float(figures.split()[2]) == pytest.approx(rate, rel=0.15)
    assert figures.split()[2] == figures_1.split()[2]
    _, measured, assumed, _ = first.err.split("trained\n")
    assert "UserWarning" not in measured
    assert "UserWarning: the plan assumes one machine (2.00 GB/s, 50.0 us between workers), but" in assumed, assumed
    assert "the workers are on 2; leave out the cluster, and pipedream.plan(profile) measures" in assumed
    assert "script.py:13: " in assumed, "the line of the user"
    assert "UserWarning" not in second.err


@pytest.mark.slow
@pytest.mark.parametrize(("rendezvous", "loses"), [("static", "all"), ("static", "large"), long("c10d", "all")])
def test_both_sides_end_where_packets_are_lost(machines: Network, tmp_path: Path, rendezvous: str, loses: str) -> None:
    program = written(tmp_path, loader="slow=True, count=100_000")
    recipe = tmp_path / "small.py"
    recipe.write_text(recipe.read_text().replace("(4, 8)", "(4, 800)").replace("(8, 2)", "(800, 2)"))
    program[2:] = ["train", str(tmp_path / "small.py"), "--plan", str(tmp_path / "plan.json"), "--out", "run"]
    started = started_on_both(machines, rendezvous, tuple(program), tmp_path)
    try:
        started[0].wait_for_file("going")
        assert all(workers_of(launcher) for launcher in started)
        if loses == "all":
            machines.hosts[1].namespace.batch("ip", [f"link set {LINK} down"])
        for hub, port in (machines._ports[0, number][1] for number in (0, 1) if loses == "large"):
            hub.batch("tc", [f"qdisc replace dev {port} root tbf rate 1gbit burst 900 limit 1000000"])
        end = time.monotonic() + SOON_S * (1.5 if loses == "large" else 1.0)
        while any(workers_of(launcher) for launcher in started):
            assert time.monotonic() < end, "a worker waits on for the other side"
            time.sleep(0.1)
    finally:
        ends = [launcher.end(1.0) for launcher in started]  # torchrun itself waits on for the other machine
    if loses == "large":
        words = r"rank \d, stage \d, receiving .* rank \d, in stage \d, .*, has sent this rank .*\ncheck the MTU"
        assert re.search(words, errors := f"{ends[0].err}\n----\n{ends[1].err}"), errors
        return
    assert [ended.err.count("pipedream: ") for ended in ends] == [1, 1], f"{ends[0].err}\n----\n{ends[1].err}"
    assert "rank 1, " in ends[0].err, ends[0].err
    assert "has sent no heartbeat for" in ends[0].err
    assert "the store, which the launcher serves, has not answered for" in ends[1].err


def workers_of(started: Started) -> list[str]:
    words = started.processes().values()
    return [line for line in words if "-m pipedream" in line and "torch.distributed.run" not in line]
