"""docs/clusters.md as an engineer follows it, with a model of their own: every command of the page, as it is written.

Two machines are two network namespaces; for Slurm they have names, a controller and a daemon each. Only addresses,
folders and the network interface are replaced.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import commands
import pytest
import torch
from commands import Ended, Started
from torch.distributed.run import config_from_args, parse_args
from two_machines import machines, within

import pipedream as pd
from pipedream.apps import cli
from pipedream.slow_links import LINK, Network

__all__ = ["machines"]  # the fixture

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
FAILS_WITHIN_S = 45.0  # a rank that nobody stops waits for minutes

RECIPE = """
import os, time
from functools import partial
import torch
from torch import nn
import pipedream


class Engine(nn.Module):  # no chain: a residual connection, two inputs, a function between modules
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.norm = nn.Embedding(32, 64), nn.Linear(64, 64), nn.LayerNorm(64)
        self.forget, self.wide, self.head = nn.Dropout(0.1), nn.Linear(64, 128), nn.Linear(128, 4)

    def forward(self, words, weight):
        x = self.embed(words) * weight.unsqueeze(-1)
        x = self.norm(x + torch.relu(self.mix(x)))
        return self.head(self.forget(torch.tanh(self.wide(x))).mean(1))


class Batches:
    def __len__(self):
        return 30

    def __iter__(self):
        for n in range(30):
            time.sleep(float(os.environ.get("SLOW_S", "0")))
            draw = torch.Generator().manual_seed(n)
            words = torch.randint(0, 32, (16, 8), generator=draw)
            yield {"words": words, "weight": torch.rand(16, 8, generator=draw)}, words[:, 0] % 4


def recipe(seed=0):
    torch.manual_seed(seed)
    optimizer, test = partial(torch.optim.Adam, lr=1e-3), list(Batches())[:4]
    return pipedream.Recipe(Engine(), nn.functional.cross_entropy, optimizer, Batches(), test, epochs=3)
"""


def blocks(language: str, folder: Path) -> list[str]:
    """Returns the page's blocks of a language, for two machines of this one that share a folder."""
    sources = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    replaced = {"10.0.0.1": "10.84.0.1", "/shared": str(folder / "shared"), "eth0": LINK}
    return [re.sub("|".join(map(re.escape, replaced)), lambda match: replaced[match[0]], block) for block in sources]


def folder_of(folder: Path) -> Path:
    (folder / "shared").mkdir()
    for name in ("machine0", "machine1"):
        (folder / name).mkdir()
        (folder / name / "recipe.py").write_text(RECIPE, encoding="utf-8")
    return folder


def typed(line: str, folder: Path, within: tuple[str, ...] = (), **environment: str) -> Started:
    """Starts a line of shell in a folder, with this environment's commands on the path."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, module in (("pipedream", "pipedream"), ("torchrun", "torch.distributed.run")):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n', encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    environment |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    shell = "import os, sys; os.execvp('bash', ['bash', '-c', sys.argv[1]])"
    return commands.start("-c", shell, line, folder=folder, environment=environment, within=within)


def ran(line: str, folder: Path) -> Ended:
    ended = typed(line, folder).end()
    assert ended.status == 0, f"{line}\n{ended.err}"
    return ended


def on_each(line: str, machines: Network, folder: Path, **environment: str) -> list[Started]:
    """Types a line of torchrun on both machines."""
    assert " --node-rank 0 " in line
    started = []
    for rank, host in enumerate(machines.hosts):
        command = line.replace("--node-rank 0", f"--node-rank {rank}")
        started.append(typed(command, folder / f"machine{rank}", within(host), **environment))
    return started


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in (folder / "run" / "checkpoints").glob("[!.]*/checkpoint.json"))


def same_as_in_one_process(shared: Path, folder: Path, plan: pd.Plan) -> None:
    torch.set_num_threads(1)  # as many as each of the workers has
    pd.run(commands.load_script(folder / "machine0" / "recipe.py").recipe, plan=plan, out=folder / "here", quiet=True)
    runs = shared / "run", folder / "here"
    over_machines, other = (torch.load(run / "weights.pt", weights_only=True) for run in runs)
    assert all(torch.equal(value, other[key]) for key, value in over_machines.items()), "an interrupted run has others"
    losses = [json.loads((run / "losses.json").read_text()) for run in runs]
    assert losses[0] == losses[1]


@pytest.mark.network
@pytest.mark.processes
def test_path_of_the_engineer_with_torchrun(machines: Network, tmp_path: Path) -> None:
    """Probe, profile, plan, launch and watch over 400 Mbit/s; one worker is killed; resume; the report."""
    machines.limit(50e6)
    folder = folder_of(tmp_path)
    shared, first = folder / "shared", folder / "machine0"
    export, probe, plan, launch, watch = blocks("sh", folder)
    interfaces = dict(word.split("=") for word in export.split()[1:])
    ends = [process.end() for process in on_each(probe, machines, folder, **interfaces)]
    assert [ended.status for ended in ends] == [0, 0], ends[0].err
    assert "rank 0 to rank 1" in ends[0].out
    cluster = pd.Cluster.load(shared / "cluster.json")
    assert cluster.workers == 2
    assert cluster.bandwidth_bytes_per_s < 60e6, "not the 2 GB/s of one machine"
    profile, *others = plan.splitlines()
    ran(profile, first)
    measured = pd.Profile.load(first / "profile.json")  # by the clock of busy cores one worker may be the fastest
    layers = tuple(replace(layer, forward_s=0.01, backward_s=0.02) for layer in measured.layers)
    replace(measured, layers=layers).save(first / "profile.json")
    assert "of Engine" in "".join(ran(line, first).out for line in others)
    loaded_plan = pd.Plan.load(shared / "plan.json")
    assert loaded_plan.cluster == cluster

    started = on_each(launch, machines, folder, SLOW_S="0.05", **interfaces)
    end = time.monotonic() + 120.0
    while not checkpoints(shared):
        if time.monotonic() > end or any(process.ended() for process in started):
            pytest.fail("no checkpoint:\n" + "\n".join(process.end(10.0).err for process in started))
        time.sleep(0.05)
    rows = ran(watch, folder / "machine1").out.splitlines()
    assert len(rows) == 3
    assert all(int(row.split(",")[0]) >= 0 for row in rows)
    since = time.monotonic()
    # The worker: torchrun starts it with -u.
    lines = started[1].processes()
    started[1].kill(next(pid for pid in lines if re.match(r"\S+ -u -m pipedream train ", lines[pid])))
    ends = [process.end(60.0) for process in started]
    assert time.monotonic() - since < FAILS_WITHIN_S
    assert [(ended.status, ended.orphans) for ended in ends] == [(1, []), (1, [])]
    assert "rank 0, stage " in ends[0].err, ends[0].err
    assert "another worker" in ends[0].err

    before = checkpoints(shared)
    ends = [process.end() for process in on_each(launch, machines, folder, **interfaces)]
    assert [ended.status for ended in ends] == [0, 0], ends[0].err
    assert f"resuming from {shared / 'run' / 'checkpoints' / before[-1]}" in ends[0].out
    assert json.loads((shared / "run" / "summary.json").read_text())["minibatches"] == 90
    same_as_in_one_process(shared, folder, loaded_plan)

    shown = (shared / "run" / "report.html").read_text()
    for words in ("Predicted, from microbatch", "Measured, from microbatch", "Test loss"):
        assert f">{words}" in shown


# What a TrainJob may have, by the resource definition of Kubeflow Trainer 2.3 (manifests/base/crds in its repository).
TRAIN_JOB = {
    "runtimeRef": {"apiGroup", "kind", "name"},
    "trainer": {"args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode"},
}


def test_job_of_kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun reads of the command of each pod, with the variables that Trainer gives it."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    (text,) = blocks("yaml", tmp_path)
    runtime, job = yaml.safe_load_all(text)
    assert {runtime["apiVersion"], job["apiVersion"]} == {"trainer.kubeflow.org/v1alpha1"}
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert all(job["spec"][name].keys() <= TRAIN_JOB[name] for name in job["spec"])
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert "torch" in runtime["spec"]["mlPolicy"], "else it sets no variables"
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod, trainer = node["template"]["spec"]["template"]["spec"], job["spec"]["trainer"]
    (container,) = pod["containers"]
    assert node["name"] == container["name"] == "node", "Trainer looks for this name"
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {pod["volumes"][0]["name"]: str(tmp_path / "shared")}
    for rank in range(trainer["numNodes"]):
        variables = {"NPROC_PER_NODE": str(trainer["numProcPerNode"]), "NNODES": str(trainer["numNodes"])}
        variables |= {"NODE_RANK": str(rank), "MASTER_ADDR": "10.84.0.1", "MASTER_PORT": "29400"}
        for name, value in variables.items():
            monkeypatch.setenv(f"PET_{name}", value)
        program, *words = trainer["command"]
        assert program == "torchrun"
        config, _, line = config_from_args(parse_args(words))
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 1)
        assert (config.rdzv_endpoint, config.rdzv_configs["rank"]) == ("10.84.0.1:29400", rank)
        module, package, name, *options = line[line.index("-m") :]
        assert (module, package, name) == ("-m", "pipedream", "train")
        parameters = cli.load(name).make_context(name, options).params
        assert parameters["out"] == parameters["resume"] == str(tmp_path / "shared" / "run")


@pytest.mark.slow
def test_workers_of_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed; pip install 'ray[train]'")
    (code,) = (block for block in blocks("python", tmp_path) if "TorchTrainer" in block)
    first = folder_of(tmp_path) / "machine0"
    (first / "train.py").write_text(code, encoding="utf-8")
    paths = os.pathsep.join((str(first), *sys.path))
    ended = commands.run("train.py", folder=first, environment={"PYTHONPATH": paths, "SLOW_S": "0"})
    assert ended.status == 0, ended.err
    assert json.loads((tmp_path / "shared" / "run" / "summary.json").read_text())["configuration"]["processes"] == 2


SLURM = """
ClusterName=test
SlurmctldHost=node1({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
MpiDefault=none
KillWait=5
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
NodeName=node1 NodeAddr={addresses[0]} CPUs=4 State=UNKNOWN
NodeName=node2 NodeAddr={addresses[1]} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """A controller on the first of two machines, and a daemon on each."""

    def __init__(self, folder: Path, machines: Network) -> None:
        self.folder, self._hosts = folder, machines.hosts
        self._started: list[subprocess.Popen[bytes]] = []
        (folder / "state").mkdir(parents=True)
        folder.chmod(0o755)
        addresses = [host.address for host in machines.hosts]
        hosts = zip(addresses, ("node1", "node2"), strict=True)
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for ip, name in hosts))
        (folder / "slurm.conf").write_text(SLURM.format(folder=folder, addresses=addresses))
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)

    def on(self, machine: int, *command: str) -> tuple[str, ...]:
        """Returns a command as it runs on a machine, with its own name."""
        inside = f'hostname node{machine + 1}; mount --bind {self.folder}/hosts /etc/hosts; exec "$@"'
        return self._hosts[machine].inside("unshare", "--uts", "--mount", "sh", "-c", inside, "sh", *command)

    def begin(self) -> None:
        files = {"key-file": "key", "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log"}
        files |= {"seed-file": "munge.seed"}
        paths = [f"--{option}={self.folder}/{name}" for option, name in files.items()]
        self._begin("munged", "--foreground", "--force", *paths)
        self._begin(*self.on(0, "slurmctld", "-D", "-i"))
        for machine in (0, 1):
            self._begin(*self.on(machine, "slurmd", "-D", "-N", f"node{machine + 1}"))
        end = time.monotonic() + 30.0
        while self.run("sinfo", "--noheader", "--format=%T %D").split() != ["idle", "2"]:
            logs = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
            assert time.monotonic() < end, f"Slurm does not start\n{logs}"
            time.sleep(0.2)

    def _begin(self, *command: str) -> None:
        environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        with (self.folder / "daemons.out").open("ab") as out:
            self._started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))

    def run(self, *command: str, folder: Path | None = None, **more: str) -> str:
        environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")} | more
        done = subprocess.run(
            self.on(0, *command), env=environment, cwd=folder, capture_output=True, text=True, timeout=180
        )
        return done.stdout + done.stderr

    def end(self) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def slurm(machines: Network, tmp_path: Path) -> Iterator[Slurm]:
    if missing := [name for name in ("munged", "slurmctld", "slurmd", "srun", "sbatch") if not shutil.which(name)]:
        pytest.skip(f"no {', '.join(missing)} on the path (Debian: slurm-wlm, munge)")
    cluster = Slurm(tmp_path / "slurm", machines)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.end()


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.processes
def test_job_of_slurm(slurm: Slurm, tmp_path: Path) -> None:
    """One task on each of two machines; the first attempt loses a task, and the same job resumes."""
    folder = folder_of(tmp_path)
    shared, first = folder / "shared", folder / "machine0"
    (job,) = blocks("bash", folder)
    (first / "job.sh").write_text(job, encoding="utf-8")
    typed("true", first).end()  # puts the commands there
    common = {"PATH": f"{first / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    number = slurm.run("sbatch", "--parsable", "--no-requeue", "job.sh", folder=first, SLOW_S="0.05", **common).strip()
    end = time.monotonic() + 120.0
    while not checkpoints(shared):
        log = (shared / "job.log").read_text() if (shared / "job.log").exists() else ""
        assert time.monotonic() < end, f"no checkpoint of job {number}: {log}"
        time.sleep(0.05)
    words = {int(path.name): path for path in Path("/proc").glob("[0-9]*")}
    task = next(pid for pid, place in words.items() if is_task(place, number, rank=1))
    since = time.monotonic()
    os.kill(task, 9)
    while any(is_task(place, number) for place in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() - since < FAILS_WITHIN_S, "a task waits on for the other"
        time.sleep(0.1)
    log = (shared / "job.log").read_text()
    assert "2 machines, measured in " in log, log
    assert "rank 0, stage " in log, log

    before = checkpoints(shared)
    slurm.run("sbatch", "--wait", "job.sh", folder=first, **common)
    log = (shared / "job.log").read_text()
    assert f"resuming from {shared / 'run' / 'checkpoints' / before[-1]}" in log, log
    summary = json.loads((shared / "run" / "summary.json").read_text())
    assert (summary["minibatches"], summary["configuration"]["processes"]) == (90, 2)
    same_as_in_one_process(shared, folder, pd.Plan.load(shared / "run" / "plan.json"))


def is_task(place: Path, job: str, rank: int | None = None) -> bool:
    """Whether a process is a task of a job."""
    try:
        variables = (place / "environ").read_bytes().split(b"\0")
        words = (place / "cmdline").read_bytes()
    except OSError:
        return False
    ids = {f"SLURM_JOB_ID={job}".encode()} | (set() if rank is None else {f"SLURM_PROCID={rank}".encode()})
    return b"pipedream\0train" in words and b"srun" not in words and ids <= {*variables}
