"""Where the names of earlier versions are now, for errors about users' files (methods and recipes)."""

from __future__ import annotations

import re

__all__ = ["moved_import"]

_SYNCHRONOUS = [
    "breadth_first",
    "chimera",
    "chimera_doubled",
    "dualpipev",
    "gpipe",
    "interleaved",
    "naive",
    "one_f_one_b",
    "zb_h1",
    "zb_h2",
    "zbv",
]
_ASYNCHRONOUS = [
    "compensated",
    "paci",
    "pb_lwp",
    "pipedream",
    "pipelined_backprop",
    "pipemare",
    "pipeoptim",
    "spectrain",
    "timeprest",
    "two_bw",
    "xpipe",
]

_MODULES = {
    **dict.fromkeys(
        [
            f"core.{name}"
            for name in ["op", "placement", "plan", "schedule", "stage", "update", "views", "weights", "tagged"]
        ],
        "schedules",
    ),
    "core.cluster": "core.hardware.cluster",
    "core.compensation": "core.schedule.compensation",
    "core.depth": "core.plan.depth",
    "core.devices": "core.hardware.devices",
    "core.graph": "core.model.graph",
    "core.phase": "core.schedule.phase",
    "core.presets": "core.hardware.presets",
    "core.profile": "core.model.profile",
    "core.program": "core.schedule.program",
    "core.timeline": "core.schedule.timeline",
    "lowering": "core.schedule.lowering",
    "schedules.idioms": "schedules",
    "schedules.layouts": "schedules",
    "schedules.method": "schedules",
    "schedules.method_file": "schedules.user_file",
    "schedules.torch_csv": "schedules",
    "training": "training.train",
    **{f"schedules.{name}": f"schedules.synchronous.{name}" for name in _SYNCHRONOUS},
    **{f"schedules.{name}": f"schedules.asynchronous.{name}" for name in _ASYNCHRONOUS},
    "schedules.roundpipe": "experimental.roundpipe",
    "schedules.timeprest_interpolated": "experimental.timeprest_interpolated",
}
"""Old module -> the module to import from now, both below `pipedream`."""

_NAMES = {
    "Seat": "StageReplica",
    "Turns": "MicrobatchProgress",
    "View": "WeightPrediction",
    "Tagged": "Stamped",
    "admitted": "max_in_flight",
    "check_handing": "check_input_replicas",
    "endless": "all_microbatches",
    "flushed": "each_minibatch",
    "latest": "latest_weights",
    "recomputing": "with_backward_rule",
    "refuse_split": "refuse_microbatches",
    "share_out": "choose_microbatches",
    "smallest": "properties_of",
}
"""Old name -> new name."""

_NAME = re.compile(r"cannot import name '(\w+)'")


def moved_import(error: BaseException) -> str:
    """Returns what to write instead of an import of something that has moved; '' for any other error."""
    if not isinstance(error, ImportError) or not (error.name or "").startswith("pipedream."):
        return ""
    module = str(error.name).removeprefix("pipedream.")
    found = _NAME.match(str(error))
    old = found[1] if found else None
    new = _NAMES.get(old) if old else None
    if module not in _MODULES and new is None:
        return ""
    here = f"pipedream.{_MODULES.get(module, module)}"
    if old is None:
        return f"pipedream.{module} has moved: import the same names from {here}"
    renamed = f" ({old} is now {new})" if new else ""
    return f"write 'from {here} import {new or old}'{renamed}"
