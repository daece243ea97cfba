"""What everything that runs on a rank under one program shares."""

from dataclasses import dataclass

import torch

from pipedream.core.schedule.program import Program
from pipedream.runtime.activity import Activity
from pipedream.runtime.mailbox import Mailbox
from pipedream.runtime.recorder import Recorder
from pipedream.runtime.results import Results


@dataclass(frozen=True)
class RankContext:
    """One rank under one program.

    Attributes:
        process: this rank among all ranks of the job, for errors.
        program: that trains; verified.
    """

    rank: int
    process: int
    program: Program
    device: torch.device
    mailbox: Mailbox
    results: Results
    recorder: Recorder
    activity: Activity
