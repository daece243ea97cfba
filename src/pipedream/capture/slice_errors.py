"""Errors of a slice's forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipedream.capture.placeholder import NumbersNeeded
from pipedream.capture.structure import walk_arguments
from pipedream.core.errors import CaptureError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.user_code import source_of, user_line


class CutFailed(CaptureError):
    """The forward cannot be cut before a call.

    Attributes:
        call: its name.
    """

    def __init__(self, call: str, text: str) -> None:
        super().__init__(text)
        self.call = call


class SliceErrors:
    """Says what went wrong in the forward of a slice, and what to do.

    Args:
        begin_at, stop_at: the first call of the slice, and of the next one.
    """

    def __init__(self, model: nn.Module, graph: LayerGraph, begin_at: str | None, stop_at: str | None) -> None:
        self._model = model
        self._graph = graph
        self._begin_at = begin_at
        self._stop_at = stop_at

    def other_path(self, call: str, difference: str, last_call: str) -> CutFailed:
        last = f" after the call of {last_call!r}" if last_call else ""
        return CutFailed(
            call,
            f"the forward of {self._locate_around(call)}, took another path than when the model was captured: "
            f"{difference}{last}. A branch on the data, on the mode (training or evaluation) or on random numbers "
            "decides so. Capture with a sample that takes the usual path, put the branch into one module, or do not "
            f"cut before {call!r}",
        )

    def _locate_around(self, call: str) -> str:
        """The model and the module inside it whose forwards lead to a call, with their places in the user's files."""
        start = next((each.start for each in self._graph.calls if each.name == call), 0)
        paths = [each.path for each in self._graph.calls if each.start < start < each.end]
        return ", or inside it that of ".join(map(self._locate, ["", *paths[-1:]]))

    def _locate(self, path: str) -> str:
        module = self._model.get_submodule(path)
        place = source_of(type(module).forward)
        return type(module).__name__ + f" {path!r}" * bool(path) + f" ({place})" * bool(place)

    def caught_leaving(self) -> CutFailed:
        call = self._stop_at or ""
        return CutFailed(
            call,
            f"a stage ends before the call of {call!r} by an exception, which the forward of "
            f"{self._locate_around(call)}, has caught: by a bare `except:`, `except BaseException`, or `return`, "
            f"`break` or `continue` in `finally`. Write `except Exception:` there, or do not cut before {call!r}",
        )

    def numbers_needed(self, error: NumbersNeeded, frame: str) -> NumbersNeeded:
        line, kind = user_line(error), type(self._model).__name__
        return NumbersNeeded(
            error.function,
            f"{line or 'the forward'} needs the numbers of a tensor that another stage computes and does not send "
            f"({error.function}, in the forward of {frame or kind!r}; {error.cause}). Put that line and the modules "
            f"that depend on it into one module, or cut elsewhere than before {self._begin_at!r}; if the sample takes "
            "another path, capture with one that takes this",
            error.cause,
        )

    def missing_input(self, path: str, value: Any, inputs: Any) -> CaptureError:
        args, kwargs = inputs
        names = [*map(str, range(len(args))), *map(repr, kwargs)]
        is_none = value is None and (path in kwargs or (path.isdigit() and int(path) < len(args)))
        what = "it is None in" if is_none else "it is missing in" if value is None else "it is not a tensor in"
        return CaptureError(
            f"a later stage of {self._locate('')} reads the input {path!r}, which was a tensor on the sample, but "
            f"{what} this batch (its inputs: {', '.join(names)}). Give it in each batch, or profile and plan with a "
            "sample without it"
        )

    def explain_unsent(self, what: str, inputs: Any) -> str:
        paths = (path for path, leaf in walk_arguments(*inputs) if isinstance(leaf, torch.Tensor))
        new = [path for path in paths if path not in self._graph.inputs]
        cause = (
            f"The sample lacked the input {new[0]!r}: profile and plan with a sample that has it"
            if new
            else "Either the forward takes another path, or it keeps a tensor of an earlier batch on a module. Capture "
            "with a sample and a mode that take this path, or put the modules that depend on this into one"
        )
        return (
            f"{what} of {self._locate('')} depends on a tensor that another stage has and does not send, because on "
            f"the sample it did not depend on it. {cause}"
        )
