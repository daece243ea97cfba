"""Deltas: of a sample that was seen before, a stage sends the encoded difference to what arrived at its last visit.

AQ-SGD (Wang et al., NeurIPS 2022, arXiv 2206.01299), algorithm 1. With a(x) the activation of sample x at a cut, and
m(x) what both ends of the cut keep, the next stage computes with m(x):

    first visit     m(x) = decode(encode(a(x)))                 by the encoding of messages
    later visits    m(x) = m(x) + decode(encode(a(x) - m(x)))   by the encoding of deltas

As weights converge, differences shrink, and with them the error of few bits. A sample is known by its content: the
first stage hashes the model's input, and these keys travel with the activations.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch.nn.modules.dropout import _DropoutNd

from pipedream.core.box import dense_strides
from pipedream.core.errors import ScheduleError
from pipedream.core.plan.codec import CODECS, FULL, MIN_ENCODED_BYTES, is_smaller
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.message import Message, dimension_order
from pipedream.runtime.stage.part import ForwardFunction, PassFacts, StageFacts, StagePart
from pipedream.runtime.stage.stage_module import SavedForward

_MARK = "^"  # begins neither a structure of `values`, nor one with crossings or encoded tensors


class _Header(NamedTuple):
    """What a code lacks of its tensor.

    Attributes:
        is_encoded: otherwise values travel as they are, as messages do that have no gradient or are small.
        new_bytes: of the code of samples that are new. Before it are the keys, after it the code of differences.
        old_samples: how many have a difference.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_encoded: bool
    new_bytes: int = 0
    old_samples: int = 0


class CutEnd:
    """What one end of a cut keeps: of each sample its tensors there, as they arrived last.

    Args:
        request: what was asked for, for errors.
        capacity: most samples.
        of_new, of_deltas: names of encodings.
    """

    def __init__(self, request: str, capacity: int, of_new: str, of_deltas: str) -> None:
        self._request, self._capacity = request, capacity
        self._of_new, self._of_deltas = of_new, of_deltas
        self._kept: defaultdict[int, dict[int, torch.Tensor]] = defaultdict(dict)  # key -> tensor's index -> uint8[n]

    def encode(self, message: Message, keys: Sequence[int]) -> Message:
        """Returns a message with codes; keeps what `decode` will make of them.

        Raises:
            RuntimeError: no tensor has a row for each sample, or more samples than were announced have come.
        """
        tensors = list(message.tensors)
        pairs = zip(message.tensors, message.wants, strict=True)
        headers = [_find_header(tensor, len(keys), wants) for tensor, wants in pairs]
        for i, (tensor, header) in enumerate(zip(message.tensors, headers, strict=True)):
            if tensor is None or header is None:
                continue
            values, (is_old, old) = tensor.detach(), self._recall(keys, i, header)
            new_code = _encode(values[~is_old], self._choose_first(header))
            code = _encode(values[is_old] - old.to(values.device), self._of_deltas)
            headers[i] = header = header._replace(new_bytes=len(new_code), old_samples=len(old))
            tensors[i] = torch.cat([_view_bytes(torch.tensor(keys)).to(values.device), new_code, code])
            self._keep(keys, i, header, self._decode_values(header, new_code, code, is_old, old))
        if not any(headers):
            raise RuntimeError(
                f"{self._request} was asked for, but no floating-point tensor at a cut has a row for each of "
                f"{len(keys)} samples; leave deltas out, or cut elsewhere"
            )
        return message.with_tensors(
            _mark(message.structure, tuple(headers)), tuple(tensors), message.wants, message.version
        )

    def decode(self, message: Message) -> tuple[Message, list[int]]:
        """Returns the message as it arrives, and the keys of its samples.

        Raises:
            RuntimeError: the two ends keep different samples.
        """
        headers, structure = _read_mark(message.structure)
        tensors, keys = list(message.tensors), list[int]()
        for i, (tensor, header) in enumerate(zip(message.tensors, headers, strict=True)):
            if tensor is None or header is None:
                continue
            keys = tensor[: 8 * header.shape[0]].cpu().view(torch.int64).tolist()
            codes = tensor[8 * header.shape[0] :]
            new_code, code = codes[: header.new_bytes], codes[header.new_bytes :]
            is_old, old = self._recall(keys, i, header)
            if len(old) != header.old_samples:
                raise RuntimeError(
                    f"{self._request} was asked for, but the sender keeps {header.old_samples} of these samples, the "
                    f"receiver {len(old)}; resume from a checkpoint"
                )
            values = self._decode_values(header, new_code, code, is_old, old)
            self._keep(keys, i, header, values)
            dense = torch.empty_strided(header.shape, header.strides, dtype=values.dtype, device=values.device)
            tensors[i] = dense.copy_(values)
        return message.with_tensors(structure, tuple(tensors), message.wants, message.version), keys

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns what is kept: int64[n, 3] with key, index and bytes of each tensor, and their bytes, uint8."""
        rows = [(key, i, kept) for key, tensors in self._kept.items() for i, kept in tensors.items()]
        table = torch.tensor([(key, i, len(kept)) for key, i, kept in rows], dtype=torch.int64).view(-1, 3)
        return {"rows": table, "bytes": torch.cat([torch.empty(0, dtype=torch.uint8), *(kept for *_, kept in rows)])}

    def restore(self, rows: torch.Tensor | None, kept_bytes: torch.Tensor | None) -> None:
        """Keeps what `tensors` returned; nothing without it."""
        self._kept.clear()
        if rows is not None and kept_bytes is not None:
            begin = 0
            for key, i, size in rows.tolist():
                self._kept[key][i] = kept_bytes[begin : begin + size].clone()
                begin += size

    def _recall(self, keys: Sequence[int], i: int, header: _Header) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns which samples have a tensor of this form, bool[samples], and these tensors, one row for each."""
        dtype, row_shape = getattr(torch, header.dtype), header.shape[1:]
        row_bytes = torch.Size(row_shape).numel() * dtype.itemsize
        kept = [self._kept[key].get(i) if header.is_encoded and key in self._kept else None for key in keys]
        rows = [row for row in kept if row is not None and len(row) == row_bytes]
        is_old = torch.tensor([row is not None and len(row) == row_bytes for row in kept])
        old = torch.stack(rows).view(dtype) if rows else torch.empty(0, dtype=dtype)
        return is_old, old.view(len(rows), *row_shape)

    def _choose_first(self, header: _Header) -> str:
        return self._of_new if header.is_encoded else FULL

    def _keep(self, keys: Sequence[int], i: int, header: _Header, values: torch.Tensor) -> None:
        if not header.is_encoded:
            return
        rows = _view_rows(values)
        for key, row, is_finite in zip(keys, rows, values.flatten(1).isfinite().all(1).tolist(), strict=True):
            if is_finite:
                self._kept[key][i] = row.clone()  # a view would keep the whole batch
            else:  # after an overflow: a difference to it would never be finite again
                self._kept[key].pop(i, None)
        if len(self._kept) > self._capacity:
            raise RuntimeError(
                f"{self._request} was asked for, but more samples have come than that; give their number, or leave "
                "deltas out of data that is seen once or changes from epoch to epoch"
            )

    def _decode_values(
        self, header: _Header, new_code: torch.Tensor, code: torch.Tensor, is_old: torch.Tensor, old: torch.Tensor
    ) -> torch.Tensor:
        dtype, row_shape, device = old.dtype, header.shape[1:], code.device
        values = torch.empty(header.shape, dtype=dtype, device=device)
        new_shape = (header.shape[0] - header.old_samples, *row_shape)
        values[~is_old] = _decode(new_code, self._choose_first(header), dtype, new_shape)
        values[is_old] = old.to(device) + _decode(code, self._of_deltas, dtype, (header.old_samples, *row_shape))
        return values


class SampleDeltas(StagePart):
    """The ends of the cuts before and after a stage, whose neighbours are on other workers.

    Args:
        received, sent: None where nothing travels.
        keys_here: (stage, microbatch) -> keys for the next stage, if it is on this rank.
    """

    def __init__(
        self,
        facts: PassFacts,
        received: tuple[str, CutEnd] | None,
        sent: tuple[str, CutEnd] | None,
        keys_here: dict[tuple[int, int], list[int]],
        is_last: bool,
    ) -> None:
        self._stage, self._is_last, self._keys_here = facts.stage, is_last, keys_here
        self._received, self._sent = received, sent

    @classmethod
    def check(cls, facts: StageFacts, program: Program) -> None:
        choice = _read_choice(program)
        if not choice or facts.stage + 1 == program.placement.stages:
            return
        for name, layer in facts.module.layers:
            if any(map(_drops, layer.modules())):
                raise ScheduleError(
                    f"deltas={choice} was asked for, but {name!r} drops values at random, so a sample differs from "
                    "visit to visit; set its p to 0, or leave deltas out"
                )

    @classmethod
    def explain_difference(cls, program: Program, inputs: Sequence[Message]) -> str:
        if not _read_choice(program):
            return ""
        of_each = [set(_hash_samples(message)) for message in inputs]
        repeats = sum(map(len, of_each)) > len(set().union(*of_each))
        return "a sample occurs in two of its microbatches, and deltas send its difference" if repeats else ""

    @classmethod
    def make(cls, facts: PassFacts, program: Program) -> StagePart | None:
        choice, placement = _read_choice(program), program.placement
        if not choice:
            return None
        of_new = getattr(program.plan.choices.messages, "activations", FULL)

        def make_end(sender: int, place: str) -> tuple[str, CutEnd] | None:
            if not 0 <= sender < placement.stages - 1 or placement.ranks[sender] == placement.ranks[sender + 1]:
                return None
            # By the number of the layer after it: a plan with the same cut elsewhere continues with what is kept.
            name = f"deltas_{place}/{program.plan.stages[sender].last}"
            return name, CutEnd(f"deltas={choice}", choice.samples, of_new, choice.encoding)

        ends = make_end(facts.stage - 1, "received"), make_end(facts.stage, "sent")
        return cls(facts, *ends, facts.shared.setdefault(cls, {}), facts.stage + 1 == placement.stages)

    def begin(self) -> None:
        self._keys_here.clear()

    def run_forward(self, saved: SavedForward, message: Message, run: ForwardFunction) -> Message:
        if self._received is not None:
            message, keys = self._received[1].decode(message)
        elif self._stage == 0:
            keys = _hash_samples(message)
        else:
            keys = self._keys_here.pop((self._stage, saved.microbatch))
        result = run(message)
        if self._sent is not None:
            return self._sent[1].encode(result, keys)
        if not self._is_last:
            self._keys_here[self._stage + 1, saved.microbatch] = keys
        return result

    def tensors(self) -> dict[str, torch.Tensor]:
        ends = [end for end in (self._received, self._sent) if end is not None]
        return {f"{name}/{kind}": tensor for name, end in ends for kind, tensor in end.tensors().items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, end in (end for end in (self._received, self._sent) if end is not None):
            end.restore(tensors.get(f"{name}/rows"), tensors.get(f"{name}/bytes"))


def _read_choice(program: Program) -> Any:
    return program.plan.choices.named.get("deltas")


def _drops(module: torch.nn.Module) -> bool:
    """Returns whether a module is a dropout, or has the rate of one, as recurrent layers and attention do."""
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0)
    return isinstance(rate, int | float) and rate > 0


def _hash_samples(message: Message) -> list[int]:
    """Returns a key for each sample of the model's input, from its content."""
    hashes = [blake2b(digest_size=8) for _ in range(message.samples)]
    rows = [tensor for tensor in message.tensors if tensor is not None and tensor.shape[:1] == (message.samples,)]
    if not rows:
        raise RuntimeError(f"deltas were asked for, but no input has a row for each of {message.samples} samples")
    for tensor in rows:
        for sample, row in zip(hashes, _view_rows(tensor.detach().resolve_conj()).numpy(), strict=True):
            sample.update(row.data)
    return [int.from_bytes(sample.digest(), "little", signed=True) for sample in hashes]


def _find_header(tensor: torch.Tensor | None, samples: int, wants: bool) -> _Header | None:
    """Returns the header of a floating-point tensor that has a row for each sample; else None."""
    if tensor is None or not tensor.is_floating_point() or tensor.ndim < 2 or len(tensor) != samples:
        return None
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    is_encoded = wants and tensor.nbytes >= MIN_ENCODED_BYTES
    return _Header(dtype, shape, dense_strides(shape, dimension_order(tensor)), is_encoded)


def _encode(values: torch.Tensor, encoding: str) -> torch.Tensor:
    """Returns the code's bytes, uint8[n]; those of the values themselves where no code is smaller."""
    is_coded = is_smaller(encoding, 8 * values.element_size())
    return _view_bytes(CODECS.find(encoding).encode(values) if is_coded else values)


def _decode(code: torch.Tensor, encoding: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    code = code.clone()  # aligned
    if not is_smaller(encoding, 8 * dtype.itemsize):
        return code.view(dtype).view(shape)
    codec = CODECS.find(encoding)
    if codec.keeps_shape:
        code = code.view(codec.encode(torch.empty(0, dtype=dtype)).dtype).view(shape)
    values: torch.Tensor = codec.decode(code, dtype, shape)
    return values.to(dtype)


def _view_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of each sample in the memory of the machine, uint8[samples, n]."""
    return tensor.cpu().contiguous().view(len(tensor), -1).view(torch.uint8)


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@lru_cache(maxsize=1024)
def _mark(structure: str, headers: tuple[_Header | None, ...]) -> str:
    return f"{_MARK}{json.dumps(headers)}{_MARK}{structure}"


@lru_cache(maxsize=1024)
def _read_mark(structure: str) -> tuple[tuple[_Header | None, ...], str]:
    _, text, rest = structure.split(_MARK, 2)
    rows = json.loads(text)
    return tuple(None if row is None else _Header(row[0], tuple(row[1]), tuple(row[2]), *row[3:]) for row in rows), rest
