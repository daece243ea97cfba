"""Checks the library on a CUDA card: results, waits, speed, memory, several processes on one card, NCCL.

    python benchmarks/gpu/run.py                          # all twelve checks; one H200 needs at most nine minutes
    python benchmarks/gpu/run.py --check equality         # one; may be repeated
    python benchmarks/gpu/run.py --out table.jsonl --profiles profiles/

Prints one JSON row for each check, in the order of worth. Each runs in a process of its own, so that one that fails,
hangs or breaks the card's context is a row and not the end. Exits with 0 if every check holds, or if there is no card;
else with 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 540.0
NO_CARD = "no CUDA card was found: nothing was checked"

CHECKS = {
    "facts": "speed_checks.facts",
    "equality": "result_checks.equality",
    "links": "links_check.links",
    "precision": "result_checks.precision",
    "waits": "result_checks.waits",
    "host": "speed_checks.host process_checks.host_of_processes",
    "throughput": "speed_checks.throughput",
    "memory": "speed_checks.memory",
    "clock": "speed_checks.clock",
    "processes": "process_checks.processes",
    "nccl": "nccl_check.nccl",
    "checkpoint": "result_checks.checkpoint",
    "compiled": "result_checks.full_card result_checks.compiled",
}
"""Name -> the functions of the check, in the order in which they run."""

PROFILES = ("vgg16", "resnet50", "gpt2_medium")

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
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a child: prints the findings of one check or profile
    options = parser.parse_args(arguments)
    device = options.device if options.device != "cuda" else "cuda:0"
    if options.one:
        return _print_findings(options.one, device, options.scale, options.profiles)
    if device != "cpu" and not _has_card():
        print(NO_CARD)
        return 0
    chosen = [name for name in CHECKS if not options.check or name in options.check]
    if options.profiles:
        chosen += [f"profile {name}" for name in PROFILES]
    common = ["--device", device, "--scale", options.scale]
    common += ["--profiles", str(options.profiles)] if options.profiles else []
    failed = False
    with open(options.out or os.devnull, "w", encoding="utf-8") as table:
        for row in rows(chosen, lambda name, limit_s: _start(name, common, limit_s)):
            failed |= not row["ok"]
            print(json.dumps(row), flush=True)
            print(json.dumps(row), file=table, flush=True)
    return int(failed)


def rows(
    chosen: Iterable[str], start: Start, *, limit_s: float = LIMIT_S, now_s: Callable[[], float] = time.monotonic
) -> Iterator[dict[str, Any]]:
    """Yields the row of each check; those for which no time is left are skipped.

    A row has: name; number and bound, each of finding -> value; ok; failed, the findings that do not keep their bounds;
    seconds; note, of finding, 'error' or 'skipped' -> text.
    """
    began = now_s()
    for name in chosen:
        since = now_s()
        left = began + limit_s - since
        if left <= 0:
            note = f"the limit of {limit_s:g} s was reached"
            yield _make_row(name, [], {"skipped": note}, ok=False, seconds=0.0)
            continue
        findings, wrong = start(name, left)
        notes = {finding["name"]: finding["note"] for finding in findings if finding["note"]}
        notes |= {"error": wrong} if wrong else {}
        notes |= {} if findings or wrong else {"skipped": "needs a CUDA device"}
        ok = not wrong and all(finding["ok"] for finding in findings)
        yield _make_row(name, findings, notes, ok=ok, seconds=round(now_s() - since, 1))


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


def _start(name: str, common: Sequence[str], limit_s: float) -> tuple[list[dict[str, Any]], str]:
    """Runs a check in a process of its own, with all that it starts; see `Start`."""
    # cuBLAS gives the same bits each time only with a workspace of its own.
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--one", name, *common],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    late = threading.Event()

    def stop() -> None:
        late.set()
        os.killpg(child.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, stop)
    timer.start()
    try:
        out, errors = child.communicate()
    finally:
        timer.cancel()
    findings = [json.loads(line) for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
    if late.is_set():
        return findings, f"stopped after {limit_s:.0f} s"
    if child.returncode:
        last = errors.strip().splitlines()[-1:] or [""]
        return findings, f"ended with status {child.returncode}: {last[0][:500]}"
    return findings, ""


def _has_card() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
