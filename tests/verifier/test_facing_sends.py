"""Large sends over NCCL that face each other, while both hosts could be in a wait for their GPUs.

A large send ends once the other host has read its header. If two ranks have such a send for each other, and each is in
an op that waits for its whole device (an allocation that frees memory, the first use of a kernel, the user's own
`torch.cuda.synchronize`), both wait for ever.
"""

from collections import defaultdict
from itertools import combinations
from pathlib import Path

import pytest
from programs import program_of

import pipedream as pd
from pipedream.verifier.unrolled import Unrolled, unroll

Passes = list[tuple[int, int]]
"""(position of the send at its rank, position at the other one that reads its header) of the messages of a link."""


def _list_links(run: Unrolled) -> dict[tuple[int, int], Passes]:
    """Returns the messages of each link, (sender, receiver), in the order of their sends."""
    links: dict[tuple[int, int], Passes] = defaultdict(list)
    for message, sent in sorted(run.sent.items(), key=lambda item: item[1]):
        channel = run.program.channels[message[0]]
        links[channel.sender, channel.receiver].append((sent, run.received[message]))
    for passes in links.values():  # whoever reads a later header has read the earlier ones
        for at in range(len(passes) - 2, -1, -1):
            passes[at] = passes[at][0], min(passes[at][1], passes[at + 1][1])
    return links


def _count_facing(run: Unrolled) -> int:
    """Counts pairs of moments of two ranks, each in an op, at which each has a send that the other has not read."""
    links, count = _list_links(run), 0
    for a, b in combinations(range(len(run.streams)), 2):
        there, back = links.get((a, b), []), links.get((b, a), [])
        moments = [
            [at for at, instruction in enumerate(run.streams[rank]) if isinstance(instruction, pd.schedules.Op)]
            for rank in (a, b)
        ]
        for i in moments[0]:
            for j in moments[1]:
                came = all(sent < i for sent, read in there if read < j)
                came = came and all(sent < j for sent, read in back if read < i)
                outstanding = any(sent < i and read > j for sent, read in there)
                count += came and outstanding and any(sent < j and read > i for sent, read in back)
    return count


NEVER = ("1f1b", "gpipe", "zb_h1", "pipedream", "pipedream_2bw", "spectrain", "xpipe", "pipeoptim", "paci")


def _count(name: str, workers: int) -> int:
    splits = pd.schedules.build(name, pd.schedules.uniform(name, workers), None).microbatches > 1
    program = program_of(name, pd.schedules.uniform(name, workers), 2 * workers if splits else None)
    return _count_facing(unroll(program, 4 * max(4, program.microbatches)))


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("name", NEVER)
def test_methods_whose_sends_never_face_each_other(name: str, workers: int) -> None:
    assert _count(name, workers) == 0


@pytest.mark.parametrize(
    ("name", "workers"),
    [("interleaved_1f1b", 2), ("zb_h2", 4), ("zbv", 2), ("dualpipev", 2), ("pipemare", 2), ("roundpipe", 2)],
)
def test_methods_whose_sends_do(name: str, workers: int) -> None:
    assert _count(name, workers) > 0


def test_docs_name_the_methods_that_may_wait_for_their_gpus() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8").split())
    names = ", ".join(f"`{name}`" for name in NEVER[:-1])
    assert f"Only with {names} or `{NEVER[-1]}` may the loop wait" in text
