"""Slow networks on one machine: a network namespace for each worker, with links of a chosen rate and latency.

Each namespace belongs to a process that waits for the end of its input, a pipe of this process: however this process
ends, its namespaces end with it. Root makes them directly, other users in a user namespace of their own.

Needs Linux with iproute2 (``ip``, ``tc``) and util-linux (``unshare``, ``nsenter``, ``setpriv``). Latencies are
emulated by the kernel's ``netem``; where it has none, by a process that carries the packets (`latency_relay`).
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil, inf, prod
from pathlib import Path

from pipedream.core.errors import PipelineError
from pipedream.core.units import format_seconds

LINK = "wire"
"""Name of a host's network interface."""

# The bucket is little beside a message, so the rate holds for all of it; only fast links need a larger one, as the
# timer that refills it is late by some microseconds. A queue holds several messages, so nothing is dropped.
_MIN_BURST_BYTES, _BURST_S, _QUEUE_BYTES = 32_000, 2e-4, 16_000_000

# Jumbo frames: the machine's cores do the work of the network cards too, and a shaped link wakes them for each packet.
# With packets of 1500 bytes that takes 4 to 10 ms of a core for each message of 0.8 MB at 400 Mbit/s.
_PACKET_BYTES = 9000

# Acknowledgements overtake data (see _write_rules). A receiver drops data whose own acknowledgement lags by more than a
# window, so windows are large and senders queue little.
_SOCKETS = {"tcp_wmem": "4096 65536 524288", "tcp_rmem": "4096 16777216 16777216"}
_UNLIMITED_BYTES_PER_S = 1.25e9  # by which windows are made where no rate is set
_DELAYED_PACKETS = 1_000_000  # at most, at once; netem's own limit would drop some

_RELAY = str(Path(__file__).with_name("latency_relay.py"))

_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
_AS_ROOT = ("unshare", "--net")
_AS_USER = ("unshare", "--user", "--map-root-user", "--net")
_SETTINGS = {  # of the kernel -> the value that forbids namespaces to users, and one that allows them
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "user.max_user_namespaces": ("0", "10000"),
}


class LinkError(PipelineError):
    """The kernel cannot emulate a link."""


@dataclass(frozen=True)
class _Namespace:
    """A network namespace and the process that keeps it."""

    pid: int
    owned: bool  # by a user namespace

    def enter(self, *, net: bool = True) -> tuple[str, ...]:
        user = ("--user", "--preserve-credentials") if self.owned else ()
        return ("nsenter", f"--target={self.pid}", *user, *(("--net",) if net else ()))

    def batch(self, tool: str, lines: Sequence[str]) -> None:
        """Runs lines of ``ip``, ``tc`` or ``sh`` here."""
        command = (*self.enter(), tool, *(("-e",) if tool == "sh" else ("-batch", "-")))
        done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
        if done.returncode:
            raise PipelineError(f"{tool} {lines[0]} ...: {done.stderr.strip()}")


_End = tuple[_Namespace, str]
"""An end of a cable: where, and the name of the interface."""


@dataclass(frozen=True)
class Host:
    """One host of a slow network: a namespace with one network interface, `LINK`, and a loopback."""

    address: str
    namespace: _Namespace

    def inside(self, *command: str) -> tuple[str, ...]:
        """Returns a command that runs on this host. This process must start it, and it is killed with this one."""
        # A parent that ended before the signal was asked for would never send it.
        still = f'[ "$PPID" = {os.getpid()} ] && exec "$@"'
        return (*self.namespace.enter(), "setpriv", "--pdeathsig", "KILL", "sh", "-c", still, "sh", *command)


@dataclass(frozen=True)
class Network:
    """Hosts joined by links.

    Attributes:
        hosts: in the order of the ranks.
    """

    hosts: tuple[Host, ...]
    _ports: dict[tuple[int, int], tuple[_End, _End]]  # (level, component) -> the ends of its port
    _switches: dict[tuple[int, int], str]  # the switch of each port
    _relays: dict[tuple[int, int], subprocess.Popen[bytes]] = field(default_factory=dict)  # of ports with a latency

    def limit(
        self, bytes_per_s: float | None, *, level: int = 0, component: int | None = None, latency_s: float = 0.0
    ) -> None:
        """Limits what components of a level send to others, and what they receive; None takes the limit away.

        Args:
            component: one of the level's; by default all.
            latency_s: of one way, added to all that they send; a round trip takes twice as long. Those of the levels
                that a message crosses add up.

        Raises:
            LinkError: this kernel cannot emulate latency.
            PipelineError: a negative latency, or no such level or component.
        """
        if not 0 <= latency_s < inf:
            raise PipelineError(f"a latency of {latency_s} s was asked for; give seconds from 0 on")
        ports = [port for port in self._ports if port[0] == level and component in (None, port[1])]
        if not ports:
            raise PipelineError(f"component {component} of level {level} was asked for; there are {[*self._ports]}")
        for port in ports:
            self._remove_relay(port)
        try:
            self._shape(ports, bytes_per_s, latency_s)
        except PipelineError as error:
            if not latency_s or "kind is unknown" not in str(error):
                raise
            self._shape(ports, bytes_per_s)
            for port in ports:
                self._add_relay(port, latency_s)
        self._set_windows(2 * latency_s * (bytes_per_s or _UNLIMITED_BYTES_PER_S))

    def _shape(self, ports: Sequence[tuple[int, int]], bytes_per_s: float | None, latency_s: float = 0.0) -> None:
        """Sets the rate of ports, and by netem the latency of what leaves through them."""
        lines: dict[_Namespace, list[str]] = {}
        for level, number in ports:
            size = len(self.hosts) // sum(at == level for at, _ in self._ports)  # hosts of a component
            inside = self.hosts[number * size : (number + 1) * size]
            leaving = [(host.address, other.address) for host in inside for other in self.hosts if other not in inside]
            arriving = [(other, host) for host, other in leaving]
            ways = (leaving, latency_s), (arriving, 0.0)
            for (namespace, device), (pairs, way_s) in zip(self._ports[level, number], ways, strict=True):
                rules = _write_rules(bytes_per_s, pairs, way_s)
                lines.setdefault(namespace, []).extend(rule.format(device) for rule in rules)
        for namespace, rules in lines.items():
            namespace.batch("tc", rules)

    def _add_relay(self, port: tuple[int, int], latency_s: float) -> None:
        """Puts a relay between a port and its switch."""
        hub, device = self._ports[port][1]
        inner, outer, up = f"inner{port[0]}.{port[1]}", f"outer{port[0]}.{port[1]}", f"mtu {_PACKET_BYTES} up"
        lines = [f"link add {inner} type veth peer name {outer}", f"link set {inner} {up}"]
        lines += [f"link set {outer} master {self._switches[port]} {up}", f"link set {device} nomaster"]
        hub.batch("ip", lines)
        relay = self._relays[port] = subprocess.Popen(
            (*hub.enter(), sys.executable, "-IS", _RELAY, device, inner, str(latency_s)),
            stdin=subprocess.PIPE,  # it ends with this process, and no later
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert relay.stdout is not None
        assert relay.stderr is not None
        if not relay.stdout.readline():
            why = relay.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
            self._remove_relay(port)
            raise LinkError(
                f"a latency of {format_seconds(latency_s)} was asked for, but this kernel has no netem to emulate it, "
                f"and a relay answers {why!r}; load it (sudo modprobe sch_netem), or predict only"
            )

    def _remove_relay(self, port: tuple[int, int]) -> None:
        """Joins a port and its switch again, if a relay is between them."""
        if (relay := self._relays.pop(port, None)) is None:
            return
        with relay:  # closes its input, which ends it
            pass
        hub, device = self._ports[port][1]
        inner = f"inner{port[0]}.{port[1]}"
        hub.batch("ip", [f"link delete {inner}", f"link set {device} master {self._switches[port]}"])

    def end_relays(self) -> None:
        for port in [*self._relays]:
            self._remove_relay(port)

    def _set_windows(self, round_trip_bytes: float = 0.0) -> None:
        """Lets a connection have at least as many bytes under way as fit into four round trips."""
        if not round_trip_bytes and len(self.hosts) <= 2:
            return  # the kernel's own windows do
        for host in self.hosts:
            for name, sizes in _SOCKETS.items():
                low, usual, most = sizes.split()
                sizes = f"{low} {usual} {max(int(most), ceil(4 * round_trip_bytes))}"
                host.namespace.batch("sh", [f"echo {sizes} > /proc/sys/net/ipv4/{name}"])

    def sent_bytes(self) -> int:
        """Returns what all hosts have sent so far, with the headers of packets."""
        total = 0
        for host in self.hosts:
            rows = Path(f"/proc/{host.namespace.pid}/net/dev").read_text(encoding="ascii").splitlines()
            total += next(int(row.split()[9]) for row in rows if row.strip().startswith(f"{LINK}:"))
        return total

    def variables(self, rank: int, *, port: int = 29500) -> dict[str, str]:
        """Returns torchrun's environment variables for the worker on a host, with torch's messages over `LINK`.

        The hosts share the machine's cores: each has its part, unless OMP_NUM_THREADS is set.
        """
        threads = max(1, (os.cpu_count() or 1) // len(self.hosts))
        return {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.hosts)),
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": LINK,
        }


@contextmanager
def slow_network(widths: Sequence[int], bytes_per_s: Sequence[float | None]) -> Iterator[Network]:
    """Makes hosts and links of a rate, and removes them at the end.

    Args:
        widths: widths of the levels, innermost first, as in `Cluster`: (2, 3) is three groups of two hosts.
        bytes_per_s: rate of each level, in which a component sends to others, and receives; None for no limit.

    Raises:
        PipelineError: this machine does not allow it; says what it answered and what to run.
    """
    if len(widths) != len(bytes_per_s) or min(widths, default=0) < 1 or prod(widths) > 60_000:
        raise PipelineError(f"a network of {tuple(widths)} hosts with rates {tuple(bytes_per_s)} was asked for; "
                            "give a width and a rate for each level")  # fmt: skip
    if missing := [tool for tool in _TOOLS if not shutil.which(tool)]:
        raise PipelineError(f"no {' and no '.join(missing)} on the path; install iproute2 and util-linux")
    with ExitStack() as stack:
        hub = _make_hub(stack)
        make = (*hub.enter(net=False), "unshare", "--net")
        namespaces = [
            _make_namespace(stack, make if hub.owned else _AS_ROOT, owned=hub.owned) for _ in range(prod(widths))
        ]
        network = _join_namespaces(hub, namespaces, widths)
        stack.callback(network.end_relays)
        for level, rate in enumerate(bytes_per_s):
            if rate is not None:
                network.limit(rate, level=level)
        yield network


def _write_rules(bytes_per_s: float | None, pairs: Sequence[tuple[str, str]], latency_s: float = 0.0) -> list[str]:
    """Returns the ``tc`` lines that limit the traffic of a device, {}, between pairs of addresses, after a latency.

    The packets of several pairs take turns, as in the fair queues of most systems. In one queue those of an all-reduce
    would wait for all that other connections have sent before, which may be megabytes. Acknowledgements go first:
    if they waited for the data of their connection, they would slow the other direction down to the rate of this one.
    """
    parent, before = "root", ["qdisc replace dev {} root pfifo_fast"]
    if latency_s:
        parent = "parent 2:1"
        before.append(
            f"qdisc replace dev {{}} root handle 2: netem delay {1e6 * latency_s:.0f}us limit {_DELAYED_PACKETS}"
        )
    if not bytes_per_s:
        return before
    # bps: bytes per second, in the language of tc
    rate = f"rate {round(bytes_per_s)}bps"
    burst = max(_MIN_BURST_BYTES, round(bytes_per_s * _BURST_S))
    queue = max(_QUEUE_BYTES, 2 * burst)
    if len(pairs) <= 1:  # none: a level of one component, whose port nothing passes
        before = before if latency_s else []
        return [*before, f"qdisc replace dev {{}} {parent} tbf {rate} burst {burst} limit {queue}"]
    share = f"rate {max(1, round(bytes_per_s / len(pairs)))}bps ceil {round(bytes_per_s)}bps"
    lines = [
        *before,
        f"qdisc replace dev {{}} {parent} handle 1: htb",
        f"class add dev {{}} parent 1: classid 1:1 htb {rate} burst {2 * burst} cburst {2 * burst}",
        f"class add dev {{}} parent 1:1 classid 1:ffff htb {rate} burst {burst} cburst {burst} prio 0",
        # TCP in IP packets of less than 64 bytes: without data
        "filter add dev {} parent 1: protocol ip prio 1 u32 match ip protocol 6 0xff match u16 0 0xffc0 at 2 "
        "flowid 1:ffff",
    ]
    for number, (sender, receiver) in enumerate(pairs, 2):
        lines += [
            f"class add dev {{}} parent 1:1 classid 1:{number:x} htb {share} burst {burst} cburst {burst} "
            f"quantum {_MIN_BURST_BYTES} prio 1",
            f"qdisc add dev {{}} parent 1:{number:x} bfifo limit {queue}",
            f"filter add dev {{}} parent 1: protocol ip prio 2 u32 match ip src {sender} match ip dst {receiver} "
            f"flowid 1:{number:x}",
        ]
    return lines


def why_not() -> str | None:
    """Returns why this machine has no slow networks, or None."""
    try:
        with slow_network((2,), (50e6,)):
            return None
    except PipelineError as error:
        return str(error)


def loopback_bytes_per_s(tries: int = 5, each_s: float = 0.06) -> float:
    """Measures what this machine's loopback carries in one direction: the fastest of several tries."""
    chunk, buffer, fastest = bytes(1 << 20), bytearray(1 << 20), 0.0
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver = server.accept()[0]

        def send() -> None:
            with suppress(OSError):  # the receiver has left
                while True:
                    sender.sendall(chunk)

        thread = threading.Thread(target=send)
        thread.start()
        with receiver:
            for _ in range(tries):
                total, start = 0, time.monotonic()
                while (passed := time.monotonic() - start) < each_s:
                    total += receiver.recv_into(buffer)
                fastest = max(fastest, total / passed)
        thread.join()
    return fastest


def _make_hub(stack: ExitStack) -> _Namespace:
    """Makes the namespace of the switches, as root or else as a user."""
    answers = []
    for make in (_AS_ROOT, _AS_USER) if os.geteuid() == 0 else (_AS_USER,):
        try:
            hub = _make_namespace(stack, make, owned=make is _AS_USER)
            hub.batch("ip", ["link add probe type bridge", "link delete probe"])
            return hub
        except PipelineError as error:
            answers.append(f"{' '.join(make)} answers {str(error)!r}")
    raise PipelineError(f"slow links need network namespaces: {'; '.join(answers)}; {_advise()}")


def _advise() -> str:
    """Returns what to run where namespaces are forbidden."""
    sysctls = []
    for name, (forbids, allows) in _SETTINGS.items():
        file = Path("/proc/sys", *name.split("."))
        if file.exists() and file.read_text(encoding="ascii").strip() == forbids:
            sysctls.append(f"sudo sysctl -w {name}={allows}")
    container = "in a container, start it with --privileged"
    if os.geteuid() == 0:
        return container
    return f"run it with sudo{''.join(f', or allow it to users: {sysctl}' for sysctl in sysctls)}; {container}"


def _make_namespace(stack: ExitStack, make: Sequence[str], *, owned: bool) -> _Namespace:
    """Makes a namespace that ends with this process."""
    process = subprocess.Popen(
        (*make, "sh", "-c", "echo; exec cat"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the workers, which need the links until they end
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    stack.enter_context(process)  # which closes the pipes and waits
    if not process.stdout.readline():
        raise PipelineError(process.stderr.read().decode(errors="replace").strip())
    return _Namespace(process.pid, owned)


def _join_namespaces(hub: _Namespace, namespaces: Sequence[_Namespace], widths: Sequence[int]) -> Network:
    """Joins the hosts by switches, one for each group of each level; all switches are in the hub."""
    up = f"mtu {_PACKET_BYTES} up"
    counts = [prod(widths[level:]) for level in range(len(widths) + 1)]  # components of each level, and the switch
    lines = [
        line
        for level, count in enumerate(counts[1:])
        for number in range(count)
        for line in (f"link add switch{level}.{number} type bridge", f"link set switch{level}.{number} {up}")
    ]
    ports: dict[tuple[int, int], tuple[_End, _End]] = {}
    switches: dict[tuple[int, int], str] = {}
    hosts = []
    for level, count in enumerate(counts[:-1]):
        for number in range(count):
            switch, port, other = f"switch{level}.{number // widths[level]}", f"port{level}.{number}", LINK
            place = f"netns {namespaces[number].pid} "
            if level:
                place, other = "", f"up{level}.{number}"
            lines += [f"link add {other} {place}type veth peer name {port}", f"link set {port} master {switch} {up}"]
            if level:
                lines.append(f"link set {other} master switch{level - 1}.{number} {up}")
            switches[level, number] = switch
            ports[level, number] = (hub if level else namespaces[number], other), (hub, port)
    hub.batch("ip", lines)
    if len(namespaces) > 2:
        up += f" gso_max_size {_PACKET_BYTES}"  # a queue lets a packet through whole, so they should not be joined
    for number, namespace in enumerate(namespaces):
        address = f"10.84.{(number + 1) // 256}.{(number + 1) % 256}"
        namespace.batch("ip", ["link set lo up", f"address add {address}/16 dev {LINK}", f"link set {LINK} {up}"])
        hosts.append(Host(address, namespace))
    network = Network(tuple(hosts), ports, switches)
    network._set_windows()
    return network
