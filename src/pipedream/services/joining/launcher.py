"""Translates the environment variables of srun and mpirun to torchrun's; without that each task would train alone."""

import os
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class _Variables:
    """A launcher's environment variables; of several names the first that is set counts."""

    launcher: str
    rank: str
    processes: tuple[str, ...]
    local_rank: str
    local_processes: tuple[str, ...]


_LAUNCHERS = (
    # mpirun first: within a job of Slurm it starts its own processes by srun. Open MPI; then MPICH and Intel MPI.
    _Variables(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Variables("mpirun", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
    # The names without STEP are the job's; a step may have only a part of it.
    _Variables(
        "srun",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ),
)

LOCAL_RANKS = ("LOCAL_RANK", *(variables.local_rank for variables in _LAUNCHERS), "PMI_LOCAL_RANK")
"""Variables with a process's number on its machine: torchrun's, and those of srun and mpirun."""


def detect_launcher() -> str | None:
    """Returns 'srun' or 'mpirun' if it started this process as one of several, without torchrun in between."""
    variables = _find_launcher()
    return None if variables is None else variables.launcher


def read_launcher() -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, where they are missing.

    They are left alone if WORLD_SIZE says otherwise: with ``WORLD_SIZE=1 srun ...`` each task trains alone.
    MASTER_ADDR stays missing if mpirun, which does not name its machines, started processes on several.
    """
    variables = _find_launcher()
    if variables is None:
        return
    processes = _read_first(variables.processes)
    local_processes = _count_tasks_here(_read_first(variables.local_processes))
    slurm = variables.launcher == "srun"
    nodes = _read_first(("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")) if slurm else ""
    settings = {
        "RANK": os.environ[variables.rank],
        "WORLD_SIZE": processes,
        "LOCAL_RANK": os.environ.get(variables.local_rank, ""),
        "LOCAL_WORLD_SIZE": local_processes,
        "MASTER_ADDR": "127.0.0.1" if local_processes == processes else _name_first_node(nodes),
        "MASTER_PORT": str(_choose_port()) if slurm else "29500",
    }
    for name, value in settings.items():
        if value:
            os.environ.setdefault(name, value)


def _find_launcher() -> _Variables | None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    for variables in _LAUNCHERS:
        processes = _read_first(variables.processes)
        is_one_of_several = variables.rank in os.environ and processes.isdecimal() and int(processes) > 1
        if variables.launcher == "srun":
            # A process that sbatch runs directly has rank 0 of all tasks that srun may start later.
            in_step = _read_first(("SLURM_STEP_ID", "SLURM_STEPID"))
            is_one_of_several = is_one_of_several and not ("SLURM_GTIDS" in os.environ and not in_step)
        else:  # srun also sets PMI_RANK, for MPI programs
            is_one_of_several = is_one_of_several and variables.local_rank in os.environ
        if is_one_of_several and os.environ.get("WORLD_SIZE", processes) == processes:
            return variables
    return None


def _read_first(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if name in os.environ), "")


def _count_tasks_here(counts: str) -> str:
    """Returns this machine's count from a list of all (Slurm writes 2(x3),1 for 2,2,2,1); '' if unknown."""
    if counts.isdecimal():
        return counts
    tasks_per_node = [
        count for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", counts) for _ in range(int(times or 1))
    ]
    node = int(os.environ.get("SLURM_NODEID", "0"))
    return tasks_per_node[node] if node < len(tasks_per_node) else ""


def _name_first_node(nodes: str) -> str:
    """Returns the first of Slurm's list of machines: rack1n07 of ``rack[1-2]n[07-12,20],login``."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).split(",")[0]


def _choose_port() -> int:
    """Returns a port below the ephemeral ones, chosen by job and step so that jobs rarely collide."""
    job, step = (int(os.environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return 10_000 + (job * 100 + step) % 20_000
