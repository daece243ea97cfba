"""Errors of models that cannot be captured, and of a slice's forward."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from pipedream.capture.placeholder import NumbersNeeded
from pipedream.capture.structure import find_prefix, walk_arguments
from pipedream.core.errors import CaptureError, parameter_hooked
from pipedream.core.model.graph import Value
from pipedream.core.user_code import note_module, source_of, user_line, with_place

if TYPE_CHECKING:
    from pipedream.capture.slice import ModelSlice

_DISTRIBUTED = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")


class CutFailed(CaptureError):
    """The forward cannot be cut before a call, whose name is `call`."""

    def __init__(self, call: str, text: str) -> None:
        super().__init__(text)
        self.call = call


class SliceErrors:
    """Says what went wrong in the forward of a slice, and what to do."""

    def __init__(self, part: ModelSlice) -> None:
        self._part = part

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
        calls = self._part.graph.calls
        start = next((record.start for record in calls if record.name == call), 0)
        paths = [record.path for record in calls if record.start < start < record.end]
        return ", or inside it that of ".join(map(self._locate, ["", *paths[-1:]]))

    def _locate(self, path: str) -> str:
        module = self._part.model.get_submodule(path)
        place = source_of(type(module).forward)
        return type(module).__name__ + f" {path!r}" * bool(path) + f" ({place})" * bool(place)

    def caught_leaving(self) -> CutFailed:
        call = self._part.stop_at or ""
        return CutFailed(
            call,
            f"a stage ends before the call of {call!r} by an exception, which the forward of "
            f"{self._locate_around(call)}, has caught: by a bare `except:`, `except BaseException`, or `return`, "
            f"`break` or `continue` in `finally`. Write `except Exception:` there, or do not cut before {call!r}",
        )

    def numbers_needed(self, error: NumbersNeeded, frame: str) -> NumbersNeeded:
        line, kind, begin_at = user_line(error), type(self._part.model).__name__, self._part.begin_at
        operation = f"({error.function}, in the forward of {frame or kind!r}; {error.cause})"
        if error.needs:
            text = (
                f"{line or 'the forward'} needs the numbers of a tensor that another stage computes and does not send "
                f"{operation}. Cut elsewhere than before {begin_at!r}, or, in a forward of your own, put that "
                "line and the modules that depend on it into one module; if the sample takes another path, capture "
                "with one that takes this"
            )
        else:
            text = (
                f"{line or 'the forward'} failed on the stage that begins with {begin_at!r}, where tensors of "
                f"earlier stages have a shape, dtype and device, and no numbers {operation}. If the model alone runs "
                f"on this batch, that line is right: cut elsewhere than before {begin_at!r}"
            )
        return NumbersNeeded(error.function, text, error.cause, error.needs)

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
        return (
            f"{what} of {self._locate('')} depends on a tensor that another stage has and does not send, because on "
            f"the sample it did not depend on it. {self._explain_change(inputs)}"
        )

    def explain_two_tensors(self, value: Value, call: str, inputs: Any) -> str:
        return (
            f"in the forward of {self._locate('')} the call of {call!r} has another tensor than {value.name!r}, where "
            f"it had this one on the sample. {self._explain_change(inputs)}"
        )

    def _explain_change(self, inputs: Any) -> str:
        paths = (path for path, leaf in walk_arguments(*inputs) if isinstance(leaf, torch.Tensor))
        new = [path for path in paths if find_prefix(path, self._part.graph.inputs) is None]
        if new:
            return f"The sample lacked the input {new[0]!r}: profile and plan with a sample that has it"
        return (
            "Either the forward takes another path, or it keeps a tensor of an earlier batch on a module. Capture "
            "with a sample and a mode that take this path, or put the modules that depend on this into one"
        )


def check_module(model: Any) -> None:
    """Raises a CaptureError for what is no module."""
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type)
        what = f"the class {model.__name__}" if is_class else f"a {type(model).__name__}"
        advice = f"write {model.__name__}(...)" if is_class else "put it into the forward of a module"
        raise CaptureError(f"the model should be a torch.nn.Module, but {what} was given; {advice}")


def describe_surplus(model: nn.Module, arguments: Any) -> str:
    """Returns how many inputs a model takes, if there are more positional arguments; an empty text otherwise."""
    positional, most = inspect.Parameter.POSITIONAL_OR_KEYWORD, 0
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return ""
        most += parameter.kind <= positional
    if not isinstance(arguments, tuple) or len(arguments) <= most or model._forward_pre_hooks:
        return ""
    return f"{type(model).__name__} takes {most} input{'s' * (most != 1)}"


def check_model(model: nn.Module) -> None:
    """Raises a CaptureError for a model that cannot be looked into, or that another tool distributes."""
    check_module(model)
    for name, module in model.named_modules():
        where = f"the module {name!r}" if name else f"the model {type(model).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(f"{where} is a TorchScript module and cannot be looked into; pass the eager module")
        wrapper = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _DISTRIBUTED), None)
        if wrapper is not None:  # found by name: torch.distributed.fsdp takes long to import
            how = "sharded by fully_shard (an FSDPModule)" if wrapper == "FSDPModule" else f"wrapped in {wrapper}"
            raise CaptureError(
                f"{where} is {how}, which would synchronise by itself; pass the plain module: the plan decides "
                "which stages are replicated"
            )
    if is_compiled(model):
        raise CaptureError(
            f"the model {type(model).__name__} is compiled as a whole and cannot be looked into; pass the module "
            "before torch.compile, and compile=True to compile what lies within a stage"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(f"parameter {name!r} has no shape yet (a lazy module); run the model once before")
        if tensor.requires_grad and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
            raise parameter_hooked(name)


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module was compiled in place, or is what torch.compile returned."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def explain_failure(model: nn.Module, inputs: Any, training: bool, error: Exception) -> CaptureError:
    """Returns the error to raise when the forward raised one on the sample."""
    if surplus := describe_surplus(model, inputs):
        return CaptureError(
            f"{surplus}, but the sample has {len(inputs)}; if the last is the target, give the sample without it"
        )
    advice = (
        "it depends on the value of a tensor, and here tensors have none: profile it on a device that computes"
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
        else "give a sample of the shape, dtype and device that it takes"
    )
    note_module(error, model.named_modules())
    return CaptureError(
        f"the forward of {type(model).__name__} should run on the sample, but in "
        f"{'training' if training else 'evaluation'} mode it raised {with_place(error)}; {advice}"
    )
