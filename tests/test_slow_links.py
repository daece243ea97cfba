"""Slow networks: they are as slow as asked, they need no root, and nothing of them stays."""

import errno
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import commands
import pytest

import pipedream as pd
from pipedream import latency_relay, slow_links

EXCHANGE = """
import socket, sys, threading, time
address, port, there, back = sys.argv[1], *map(int, sys.argv[2:])
if address:
    connection, out, left = socket.create_connection((address, port)), there, back or 1
else:
    server = socket.create_server(("0.0.0.0", port))
    print("ready", flush=True)
    connection, out, left = server.accept()[0], back, there
start = time.monotonic()
threading.Thread(target=connection.sendall, args=(bytes(out),)).start()
while left > 0:
    left -= len(connection.recv(min(left, 1 << 20)))
print(time.monotonic() - start, flush=True)
if not address and not back:
    connection.sendall(b"!")
"""
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from pipedream.slow_links import slow_network
with slow_network((2, 2), (1e9, 1e6)) as network:
    network.limit(1e6, level=1, latency_s=0.01)
    for host in network.hosts:
        subprocess.Popen(host.inside("sleep", "1000"))
    Path("going").touch()
    time.sleep(1000)
"""


def exchange_s(
    network: slow_links.Network, sender: int, receiver: int, there: int, back: int = 0, port: int = 5000
) -> tuple[float, float]:
    """The seconds until the sender has so many bytes back, or an answer, and until the receiver has all."""
    command = network.hosts[receiver].inside(sys.executable, "-c", EXCHANGE, "", *map(str, (port, there, back)))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listening:
        assert listening.stdout.readline() == "ready\n"
        to = network.hosts[receiver].address, *map(str, (port, there, back))
        command = network.hosts[sender].inside(sys.executable, "-c", EXCHANGE, *to)
        took_s = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        return took_s, float(listening.stdout.readline())


def seconds(network: slow_links.Network, sender: int, receiver: int, size: int, port: int = 5000) -> float:
    return exchange_s(network, sender, receiver, size, port=port)[0]


def fastest_s(take: Callable[[], float], most_s: float, tries: int = 10) -> float:
    """The shortest of several tries: whatever else the machine does only makes them longer."""
    times_s = [take()]
    while min(times_s) >= most_s and len(times_s) < tries:
        times_s.append(take())
    return min(times_s)


@pytest.mark.network
@pytest.mark.parametrize("as_user", [False, True])
def test_link_is_as_slow_as_asked(as_user: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if as_user:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with slow_links.slow_network((2,), (10e6,)) as network:
        assert {host.namespace.owned for host in network.hosts} == {as_user or os.geteuid() != 0}
        for sender, receiver in ((0, 1), (1, 0)):
            assert seconds(network, sender, receiver, 3_000_000) > 0.29
        network.limit(2e6, component=1)  # it sends and receives at no more
        assert seconds(network, 0, 1, 1_000_000) > 0.48
        network.limit(None)
        assert fastest_s(partial(seconds, network, 0, 1, 3_000_000), 0.29) < 0.29


@pytest.mark.network
@pytest.mark.parametrize("how", ["netem", "relay", "relay of a user"])
def test_a_message_and_its_answer_take_two_latencies(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "relay of a user":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if how != "netem":
        write = slow_links._write_rules
        monkeypatch.setattr(
            slow_links, "_write_rules", lambda *how: [re.sub("netem .*", "no_such_kind", rule) for rule in write(*how)]
        )
    with slow_links.slow_network((2, 2), (10e6, None)) as network:
        network.limit(10e6, level=1, latency_s=0.05)
        if how == "netem" and network._relays:
            pytest.skip("this kernel has no netem")
        assert len(network._relays) == (0 if how == "netem" else 2)
        assert 0.1 < fastest_s(partial(seconds, network, 1, 2, 100), 0.12) < 0.12
        assert fastest_s(partial(seconds, network, 2, 3, 100), 0.02) < 0.02, "within a group nothing waits"
        assert seconds(network, 0, 3, 3_000_000) > 0.39
        network.limit(10e6, level=1)
        assert fastest_s(partial(seconds, network, 1, 2, 100), 0.02) < 0.02


@pytest.mark.parametrize(
    ("latency_s", "words"),
    [
        (0.05, r"LinkError.*50\.0 ms was asked for, but .* no netem .* a relay answers 'denied'; load it \(sudo"),
        (-0.05, r"PipelineError.*a latency of -0\.05 s was asked for; give seconds from 0 on"),
    ],
)
def test_what_a_kernel_cannot_emulate(latency_s: float, words: str) -> None:
    def batch(tool: str, lines: list[str]) -> None:
        if any("netem" in line for line in lines):
            raise pd.PipelineError("qdisc kind is unknown")
        ran.append(lines)

    ran: list[list[str]] = []
    place = Mock(batch=batch, enter=lambda: ("sh", "-c", "echo an error >&2; echo denied >&2; exit 1"))
    network = slow_links.Network(
        (slow_links.Host("", place),), {(0, 0): ((place, "wire"), (place, "port"))}, {(0, 0): "switch"}
    )
    with pytest.raises(pd.PipelineError, match=r"component 3 of level 0 was asked for; there are \[\(0, 0\)\]"):
        network.limit(1e6, component=3)
    with pytest.raises(pd.PipelineError) as raised:
        network.limit(1e6, latency_s=latency_s)
    assert re.match(words, repr(raised.value))
    if latency_s > 0:
        assert ran[-1] == ["link delete inner0.0", "link set port master switch"], "they are joined again"


@pytest.mark.parametrize(("number", "ends"), [(errno.ENOBUFS, False), (errno.ENETDOWN, True)])
def test_a_full_queue_loses_a_packet_and_ends_no_relay(number: int, ends: bool) -> None:
    packets = Mock(send=Mock(side_effect=OSError(number, "reason")))
    with pytest.raises(OSError, match="reason") if ends else nullcontext():
        latency_relay._send(packets, b"packet")


@pytest.mark.network
def test_short_message_does_not_wait_until_a_long_one_of_another_host_is_sent() -> None:
    def beside_a_long_one_s(network: slow_links.Network) -> float:
        with ThreadPoolExecutor() as pool:
            before = network.sent_bytes()
            long = pool.submit(seconds, network, 0, 2, 12_000_000)
            while network.sent_bytes() < before + 1_000_000:
                time.sleep(0.01)
            tries_s = [1.0]
            for port in range(5001, 5020):
                took_s = seconds(network, 1, 3, 100, port=port)
                if long.done() or min(tries_s) < 0.02:
                    break
                tries_s.append(took_s)
        return min(tries_s)

    with slow_links.slow_network((2, 2), (1e9, 4e6)) as network:
        assert fastest_s(partial(beside_a_long_one_s, network), 0.02, tries=5) < 0.02  # 0.07 in one queue


@pytest.mark.network
def test_data_of_one_direction_does_not_hold_up_the_other() -> None:
    """The way there is shared with another pair of hosts, the way back, on the same connection, is free."""

    def back_s(network: slow_links.Network) -> float:
        with ThreadPoolExecutor() as pool:
            pool.submit(seconds, network, 1, 3, 12_000_000)
            took_s, there_s = exchange_s(network, 0, 2, 8_000_000, 4_000_000)
        assert there_s > 3.0, "the way there is not shared"
        return took_s

    with slow_links.slow_network((2, 2), (1e9, 4e6)) as network:
        assert fastest_s(partial(back_s, network), 1.3, tries=3) < 1.3  # at the rate alone 1.0


@pytest.mark.network
def test_only_messages_between_groups_cross_the_outer_links() -> None:
    with slow_links.slow_network((2, 2), (None, 4e6)) as network:
        assert len({host.address for host in network.hosts}) == 4
        for sender, receiver in ((0, 1), (2, 3)):
            assert fastest_s(partial(seconds, network, sender, receiver, 4_000_000), 0.9) < 0.9
        assert seconds(network, 1, 2, 4_000_000) > 0.98


@pytest.mark.network
def test_hosts_have_no_way_to_the_machine_and_end_with_their_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, slow_links.slow_network((1,), (None,)) as network:
        ask = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        done = subprocess.run(network.hosts[0].inside(sys.executable, "-c", ask), capture_output=True, text=True)
    assert "Connection refused" in done.stderr
    assert not Path(f"/proc/{network.hosts[0].namespace.pid}").exists()


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.2, 0.3, None])
def test_nothing_is_left_after_a_kill(after_s: float | None, tmp_path: Path) -> None:
    """The kill comes so many seconds after its first process, or when all is made."""
    started = commands.start("-c", HOLDER, folder=tmp_path)
    if after_s is None:
        started.wait_for_file("going")
    else:
        while len(started.processes()) < 2:
            time.sleep(0.001)
        time.sleep(after_s)
    started.signal(9, group=False)
    assert started.end().orphans == []


def test_neither_root_nor_user_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(slow_links, "_TOOLS", ("sh",))
    monkeypatch.setattr(slow_links, "_AS_ROOT", ("sh", "-c", "echo no root >&2; exit 1"))
    monkeypatch.setattr(slow_links, "_AS_USER", ("sh", "-c", "echo no users >&2; exit 1"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    reason = slow_links.why_not()
    assert all(words in reason for words in ("answers 'no root'", "answers 'no users'", "--privileged"))
    assert "sudo" not in reason
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    forbidden = Path("/proc/sys/kernel/overflowuid")  # a setting that every kernel has
    monkeypatch.setattr(slow_links, "_SETTINGS", {"kernel.overflowuid": (forbidden.read_text().strip(), "7")})
    reason = slow_links.why_not()
    assert "no root" not in reason
    assert "sudo sysctl -w kernel.overflowuid=7" in reason


@pytest.mark.parametrize(
    ("widths", "rates", "words"),
    [
        ((2, 2), (1e6,), "give a width and a rate for each level"),
        ((0,), (1e6,), "give a width and a rate for each level"),
        ((2,), (1e6,), "no ip and no tc on the path; install iproute2"),
    ],
)
def test_what_cannot_be_made(widths: Any, rates: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_links.shutil, "which", lambda tool: None if tool in ("ip", "tc") else tool)
    with pytest.raises(pd.PipelineError, match=words), slow_links.slow_network(widths, rates):
        pass


@pytest.mark.parametrize("pairs", [[], [("10.84.0.1", "10.84.0.2")]])
def test_a_port_of_at_most_one_pair_has_one_queue(pairs: list[tuple[str, str]]) -> None:
    """With --hosts 1x2 nothing passes the ports of the outer level."""
    (line,) = slow_links._write_rules(5e6, pairs)
    assert line.startswith("qdisc replace dev {} root tbf rate 5000000bps ")
    _, delay, inner = slow_links._write_rules(5e6, pairs, 0.05)
    assert delay.startswith("qdisc replace dev {} root handle 2: netem delay 50000us limit ")
    assert inner == line.replace("root", "parent 2:1")


def test_hosts_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    network = slow_links.Network(tuple(slow_links.Host("10.0.0.1", None) for _ in range(3)), {}, {})  # type: ignore[arg-type]
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert network.variables(1)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert network.variables(1)["OMP_NUM_THREADS"] == "5"
