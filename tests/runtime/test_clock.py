"""The clock of one process: workers by turns, those of the input stage in step."""

from collections.abc import Generator
from typing import Any

import pytest
import torch

import pipedream as pd
from pipedream.runtime.comm import channel as links, message as wire
from pipedream.runtime.session.streams import run_in_process


def waited(pending: links.Pending[Any]) -> Generator[Any, None, Any]:
    if not pending.ready():
        yield pending
    return pending.result()


def test_workers_of_the_input_stage_do_not_run_ahead_of_the_lead() -> None:
    admitted = {0: -1, 1: -1}
    group = links.LocalGroup(2)
    there, further, nearer, back = (links.LocalChannel() for _ in range(4))

    def worker(rank: int) -> Generator[Any, None, None]:
        member = group.member(rank)
        for number in range(5):
            admitted[rank] = number
            yield from waited(member.all_reduce(torch.zeros(1)))
            if rank == 0:  # the lead has to wait for several turns, the other one has not
                there.send(wire.Message(number))
                yield from waited(back.receive())
            yield number

    def relay(source: links.LocalChannel, target: links.LocalChannel) -> Generator[Any, None, None]:
        for _ in range(5):
            target.send((yield from waited(source.receive())))

    # Each message goes by the workers in the order in which they do not have their turns.
    workers = [worker(0), worker(1), relay(nearer, back), relay(further, nearer), relay(there, further)]
    for number in run_in_process(workers, [0, 1]):
        assert admitted == {0: number, 1: number}, "else what the loop asks for now finds it further on"


def test_workers_that_wait_for_each_other_are_named() -> None:
    def waits() -> Generator[Any, None, None]:
        yield links.LocalChannel().receive()

    with pytest.raises(pd.PipelineError, match=r"workers \[0, 1\] wait for each other"):
        list(run_in_process([waits(), waits()], [0]))
