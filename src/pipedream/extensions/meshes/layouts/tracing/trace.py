"""Describes a model's training step: traces forward, backward and update, and lists torch's operators as text."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pipedream.core.errors import PlanError
from pipedream.core.user_code import split_arguments
from pipedream.extensions.meshes.layouts.description.operators import DescribedStep, Operators
from pipedream.extensions.meshes.layouts.description.text import Operator, rename_tensors
from pipedream.extensions.meshes.layouts.tracing.forward import (
    Callers,
    disable_fused_operators,
    list_decompositions,
    swap_tensors,
)
from pipedream.extensions.meshes.layouts.tracing.registry import REGISTRY, compare_operands, find_contradiction
from pipedream.extensions.meshes.layouts.tracing.rules import CONSTANT, DRAWN, Description, OperatorCall, yield_operands
from pipedream.extensions.meshes.sharding.local_rules import bind_arguments
from pipedream.tensors.elementwise import steps_each_element

_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
"""Operators that return their operand; autograd calls it for each tensor that it keeps."""

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers that a tensor decides."""

_Stepping = tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]
"""An optimizer, and its weights without data."""

Optimizer = Callable[[list[tuple[str, Any]]], torch.optim.Optimizer]


def operators(
    model: nn.Module, sample: Any, *, loss: Callable[[Any], Any] | None = None, optimizer: Optimizer | None = None
) -> Operators:
    """Describes one training step of a model: forward, backward and update.

    Parameters are named as `p_0_weight`, `s_0_weight_...` is the optimizer's state and `new_0_weight` what both become;
    buffers are `b_...`, inputs `x0`. Other tensors have the name of the operator that computes them.

    Args:
        sample: one minibatch: the model's only input, a tuple of positional or a mapping of keyword arguments.
        loss: from the model's output to a scalar; without it the gradients of the outputs are inputs, `d0`.
        optimizer: factory from named parameters to an optimizer that steps each element by itself.

    Raises:
        PlanError: an operator without a description, or an optimizer that needs whole weights.
    """
    return trace(model, sample, loss=loss, optimizer=optimizer).operators


def describe_step(
    model: nn.Module,
    sample: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Optimizer | None = None,
    batch_dim: int = 0,
) -> DescribedStep:
    """Describes a step as `operators` does, in the dtypes of the model; all lines share the names of indices.

    `batch_dim` is the dimension of the first input that counts the samples.
    """
    step = trace(model, sample, loss=loss, optimizer=optimizer)
    shared = step.operators.with_shared_names()
    names = shared.named.stored_names[step.inputs[0]] if step.inputs else ()
    batch = names[batch_dim] if batch_dim < len(names) else None
    return DescribedStep(shared, {name: dtype.itemsize for name, dtype in step.dtypes.items()}, batch or "")


@dataclass(frozen=True)
class DescribedCall:
    """A line of the text as a call.

    Attributes:
        call: the call, on tensors without data.
        tensors: argument -> tensor; those of a list have a number after the argument's name.
        step: the line with the schema's names.
    """

    call: OperatorCall
    tensors: Mapping[str, str]
    step: Operator
    description: Description


@dataclass(frozen=True)
class TracedStep:
    """A training step as operators, which can be run.

    Attributes:
        calls: calls of forward and backward, each the line of the same number of `operators.text`; updates follow.
        parameters, buffers: name in the model -> tensor.
        gradients: name in the model -> tensor.
        updated: name of a buffer -> tensor after the step.
        inputs: the tensors of the sample, in the order of its leaves.
        outputs: outputs of the model, or the loss.
        tangents: gradients of the outputs, where there is no loss.
        input_gradients: gradients of the floating-point inputs, where there is no loss.
        constants: tensor -> a function that makes it.
        drawn: constants that are random numbers, in the order in which they are drawn.
    """

    operators: Operators
    calls: tuple[DescribedCall, ...]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    gradients: Mapping[str, str]
    updated: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tangents: tuple[str, ...]
    input_gradients: tuple[str, ...]
    constants: Mapping[str, Callable[[], torch.Tensor]]
    drawn: tuple[str, ...]
    dtypes: Mapping[str, torch.dtype]


def trace(
    model: nn.Module, sample: Any, *, loss: Callable[[Any], Any] | None = None, optimizer: Optimizer | None = None
) -> TracedStep:
    """Traces a step; see `operators`."""
    return _Tracing(model, sample, loss).trace(optimizer)


class _Tracing:
    def __init__(self, model: nn.Module, sample: Any, loss: Callable[[Any], Any] | None) -> None:
        self.model, self.sample, self.loss = model, sample, loss
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._frozen = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
        self._buffers = dict(model.named_buffers())
        self._leaves = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, torch.Tensor)]
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._name: dict[fx.Node, str] = {}
        self._lines: list[str] = []
        self._calls: list[DescribedCall] = []
        self._constants: dict[str, Callable[[], torch.Tensor]] = {}
        self._drawn: list[str] = []
        self._checked: set[str] = set()
        self._output_count = 0

    def trace(self, optimizer: Optimizer | None) -> TracedStep:
        trained, buffers = self._trained, self._buffers
        stepping = None if optimizer is None or not trained else _prepare_optimizer(optimizer, trained)
        graph = self._trace_graph()
        nodes = iter(node for node in graph.graph.nodes if node.op == "placeholder")
        parameters = {name: self._name_node(next(nodes), f"p_{name}") for name in (*trained, *self._frozen)}
        buffer_tensors = {name: self._name_node(next(nodes), f"b_{name}") for name in buffers}
        inputs = tuple(self._name_node(next(nodes), f"x{at}") for at in range(len(self._leaves)))
        tangents = tuple(self._name_node(node, f"d{at}") for at, node in enumerate(nodes))
        for node in graph.graph.nodes:
            self._add(graph, node)
        results = iter(self._name[node] for node in tree_leaves(next(iter(reversed(graph.graph.nodes))).args[0]))
        output_names = tuple(next(results) for _ in range(self._output_count))
        gradients = {name: next(results) for name in trained}
        updated = {name: next(results) for name in buffers}
        alike: list[tuple[str, ...]] = [(parameters[name], gradients[name]) for name in trained]
        alike += [(buffer_tensors[name], updated[name]) for name in buffers if buffer_tensors[name] != updated[name]]
        self._add_updates(stepping, alike)
        return TracedStep(
            operators=Operators(self._shapes, "\n".join(self._lines), tuple(alike)),
            calls=tuple(self._calls),
            parameters=parameters,
            buffers=buffer_tensors,
            gradients=gradients,
            updated=updated,
            inputs=inputs,
            outputs=output_names,
            tangents=tangents,
            input_gradients=tuple(results),
            constants=self._constants,
            drawn=tuple(self._drawn),
            dtypes=self._dtypes,
        )

    def _trace_graph(self) -> fx.GraphModule:
        """Returns forward and backward."""
        tangents = [] if self.loss is not None else [torch.ones_like(output) for output in self._run_forward()]
        example = dict(self._trained), dict(self._frozen), dict(self._buffers), list(self._leaves), tangents
        fake: Any = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}

        def step(parameters: Any, fixed: Any, buffers: Any, inputs: Any, tangents: Any) -> Any:  # make_fx counts `self`
            return self._run_step(parameters, fixed, buffers, inputs, tangents)

        try:
            with disable_fused_operators(), self._choose_device(), torch.enable_grad():
                graph = make_fx(step, **fake)(*example)
        except GuardOnDataDependentSymNode:
            raise _refuse_data_dependence("a branch") from None
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            sizes = value.shape if isinstance(value, torch.Tensor) else [value]
            if any(isinstance(size, _SYMBOLS) for size in sizes):
                raise _refuse_data_dependence(f"{self._locate(node.target)} calls {node.target}, whose result")
        # A second time, for autograd does not go with functionalize.
        pure = torch.func.functionalize(graph, remove="mutations")
        graph = make_fx(pure, decomposition_table=list_decompositions(), **fake)(*example)
        graph.graph.eliminate_dead_code()
        return graph

    def _run_step(
        self,
        parameters: dict[str, torch.Tensor],
        fixed: dict[str, torch.Tensor],
        buffers: dict[str, torch.Tensor],
        inputs: list[torch.Tensor],
        tangents: list[torch.Tensor],
    ) -> Any:
        """Returns outputs, gradients of parameters, buffers, and gradients of inputs where there is no loss."""
        weights = {name: weight.detach().requires_grad_() for name, weight in parameters.items()}
        entering = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
        changed = {name: buffer.clone() for name, buffer in buffers.items()}
        tensors = iter(entering)
        leaves, structure = tree_flatten(self.sample)
        filled = [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        arguments, named = split_arguments(tree_unflatten(filled, structure))
        with swap_tensors(self.model, {**weights, **fixed, **changed}):
            value = self.model(*arguments, **named)
        value = value if self.loss is None else self.loss(value)
        outputs = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        sources = [*weights.values()]
        sources += [tensor for tensor in entering if tensor.requires_grad and self.loss is None]
        output_gradients = tangents or [torch.ones_like(output) for output in outputs]
        ends = [at for at, output in enumerate(outputs) if output.requires_grad]
        gradients = tuple(torch.zeros_like(source) for source in sources)
        if sources and ends:
            gradients = torch.autograd.grad(
                [outputs[at] for at in ends],
                sources,
                [output_gradients[at] for at in ends],
                allow_unused=True,
                materialize_grads=True,
            )
        self._output_count = len(outputs)
        return outputs, gradients[: len(weights)], list(changed.values()), gradients[len(weights) :]

    def _run_forward(self) -> list[torch.Tensor]:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self._choose_device():
            buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            arguments, named = split_arguments(self.sample)
            with swap_tensors(self.model, buffers):
                value = self.model(*arguments, **named)
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

    def _choose_device(self) -> AbstractContextManager[object]:
        """Context in which a model on the meta device makes its other tensors there."""
        is_meta = any(parameter.is_meta for parameter in self.model.parameters())
        return torch.device("meta") if is_meta else nullcontext()

    def _name_node(self, node: fx.Node, name: str) -> str:
        return self._add_tensor(name.replace(".", "_"), node.meta["val"], node)

    def _add_tensor(self, name: str, value: torch.Tensor, node: fx.Node | None = None) -> str:
        while name in self._shapes:
            name += "_"
        self._shapes[name] = tuple(value.shape)
        self._dtypes[name] = value.dtype
        if node is not None:
            self._name[node] = name
        return name

    def _add(self, graph: fx.GraphModule, node: fx.Node) -> None:
        """Adds a line for a call, or a tensor for a constant."""
        value = node.meta.get("val")
        if node.op == "get_attr":
            constant = getattr(graph, str(node.target))
            self._constants[self._add_tensor(node.name, constant, node)] = lambda: constant
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            return  # several results, which are taken one by one
        called: fx.Node = node
        item: int | None = None
        if getattr(node.target, "__name__", "") == "getitem":
            called, item = cast(tuple[fx.Node, int], node.args)
        function: Any = called.target
        if function in _SAME:
            self._name[node] = self._name[cast(fx.Node, called.args[0])]
            return
        bound = bind_arguments(function, called.args, called.kwargs)
        read = {operand: self._name[operand] for _, operand in yield_operands(bound, fx.Node)}
        constants = {operand: self._constants[name] for operand, name in read.items() if name in self._constants}
        follows = constants and len(constants) == len(read) and not set(self._drawn).intersection(read.values())
        if function in CONSTANT or function in DRAWN or follows:
            name = self._add_tensor(node.name, value, node)
            self._constants[name] = partial(_make_constant, function, bound, constants, item)
            self._drawn += [name] if function in DRAWN else []
            return
        values = {key: fx.node.map_arg(argument, lambda arg: arg.meta["val"]) for key, argument in bound.items()}
        self._add_call(node, OperatorCall(function, item, values, value), bound)

    def _add_call(self, node: fx.Node, call: OperatorCall, bound: Mapping[str, Any]) -> None:
        description = REGISTRY.find(call)
        if description is None:
            raise PlanError(_explain_refusal(call.function, self._locate(call.function)))
        if REGISTRY.is_added(call.function):
            self._check(call, description)
        named = f" {call.function._schema.name.split('::')[-1].strip('_')}("
        text = description.spell(call).replace(" f(", named, 1)
        tensors = {key: self._name[operand] for key, operand in yield_operands(bound, fx.Node)}
        name = self._add_tensor(node.name, call.out, node)
        self._lines.append(rename_tensors(text, tensors | {"out": name}))
        (step,) = Operators(call.shapes, text).steps
        self._calls.append(DescribedCall(call, tensors, step, description))

    def _check(self, call: OperatorCall, description: Description) -> None:
        text = description.spell(call)
        if wrong := compare_operands(call, text):
            raise PlanError(
                f"{call.function} was described as {text!r}, but {wrong}; write all of its tensors, "
                f"{', '.join(call.tensors())}, and its result as out"
            )
        others = {name: value for name, value in call.values.items() if not isinstance(value, torch.Tensor)}
        key = f"{call.function} {text} {[(tensor.shape, tensor.dtype) for tensor in call.tensors().values()]} {others}"
        if key not in self._checked and (index := find_contradiction(call, description)):
            raise PlanError(
                f"{call.function} was described as {text!r}, but on random numbers its parts along "
                f"{index!r} do not make the whole; write : for a dimension that it needs whole"
            )
        self._checked.add(key)

    def _locate(self, function: Any) -> str:
        """Returns which layer calls an operator, in words."""
        with Callers(self.model, function) as callers:
            self._run_forward()
        if callers.innermost is None:
            return "the step, in its backward or loss,"
        return f"the layer {callers.innermost!r}" if callers.innermost else "the model's own forward"

    def _add_updates(self, stepping: _Stepping | None, alike: list[tuple[str, ...]]) -> None:
        """Adds a line for each updated weight and each state of the optimizer."""
        if stepping is None:
            return
        optimizer, empty = stepping
        for parameter in empty.values():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        for at, (name, parameter) in enumerate(empty.items()):
            weight, gradient = alike[at]
            states = [
                self._add_tensor(f"s_{name}_{key}".replace(".", "_"), value)
                for key, value in optimizer.state.get(parameter, {}).items()
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
            ]
            letters = ", ".join("abcdefgh"[: parameter.dim()])
            read = ", ".join(f"{tensor}[{letters}]" for tensor in (weight, gradient, *states))
            results = [self._add_tensor(f"new_{tensor[2:]}", parameter) for tensor in (weight, *states)]
            self._lines += [f"{result}[{letters}] = step({read})" for result in results]
            alike[at] = (weight, gradient, *states, *results)


def _prepare_optimizer(optimizer: Optimizer, trained: Mapping[str, torch.Tensor]) -> _Stepping:
    empty = {name: nn.Parameter(torch.empty_like(weight, device="meta")) for name, weight in trained.items()}
    built = optimizer(list(empty.items()))
    if not steps_each_element(built):
        raise PlanError(
            f"the optimizer {type(built).__name__} needs whole weights, so that its step has no description; use "
            "one that steps each element by itself, such as SGD or Adam, or describe the model without an optimizer"
        )
    return built, empty


def _explain_refusal(function: Any, where: str) -> str:
    """Returns why an operator cannot be divided, and what to do."""
    if torch.Tag.nondeterministic_seeded in function.tags:
        return (
            f"{where} calls {function}, which draws random numbers, so that its parts are not those of one process; "
            "describe the model without it, or use a layout by hand"
        )
    return (
        f"{where} calls {function}, which has no description; write one, such as "
        f"pipedream.register_operator(torch.ops.{function}, 'out[i, j] = f(self[i, j])')"
    )


def _refuse_data_dependence(what: str) -> PlanError:
    return PlanError(
        f"{what} depends on the numbers of a tensor, so that the operators differ from step to step and cannot be "
        "described; compute with tensors of fixed sizes, as torch.where does, or use a layout by hand"
    )


def _make_constant(
    function: Any, bound: Mapping[str, Any], constants: Mapping[fx.Node, Callable[[], torch.Tensor]], item: int | None
) -> torch.Tensor:
    """Calls what depends on sizes and other constants alone; other tensors give size, dtype and device."""

    def like(node: fx.Node) -> torch.Tensor:
        value: torch.Tensor = node.meta["val"]
        return (
            constants[node]() if node in constants else torch.empty(value.shape, dtype=value.dtype, device=value.device)
        )

    filled = fx.node.map_arg(dict(bound), like)
    result = function(**filled)
    return result if item is None else result[item]  # type: ignore[no-any-return]
