"""Compares what the library computes with a table of earlier results, so that a new structure changes no number.

    .venv/bin/python scripts/check_results.py              everything
    .venv/bin/python scripts/check_results.py tied int8    entries whose names contain all of these words
    .venv/bin/python scripts/check_results.py --write      writes the table

Names each entry of scripts/results.txt that differs, with the columns in which it does; then it exits with 1. Columns:

    weights, losses     digest of the bits, norm and projection, of which the latter two are compared within 1e-7
    saved               digest of a checkpoint's tensors, and of their places in its files
    manifest            digest of the rest of the checkpoint's manifest
    program, plan       digests of their JSON
    makespan, memory    simulated seconds; bytes of the fullest worker, planned and simulated
    raised              the error, of what is refused

Rotated entries are compared within 1e-5. Bits are compared where processor and torch are those of the table's first
line, or with --exact.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

import pipedream

sys.path.append(str(Path(__file__).parent))
from result_cases import PUBLISHED, Entry, Work, find_published_profiles, list_cases, list_work, train

TABLE = Path(__file__).with_name("results.txt")
BITS = ("weights", "losses", "saved")
TOLERANCE = 1e-7
ROTATED_TOLERANCE = 1e-5  # the eigenvectors of basis_rotation amplify differences in the last bits
TIMEOUT_S = 300.0


def list_differences(entries: Mapping[str, Entry], table: Mapping[str, Entry], exact: bool) -> Iterator[str]:
    """Yields a line for each entry that differs, or that only one of both has.

    Args:
        exact: compare bits.
    """
    for name in sorted({*entries, *table}):
        if name not in table:
            yield f"{name}: not in the table"
        elif name not in entries:
            yield f"{name}: only in the table"
        else:
            entry, earlier = entries[name], table[name]
            tolerance = ROTATED_TOLERANCE if "basis_rotation" in name else TOLERANCE
            columns = [column for column in sorted({*entry, *earlier}) if entry.get(column) != earlier.get(column)]
            if not exact:
                columns = [column for column in columns if not is_near(column, entry, earlier, tolerance)]
            if columns:
                pairs = (f"{column} {earlier.get(column)} -> {entry.get(column)}" for column in columns)
                yield f"{name}: {', '.join(pairs)}"


def is_near(column: str, entry: Entry, earlier: Entry, tolerance: float) -> bool:
    """Returns whether two entries differ in this column by no more than two processors do."""
    if column not in BITS or column not in entry or column not in earlier:
        return False
    (_, *numbers), (_, *others) = entry[column].split(":"), earlier[column].split(":")
    bound = tolerance * float(others[0]) if others else 0.0
    return all(math.isclose(float(a), float(b), rel_tol=0, abs_tol=bound) for a, b in zip(numbers, others, strict=True))


def describe_machine() -> str:
    """Returns what determines the bits."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{[*names, platform.machine()][0]}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def read_table(path: Path) -> tuple[str, dict[str, Entry]]:
    """Returns the table's machine, and its entries by name."""
    machine, *lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else [describe_machine()]
    rows = (line.split() for line in lines)
    return machine, {name: dict(cell.split("=", 1) for cell in cells) for name, *cells in rows}


def write_table(path: Path, entries: Mapping[str, Entry]) -> None:
    rows = [" ".join([name, *map("=".join, entry.items())]) for name, entry in sorted(entries.items())]
    path.write_text("\n".join([describe_machine(), *rows]) + "\n", encoding="utf-8")


def compute(work: Work, folder: Path) -> Entry:
    """Computes an entry; an error is one, too. What no user should see is printed."""
    try:
        return work(folder)
    except Exception as error:
        if not isinstance(error, pipedream.PipelineError | subprocess.CalledProcessError):
            traceback.print_exc()
        return {"raised": type(error).__name__}


def prepare() -> None:
    """Prepares a process: one thread, and no warnings of what is meant."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def compute_alone(words: list[str], folder: Path) -> dict[str, Entry]:
    """Computes entries in two processes that take turns."""
    work = {name: work for name, work in list_work().items() if is_chosen(name, words)}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, prepare) as pool:
        return dict(zip(work, pool.map(partial(compute, folder=folder), work.values()), strict=True))


def compute_as_rank(words: list[str], folder: Path, ranks: int) -> None:
    """Computes all entries of so many processes as one of them; rank 0 writes them."""
    prepare()
    cases = [case for case in list_cases() if case.processes == ranks and is_chosen(case.name, words)]
    entries = {case.name: compute(partial(train, case), folder) for case in cases}
    if os.environ["RANK"] == "0":
        (folder / f"{ranks}.json").write_text(json.dumps(entries), encoding="utf-8")


def compute_in_processes(words: list[str], folder: Path, ranks: int) -> dict[str, Entry]:
    """Starts so many processes once, for all of their entries."""
    if not any(case.processes == ranks and is_chosen(case.name, words) for case in list_cases()):
        return {}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, __file__, *words, "--ranks", str(ranks), "--folder", str(folder)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return json.loads((folder / f"{ranks}.json").read_text(encoding="utf-8"))


def is_chosen(name: str, words: list[str]) -> bool:
    return all(word in name for word in words)


def main() -> int:
    """Runs the script; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only entries whose names contain all of these")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--exact", action="store_true", help="compare bits, on any machine")
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks:
        compute_as_rank(options.words, options.folder, options.ranks)
        return 0
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        entries = compute_alone(options.words, Path(name))
        for ranks in (2, 4):
            entries |= compute_in_processes(options.words, Path(name), ranks)
    machine, table = read_table(TABLE)
    others = {name: entry for name, entry in table.items() if not is_chosen(name, options.words)}
    if not find_published_profiles():
        print("no published profiles: their plans are left out; PIPEDREAM_PROFILES may name their folder")
        others |= {name: entry for name, entry in table.items() if name.startswith(PUBLISHED)}
    seconds = f"{len(entries)} entries in {time.monotonic() - start_s:.0f} s"
    if options.write:
        write_table(TABLE, others | entries)
        print(f"{seconds}, written to {TABLE}")
        return 0
    exact = options.exact or machine == describe_machine()
    differences = [*list_differences(entries, {n: e for n, e in table.items() if n not in others}, exact)]
    compared = "bits" if exact else f"numbers within {TOLERANCE:g}, as the table is of {machine}"
    print("\n".join([*differences, f"{seconds}, {len(differences)} differ ({compared})"]))
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
