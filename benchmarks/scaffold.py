"""What the benchmarks share: processes on this machine, turns, medians, tables, memory and the environment of a run."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")

TIGHT_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""So that what a process has freed is not counted as its own."""


def make_parser(doc: str | None, quick: str = "") -> argparse.ArgumentParser:
    """Returns a parser that describes itself by a module's first line.

    Args:
        quick: what --quick does; without it there is no such option.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def parse_quick(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Parses options; with --quick some have these values."""
    options = parser.parse_args()
    vars(options).update(quick if options.quick else {})
    return options


def print_sections(
    sections: Mapping[str, Callable[[argparse.Namespace], Iterable[object]]], options: argparse.Namespace
) -> None:
    """Prints the lines of each section as they come; `options.only` chooses one."""
    for name, section in sections.items():
        if options.only in (None, name):
            for line in section(options):
                print(line, flush=True)


class Environment:
    """Where and when a benchmark ran; made at its begin."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._start_s = time.monotonic()

    def describe(self, *details: str) -> str:
        """Returns a list in Markdown: the day, how long it took and other details; machine; load; command."""
        minutes = (time.monotonic() - self._start_s) / 60
        day = ", ".join((time.strftime("%Y-%m-%d"), f"{minutes:.1f} minutes", *details))
        load = f"load average {self._load:.2f} before the run, {os.getloadavg()[0]:.2f} at its end"
        return "\n".join(
            f"- {line}" for line in (day, describe_machine(), load, f"command: python {' '.join(sys.argv)}")
        )


def stop_if(reason: str | None, folder: str) -> None:
    """Ends the program with status 0 and a line if there is a reason that a benchmark cannot run on this machine."""
    if reason is not None:
        print(f"benchmarks/{folder} cannot run here: {reason}")
        sys.exit(0)


def describe_machine() -> str:
    """Returns cores, processor, system and versions."""
    from pipedream.profiler.device import name_processor  # other processes of a benchmark need none of it

    return (
        f"{len(os.sched_getaffinity(0))} cores of {name_processor()}, Linux {platform.release()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}"
    )


def take_turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yields all names in each round; each round begins with another one, so that none is always the first."""
    ordered = list(names)
    for number in range(rounds):
        first = number % len(ordered)
        yield from ordered[first:] + ordered[:first]


def collect_rounds(measure: Callable[[str], Result], names: Iterable[str], rounds: int) -> dict[str, list[Result]]:
    """Measures each name in each round, in turns; returns name -> results, round by round."""
    results: dict[str, list[Result]] = {name: [] for name in names}
    for name in take_turns(results, rounds):
        results[name].append(measure(name))
    return results


def compare_rounds(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Returns ratios round by round: what disturbs the machine for seconds disturbs both."""
    return [value / other for value, other in zip(values, others, strict=True)]


def format_quartiles(values: Sequence[float], write: Callable[[float], str] = "{:.3f}".format) -> str:
    """Returns the median, and the quartiles in parentheses."""
    if len(values) < 2:
        return write(values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{write(middle)} ({write(low)} to {write(high)})"


def format_range(values: Sequence[float], write: Callable[[float], str]) -> str:
    """Returns the median, and the least and the largest in parentheses."""
    return f"{write(statistics.median(values))} ({write(min(values))} to {write(max(values))})"


def format_head(titles: str, alignment: str = "") -> str:
    """Returns the head of a table in Markdown.

    Args:
        titles: of the columns, separated by '|'.
        alignment: 'l' or 'r' for each column; the last one counts for the rest.
    """
    columns = titles.split("|")
    sides = (alignment or "l").ljust(len(columns), (alignment or "l")[-1])
    marks = ["---:" if side == "r" else "---" for side in sides]
    return f"{format_row(column.strip() for column in columns)}\n{format_row(marks)}"


def format_row(cells: Iterable[object]) -> str:
    """Returns a row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def format_table(titles: str, alignment: str, rows: Iterable[Iterable[object]]) -> str:
    """Returns a table in Markdown; see `format_head`."""
    return "\n".join([format_head(titles, alignment), *map(format_row, rows)])


def format_mib(size_bytes: float) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows as JSON, each in a line, and makes the file's folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(map(json.dumps, rows))
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def find_published() -> Path | None:
    """Returns the folder of the profiles that the original published, where this machine has them.

    It is PIPEDREAM_PROFILES, or shared/profiles beside or above this checkout.
    """
    root = Path(__file__).parents[1]
    named = os.environ.get("PIPEDREAM_PROFILES")
    folders = [Path(named)] if named else [place / "shared" / "profiles" for place in (root, *root.parents)]
    return next((folder for folder in folders if (folder / "vgg16.txt").exists()), None)


def parse_with_profiles(
    parser: argparse.ArgumentParser, needs_profiles: Callable[[argparse.Namespace], bool] = lambda options: True
) -> argparse.Namespace:
    """Parses options, among them --profiles, the folder of the original's profiles."""
    parser.add_argument("--profiles", type=Path, default=find_published())
    options = parser.parse_args()
    if needs_profiles(options) and (options.profiles is None or not options.profiles.is_dir()):
        parser.error("give the folder of the original's profiles: --profiles FOLDER, or PIPEDREAM_PROFILES")
    return options


def read_memory(name: str) -> int:
    """Returns a size in bytes that the kernel keeps of this process.

    VmRSS: resident; VmHWM: at most; VmData: what RLIMIT_DATA limits; RssShmem: resident and shared.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def restart_peak() -> int:
    """Frees what can be freed, and lets VmHWM begin anew; returns the resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return read_memory("VmRSS")


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns each rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def answer_request(answer: Callable[[dict[str, Any]], Any]) -> None:
    """Is one of `run_processes`, over gloo; rank 0 prints the answer to the request."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = answer(json.loads(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def local_world(processes: int) -> list[dict[str, str]]:
    """Returns torch's variables for each of several processes of this machine, of one thread each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return [shared | {"RANK": str(rank)} for rank in range(processes)]


class WorkersFailedError(SystemExit):
    """Some of the processes of a benchmark have failed.

    Attributes:
        statuses: of all of them; those that went on were killed.
    """

    def __init__(self, statuses: list[int | None]) -> None:
        super().__init__(f"the workers ended with {statuses}")
        self.statuses = statuses


def run_processes(
    program: Path, request: Mapping[str, Any], processes: int = 1, variables: Mapping[str, str] | None = None
) -> Any:
    """Runs a program with a request in so many processes; returns what rank 0 printed last, as JSON.

    Raises:
        WorkersFailedError: one failed, after which the others had a few seconds to end.
    """
    command, workers = (sys.executable, str(program), json.dumps(request)), list[subprocess.Popen[str]]()
    with tempfile.TemporaryFile("w+") as answer:
        try:
            for rank, world in enumerate(local_world(processes)):
                output, environment = subprocess.DEVNULL if rank else answer, os.environ | world | dict(variables or {})
                workers.append(subprocess.Popen(command, env=environment, stdout=output, text=True))
            while workers[0].poll() is None and not any(worker.poll() for worker in workers):
                time.sleep(0.02)
            end_s = time.monotonic() + (5 if any(worker.poll() for worker in workers) else 60)
            with suppress(subprocess.TimeoutExpired):
                for worker in workers:
                    worker.wait(timeout=max(0.0, end_s - time.monotonic()))
        finally:
            stop_processes(workers)
        if any(statuses := [worker.returncode for worker in workers]):
            raise WorkersFailedError(statuses)
        answer.seek(0)
        return json.loads(answer.read().splitlines()[-1])


def stop_processes(workers: Iterable[subprocess.Popen[Any]]) -> None:
    """Kills those that still run."""
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
        if worker.stdout is not None:
            worker.stdout.close()
