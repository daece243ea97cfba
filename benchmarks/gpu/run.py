"""Checks the library on a CUDA card: results, waits, speed, memory, several processes on one card, NCCL.

    python benchmarks/gpu/run.py                          # all checks; they end after nine minutes
    python benchmarks/gpu/run.py --check equality         # one; may be repeated
    python benchmarks/gpu/run.py --out table.jsonl --profiles profiles/

Prints one JSON row for each check as it ends; before them, what is installed. First come checks that share the card,
the most decisive first, then those that need it to themselves. Each check runs in a process of its own, so that one
that fails, hangs or breaks the card's context is a row and not the end. With --out
all that it printed to stderr is in a file beside the table. Exits with 0 if every check holds, or if there is no card;
else, and if this torch cannot use the card, with 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

LIMIT_S = 540.0
CHECK_LIMIT_S, LIMITS_S = 150.0, {"links": 270.0, "processes": 270.0}
"""Of one check, so that one that hangs leaves time for the others; of some by their names."""

NOTED_CHARACTERS = 2000
"""Of the end of a failed check's stderr, in its row."""

NO_CARD = "no CUDA card was found: nothing was checked"

CHECKS = {
    "equality": "result_checks.equality",
    "links": "rank_checks.links",
    "processes": "rank_checks.processes",
    "memory": "speed_checks.memory",
    "checkpoint": "result_checks.checkpoint",
    "precision": "result_checks.precision",
    "facts": "speed_checks.facts",
    "death": "rank_checks.death",
    "nccl": "nccl_check.nccl",
    "waits": "result_checks.waits",
    "throughput": "speed_checks.throughput",
    "store": "speed_checks.store",
    "clock": "speed_checks.clock",
    "recurrent": "result_checks.recurrent",
    "host": "speed_checks.host rank_checks.host_of_processes",
    "compiled": "result_checks.full_card result_checks.compiled",
}
"""Name -> the functions of the check, in the order in which they run."""

SHARING = ("equality", "links", "processes", "memory", "checkpoint", "precision")
"""Checks that share the card; others measure seconds, or the card's free memory."""
AT_ONCE = 4

PROFILES = ("vgg16", "resnet50", "gpt2_medium")

_children: set[subprocess.Popen[bytes]] = set()

Start = Callable[[str, float], tuple[list[dict[str, Any]], str]]
"""(check, seconds that it may take) -> its findings, and what went wrong ('' if nothing)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="append", choices=CHECKS, help="run this one only; may be repeated")
    parser.add_argument("--out", type=Path, help="file for the rows too")
    parser.add_argument("--profiles", type=Path, help="folder for profiles of VGG-16, ResNet-50 and GPT-2 medium")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu, where checks show only that they run")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--findings", help=argparse.SUPPRESS)  # a child: prints those of one check or profile
    options = parser.parse_args(arguments)
    device = options.device if options.device != "cuda" else "cuda:0"
    if options.findings:
        return _print_findings(options.findings, device, options.scale, options.profiles)
    if device != "cpu" and not _has_card():
        unusable = describe_unusable_card()
        print(unusable or NO_CARD)
        return int(bool(unusable))
    chosen = [name for name in CHECKS if not options.check or name in options.check]
    if options.profiles:
        chosen += [f"profile {name}" for name in PROFILES]
    common = ["--device", device, "--scale", options.scale]
    common += ["--profiles", str(options.profiles)] if options.profiles else []
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        out: Path = options.out or Path(scratch) / "table.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w", encoding="utf-8") as table:

            def show(row: dict[str, Any]) -> None:
                for file in (sys.stdout, table):
                    print(json.dumps(row), file=file, flush=True)

            show(_make_row("about", [], describe_software(), ok=True, seconds=0.0))
            for row in rows(chosen, lambda name, limit_s: _start(name, common, limit_s, out)):
                failed |= not row["ok"]
                show(row)
    return int(failed)


def describe_software() -> dict[str, str]:
    """Returns the versions of what is installed, and the cards of this machine with their driver."""
    import torch
    import torch.distributed as dist

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
    return {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": nccl,
        "python": platform.python_version(),
        # Not by torch: in this process it would take memory of the card.
        "cards": "; ".join(_ask_driver("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")),
    }


def describe_unusable_card() -> str:
    """Returns which card is here that this torch cannot use; '' if there is none."""
    cards = _ask_driver("-L")
    if not cards:
        return ""
    import torch

    build = f"CUDA {torch.version.cuda}, which its driver may be too old for" if torch.version.cuda else "CPUs alone"
    return f"the card {cards[0]} cannot be used: torch {torch.__version__} is a build for {build}; nothing was checked"


def _ask_driver(*arguments: str) -> list[str]:
    """Returns the lines of nvidia-smi; none if it is missing or fails."""
    if not shutil.which("nvidia-smi"):
        return []
    answer = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True)
    return answer.stdout.strip().splitlines() if not answer.returncode else []


def rows(
    chosen: Sequence[str], start: Start, *, limit_s: float = LIMIT_S, now_s: Callable[[], float] = time.monotonic
) -> Iterator[dict[str, Any]]:
    """Yields the row of each check as it ends; those for which no time is left are skipped.

    A row has: name; number and bound, each of finding -> value; ok; failed, the findings that do not keep their bounds;
    seconds; note, of finding, 'error' or 'skipped' -> text.
    """
    began = now_s()

    def run(name: str) -> dict[str, Any]:
        since = now_s()
        rest_s = began + limit_s - since
        if rest_s <= 0:
            note = f"the limit of {limit_s:g} s was reached"
            return _make_row(name, [], {"skipped": note}, ok=False, seconds=0.0)
        findings, wrong = start(name, min(rest_s, LIMITS_S.get(name, CHECK_LIMIT_S)))
        notes = {finding["name"]: finding["note"] for finding in findings if finding["note"]}
        notes |= {"error": wrong} if wrong else {}
        notes |= {} if findings or wrong else {"skipped": "needs a CUDA device"}
        ok = not wrong and all(finding["ok"] for finding in findings)
        return _make_row(name, findings, notes, ok=ok, seconds=round(now_s() - since, 1))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            yield from map(Future.result, as_completed([pool.submit(run, name) for name in chosen if name in SHARING]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in list(_children):
                _kill(child)
            raise
    yield from map(run, (name for name in chosen if name not in SHARING))


def _make_row(
    name: str, findings: list[dict[str, Any]], notes: dict[str, str], *, ok: bool, seconds: float
) -> dict[str, Any]:
    return {
        "name": name,
        "number": {finding["name"]: finding["number"] for finding in findings},
        "bound": {finding["name"]: finding["bound"] for finding in findings if finding["bound"]},
        "ok": ok,
        "failed": [finding["name"] for finding in findings if not finding["ok"]],
        "seconds": seconds,
        "note": notes,
    }


def one_check(name: str, device: str, scale: str) -> Iterator[dict[str, Any]]:
    """Yields the findings of one check, in this process; ends where a CPU has no more to show."""
    paths = CHECKS[name].split()
    import findings
    import loops
    import torch

    for path in paths:
        module, _, function = path.partition(".")
        check = getattr(importlib.import_module(module), function)
        try:
            for finding in check(torch.device(device), loops.FULL if scale == "full" else loops.TINY):
                yield {
                    "name": finding.name,
                    "number": finding.number if math.isfinite(finding.number) else None,
                    "bound": finding.bound_text,
                    "ok": finding.ok,
                    "note": finding.note,
                }
        except findings.NeedsCard:
            continue


def _print_findings(name: str, device: str, scale: str, folder: Path) -> int:
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent when the time is over
    kind, _, model = name.partition(" ")
    for finding in _profile(model, device, folder) if kind == "profile" else one_check(name, device, scale):
        print(json.dumps(finding), flush=True)
    return 0


def _profile(model: str, device: str, folder: Path) -> Iterator[dict[str, Any]]:
    import torch
    from profiles import write_profile

    finding = write_profile(model, torch.device(device), folder)
    for name in ("forward_s", "backward_s", "update_s"):
        yield {"name": name, "number": getattr(finding, name), "bound": "", "ok": True, "note": ""}


def _start(name: str, common: Sequence[str], limit_s: float, out: Path) -> tuple[list[dict[str, Any]], str]:
    """Runs a check in a process of its own, with all that it starts; see `Start`.

    Args:
        out: the file of the table, beside which the check's stdout and stderr are written.
    """
    # cuBLAS gives the same bits each time only with a workspace of its own.
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    beside = out.with_suffix(f".{name.replace(' ', '_')}.stdout")
    errors = beside.with_suffix(".stderr")
    command = [sys.executable, str(Path(__file__).resolve()), "--findings", name, *common]
    # Files, not pipes: what a check has found is kept if this process is killed, too.
    with beside.open("w") as stdout, errors.open("w") as stderr:
        child = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True)
        _children.add(child)
        wrong = ""
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            wrong = f"stopped after {limit_s:.3g} s"
            child.send_signal(signal.SIGUSR1)  # it prints where it is
            with suppress(subprocess.TimeoutExpired):
                child.wait(1.0)
        finally:
            _kill(child)
            child.wait()
            _children.remove(child)
    printed = beside.read_text(encoding="utf-8", errors="replace")
    findings = [json.loads(line) for line in printed.splitlines() if line.startswith("{") and line.endswith("}")]
    if child.returncode and not wrong:
        wrong = f"ended with status {child.returncode}"
    if wrong:
        end = errors.read_text(encoding="utf-8", errors="replace").strip()[-NOTED_CHARACTERS:]
        wrong += f": {end}" if end else ""
    return findings, wrong


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _has_card() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
