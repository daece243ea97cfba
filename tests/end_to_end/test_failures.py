"""Runs of two processes that fail, seen from the shell: all end soon, one message says what and where."""

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from commands import Ended, Started
from failing_recipe import SOON_S, written
from marks import long, slow

pytestmark = pytest.mark.processes
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def start_training(folder: Path, launcher: tuple[str, ...] = (), **how: Any) -> Started:
    started = commands.start(*launcher, *written(folder, loader="slow=True, count=100_000"), folder=folder, **how)
    started.wait_for_file("going")
    return started


def pid(folder: Path, rank: int) -> int:
    return int((folder / f"pid{rank}").read_text())


def check(ended: Ended, status: int, *words: str, soon: bool = True) -> None:
    """Checks that all ended, soon after the signal, with this status and one message that has these words."""
    assert not soon or ended.seconds < SOON_S
    assert not ended.orphans
    assert ended.status == status, ended.err
    assert "Traceback" not in ended.err
    assert ended.err.count("pipedream: ") == 1, ended.err
    assert len(ended.err.splitlines()) <= 2, ended.err
    for word in words:
        assert word in ended.err, f"{word!r} is not in {ended.err!r}"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        slow(
            {"second": "partial(Forward, KeyboardInterrupt, repeats=10_000)"},
            ("rank 1, stage 1, 1F5", "KeyboardInterrupt: the ice is thinthe", "(149000 characters left out)"),
        ),
        long({"loader": "raises=KeyboardInterrupt()"}, ("rank 0, stage 0, 0F", "KeyboardInterrupt")),
        long({"samples": "MemoryError()"}, ("0, stage 0, 0F", "MemoryError (in DataLoader worker", "small.py:")),
        long({"loader": "raises=True"}, ("rank 0, stage 0, 0F", "OSError: the disk is gone")),
        long({"samples": "leave"}, ("rank 0, stage 0, ", "DataLoader")),
        long({"second": "partial(Forward, leave)"}, ("rank 1 ended with exit status 3",)),
    ],
)
def test_what_layers_and_loaders_raise(tmp_path: Path, parts: dict[str, str], words: tuple[str, ...]) -> None:
    check(commands.run(*written(tmp_path, **parts), folder=tmp_path), 1, "rank ", *words, soon=False)


@pytest.mark.parametrize(
    ("number", "to"),
    [
        *(slow(signal.SIGTERM, "launcher"), long(signal.SIGINT, "terminal"), long(signal.SIGINT, "launcher")),
        *(long(signal.SIGINT, "worker"), long(signal.SIGTERM, "worker")),
    ],
)
def test_interrupt_saves(tmp_path: Path, number: signal.Signals, to: str) -> None:
    started = start_training(tmp_path)
    addresses = [address for pid in started.processes() for address in listening(pid)]
    if to == "worker":
        started.kill(pid(tmp_path, 1), number)
    else:
        started.signal(number, group=to == "terminal")
    ended = started.end()
    assert len(addresses) >= 3, "the store's, and one of each worker's"
    assert set(addresses) == {"127.0.0.1"}, "a local run is reached from this machine only"
    assert (commands.without_progress(ended.err), ended.orphans, ended.seconds < SOON_S) == ("", [], True)
    assert ended.status in ((130, 143) if to == "worker" else (128 + number,))  # of workers that of the first to end
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["interrupted"], summary["minibatches"] >= 20) == (True, True)
    weights = torch.load(tmp_path / "run" / "weights.pt", weights_only=True)
    assert sorted(weights) == ["0.bias", "0.weight", "4.bias", "4.weight"]


LINKS = """
import strict
links = strict.installed(on_one_machine=True)
links.__enter__()
"""


@pytest.mark.slow
def test_a_worker_is_killed_while_messages_never_end(tmp_path: Path) -> None:
    """As between GPUs: a transfer with a dead rank never ends, and a process cannot exit before it aborts it."""
    arguments = written(tmp_path, loader="slow=True, count=100_000")
    with (tmp_path / "small.py").open("a", encoding="utf-8") as recipe:
        recipe.write(LINKS)
    started = commands.start(*arguments, folder=tmp_path, environment={"PYTHONPATH": os.pathsep.join(sys.path)})
    started.wait_for_file("going")
    started.kill(pid(tmp_path, 0))
    check(started.end(), 1, "rank 0 was ended by SIGKILL; it was last in")


@pytest.mark.slow
def test_launcher_is_stopped(tmp_path: Path) -> None:
    started = start_training(tmp_path)
    workers = [pid(tmp_path, rank) for rank in (0, 1)]
    started.signal(signal.SIGSTOP, group=False)
    end = time.monotonic() + SOON_S
    while set(workers) & set(started.processes()):
        assert time.monotonic() < end, "the workers go on without their launcher"
        time.sleep(0.1)
    started.signal(signal.SIGCONT, group=False)
    ended = started.end()
    assert (ended.status, ended.orphans) == (1, [])
    assert "the store, which the launcher serves, has not answered for " in ended.err


@pytest.mark.parametrize(
    ("by", "moment", "ranks"),
    [
        slow((), "middle", (0,)),
        *(long((), *case) for case in (("start", (1,)), ("start", (0, 1)), ("end", (0, 1)))),
        *(long(TORCHRUN, moment, (0, 1)) for moment in ("start", "middle")),
    ],
)
def test_workers_are_stopped_anywhere(tmp_path: Path, by: tuple[str, ...], moment: str, ranks: tuple[int, ...]) -> None:
    arguments = written(tmp_path, loader="slow=True, count=100_000" if moment == "middle" else "")
    started = commands.start(*by, *arguments, folder=tmp_path, environment={"SLOW": moment})
    for name in ["going"] if moment == "middle" else [f"{moment}0", f"{moment}1"]:
        started.wait_for_file(name)
    for rank in ranks:
        started.kill(pid(tmp_path, rank), signal.SIGSTOP)
    ended = started.end()
    # Whichever of launcher and guard was first; torchrun does not look.
    expected = ["was stopped for 10 s and was killed"] if by else ["SIGSTOP", "stopped, swapping"]
    assert any(words in ended.err for words in expected), ended.err
    assert (ended.status, ended.orphans, ended.seconds < SOON_S) == (1, [], True)
    assert f"rank {ranks[-1]}" in ended.err


@pytest.mark.parametrize(
    "number",
    [
        slow(signal.SIGKILL),
        *(long(number) for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_launcher_ends_where_there_is_no_pipeline(tmp_path: Path, number: signal.Signals) -> None:
    started = commands.start(*written(tmp_path), folder=tmp_path, environment={"SLOW": "start"})
    for rank in (0, 1):
        started.wait_for_file(f"start{rank}")
    started.signal(number, group=False)
    ended = started.end()
    assert ended.seconds < SOON_S
    assert not ended.orphans
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}.get(number, -signal.SIGKILL)
    assert ended.status == expected, ended.err
    lines = ended.err.splitlines()
    assert len(lines) == (number is signal.SIGSTOP), ended.err
    assert all("the launcher " in line for line in lines)  # or the store that it serves, whichever was noticed first


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        slow({"second": "Stuck"}, ("rank 1, stage 1, 1F5", "no progress in a forward for", "--stuck-after")),
        long({"loader": "stuck=True"}, ("rank 0, stage 0, 0F", "(loading data)", "no progress in loading data for")),
    ],
    ids=["layer", "loader"],
)
def test_worker_is_stuck(tmp_path: Path, parts: dict[str, str], words: tuple[str, ...]) -> None:
    started = commands.start(*written(tmp_path, **parts), "--stuck-after", "2", folder=tmp_path)
    started.wait_for_file("going")
    started.signal(0, group=False)
    check(started.end(), 1, *words)


@pytest.mark.slow
def test_a_worker_of_torchrun_that_is_killed_leaves_the_name_of_the_last_checkpoint(tmp_path: Path) -> None:
    arguments = written(tmp_path, loader="slow=True, count=100_000")
    started = commands.start(*TORCHRUN, *arguments, "--out", "run", "--checkpoint-every", "8", folder=tmp_path)
    started.wait_for_file("run/losses/00000000.json")
    while not list(tmp_path.glob("run/checkpoints/*/checkpoint.json")):
        time.sleep(0.02)
    started.kill(pid(tmp_path, 1), signal.SIGKILL)
    ended = started.end()
    assert not ended.orphans
    (line,) = [line for line in ended.err.splitlines() if "the last checkpoint is" in line]
    assert tmp_path.joinpath(line.partition("checkpoint is ")[2], "checkpoint.json").exists()


@pytest.mark.slow
def test_torchrun_that_is_killed_takes_its_workers_with_it(tmp_path: Path) -> None:
    started = start_training(tmp_path, TORCHRUN)
    started.signal(signal.SIGKILL, group=False)
    ended = started.end()
    assert not ended.orphans
    assert ended.seconds < SOON_S
    assert ended.err.count("which started this rank, has ended; its workers end") == 1
    assert "terminate called" not in ended.err


def listening(pid: int) -> list[str]:
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(link))
    addresses = []
    for family, file in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                words = bytes.fromhex(fields[1].partition(":")[0])
                turned = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                addresses.append(socket.inet_ntop(family, turned))
    return addresses


@pytest.mark.parametrize("where", [long("import0"), long("start1"), slow("optimizer1")])
def test_a_worker_fails_before_its_pipeline(where: str, tmp_path: Path) -> None:
    ended = commands.run(*written(tmp_path), folder=tmp_path, environment={"FAILS": where})
    check(ended, ended.status, "ValueError: the ice is thin", soon=False)
    assert ended.status in (1, 2), ended.err
    assert "gloo" not in ended.err
