"""What srun and mpirun write about a process becomes what torchrun writes, of every process of a job."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.services.joining import joining, launcher

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def environment(variables: Mapping[str, object]) -> Iterator[pytest.MonkeyPatch]:
    """Lets a process have these variables of launchers and no others."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [*TORCH, *filter(re.compile("SLURM_|OMPI_|PMI_|MPI_|TORCHELASTIC_").match, os.environ)]:
            patch.setenv(name, "")  # restored afterwards
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, str(value))
        yield patch


def read(variables: Mapping[str, object]) -> dict[str, str]:
    """Returns torch's variables, in an environment of these variables."""
    with environment(variables):
        launcher.read_launcher()
        return {name: os.environ[name] for name in TORCH if name in os.environ}


def slurm(rank: int, counts: list[int], nodes: str = "n[01-99]", **more: object) -> dict[str, object]:
    """Returns what srun sets for a task of a step with so many tasks on each machine."""
    node = next(n for n in range(len(counts)) if rank < sum(counts[: n + 1]))
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    tasks = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    return {
        **{"SLURM_JOB_ID": 17, "SLURM_STEP_ID": 3, "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": sum(counts)},
        **{"SLURM_NTASKS": 99, "SLURM_LOCALID": rank - sum(counts[:node]), "SLURM_NODEID": node},
        **{"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_STEP_NODELIST": nodes, "SLURM_GTIDS": rank},
        **more,
    }


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6).filter(lambda counts: sum(counts) > 1))
def test_every_task_of_a_step_has_its_place(counts: list[int]) -> None:
    tasks = [read(slurm(rank, counts)) for rank in range(sum(counts))]
    assert [task["RANK"] for task in tasks] == [str(rank) for rank in range(sum(counts))]
    places = [(str(local), str(count)) for count in counts for local in range(count)]
    assert [(task["LOCAL_RANK"], task["LOCAL_WORLD_SIZE"]) for task in tasks] == places
    (shared,) = {(task["WORLD_SIZE"], task["MASTER_ADDR"], task["MASTER_PORT"]) for task in tasks}
    assert shared == (str(sum(counts)), "127.0.0.1" if len(counts) == 1 else "n01", "11703")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("host7,host9", "host7"), ("gpu[007-012,020],login", "gpu007"), ("rack[2,4-5]n[3-9]-ib,x", "rack2n3-ib")],
)
def test_rank_0_is_on_the_first_machine(nodes: str, first: str) -> None:
    assert read(slurm(1, [1, 1], nodes))["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    "variables",
    [
        {},
        slurm(0, [1]),  # a step of one task
        slurm(1, [2], WORLD_SIZE=1),  # as the user wants it
        slurm(1, [2], TORCHELASTIC_RUN_ID="x", WORLD_SIZE=2),  # torchrun started by srun
        # The script of a job of two tasks, as sbatch runs it; what salloc sets.
        {"SLURM_PROCID": 0, "SLURM_NTASKS": 2, "SLURM_LOCALID": 0, "SLURM_GTIDS": 0, "SLURM_JOB_ID": 3},
        {"SLURM_NTASKS": 2, "SLURM_JOB_ID": 3},
        {"PMI_RANK": 0, "PMI_SIZE": 2},
    ],
)
def test_what_is_no_task_of_several_is_left_alone(variables: dict[str, object]) -> None:
    assert read(variables) == {name: str(variables[name]) for name in TORCH if name in variables}


OPEN_MPI = {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": number for name, number in OPEN_MPI.items()}
MPICH = {"PMI_RANK": 1, "PMI_SIZE": 2, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2}
FEW = {"SLURM_PROCID": 1, "SLURM_NTASKS": 2, "SLURM_LOCALID": 0, "SLURM_JOB_NODELIST": "a[1-2]"}


@pytest.mark.parametrize(
    ("variables", "expected"),  # in the order of TORCH
    [
        (FEW, ["1", "2", "0", None, "a1", "10000"]),
        (slurm(1, [1, 1], MASTER_ADDR="me", MASTER_PORT="9", RANK="0"), ["0", "2", "0", "1", "me", "9"]),
        (MPICH, ["1", "2", "1", "2", "127.0.0.1", "29500"]),
        # In a job of Slurm, where srun started mpirun's daemons.
        (slurm(1, [1, 1]) | OPEN_MPI | {"MASTER_ADDR": "a"}, ["3", "4", "1", "2", "a", "29500"]),
    ],
)
def test_few_variables_the_users_and_those_of_mpirun(variables: dict[str, object], expected: list[str | None]) -> None:
    read_variables = read(variables)
    assert [read_variables.get(name) for name in TORCH] == expected


def test_mpirun_on_several_machines_needs_an_address() -> None:
    words = r"4 processes were .*, but MASTER_ADDR is not set; .*mpirun -x MASTER_ADDR"
    with environment(OPEN_MPI):
        assert joining.is_distributed()
        assert launcher.detect_launcher() == "mpirun"
        with pytest.raises(pd.errors.PlanError, match=words):
            joining.join_group("cpu")
