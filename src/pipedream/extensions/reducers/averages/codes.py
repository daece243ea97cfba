"""The code of the largest values of weights' chunks (`chunks`): their places, and two bits of each.

A value arrives as its sign times one of its chunk's two scales: the mean size of the kept values above the mean size of
all kept ones, and the mean size of the others. A kept value of 0 repeats the largest one of its chunk, which changes
nothing. If one value of a chunk is not finite, none of those that it sends are.
"""

from collections.abc import Iterator, Sequence

import torch

from pipedream.extensions.reducers.averages.chunks import CHUNK, SCALES, VALUE_BITS, Chunks, count_bytes, divide

_WORD = 14
_WORD_BYTES = 7


class ShareCode:
    """The code of some weights.

    Args:
        sizes: how many values each has.
        share: of the values that are sent.

    Attributes:
        size_bytes: of a code.
    """

    def __init__(self, sizes: Sequence[int], share: float) -> None:
        self._chunks = [divide(size, share) for size in sizes]
        self._all = [row for rows in self._chunks for row in rows]
        self.size_bytes = count_bytes(self._all)

    def encode(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the code of tensors in float32 or more, as uint8."""
        parts = [_encode(t.view(-1), row) for t, rows in zip(tensors, self._chunks, strict=True) for row in rows]
        scales = torch.cat([scales.reshape(-1) for scales, _ in parts])
        return torch.cat([scales.view(torch.uint8), _pack(torch.cat([words.reshape(-1) for _, words in parts]))])

    def add(self, code: torch.Tensor, tensors: Sequence[torch.Tensor], factor: float) -> None:
        """Adds what arrives of a code, times a factor, to tensors in place."""
        parts = self._decode(code)
        for tensor, rows in zip(tensors, self._chunks, strict=True):
            flat = tensor.view(-1)
            for _ in rows:
                places, values = next(parts)
                flat[places] = flat[places] + factor * values.to(flat.dtype)  # a repeated one counts once

    def _decode(self, code: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields places and values of each kind of chunks."""
        counts = [row.count for row in self._all]
        scale_bytes = 4 * SCALES * sum(counts)
        scales = code[:scale_bytes].clone().view(torch.float32).view(-1, SCALES)
        kept = [row.count * row.kept for row in self._all]
        words = _unpack(code[scale_bytes:])[: sum(kept)]
        for row, levels, some in zip(self._all, torch.split(scales, counts), torch.split(words, kept), strict=True):
            some = some.view(row.count, row.kept)
            begins = row.begin + CHUNK * torch.arange(row.count, device=code.device)
            sizes = levels.gather(1, some & 1)
            yield begins[:, None] + (some >> VALUE_BITS), torch.where((some & 2).bool(), -sizes, sizes)


def _encode(flat: torch.Tensor, row: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and words (index, sign, scale) of some chunks."""
    chunks = flat[row.begin : row.begin + row.count * row.size].view(row.count, row.size)
    sizes, index = chunks.abs().topk(row.kept, dim=1)  # the largest first
    mean = sizes.sum(1, keepdim=True) / sizes.count_nonzero(1).clamp(min=1)[:, None]
    is_large = sizes > mean
    is_small = ~is_large & (sizes != 0)
    scales = [torch.where(some, sizes, 0).sum(1) / some.sum(1).clamp(min=1) for some in (is_small, is_large)]
    words = (index << VALUE_BITS) | ((chunks.gather(1, index) < 0) * 2) | is_large
    return torch.stack(scales, 1).float(), torch.where(sizes == 0, words[:, :1], words)


def _pack(words: torch.Tensor) -> torch.Tensor:
    """Returns four words of 14 bits in 7 bytes."""
    fours = torch.nn.functional.pad(words, (0, -len(words) % 4)).view(-1, 4)
    joined = (fours << (_WORD * torch.arange(4, device=words.device))).sum(1, keepdim=True)
    return ((joined >> (8 * torch.arange(_WORD_BYTES, device=words.device))) & 0xFF).to(torch.uint8).view(-1)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    rows = packed.view(-1, _WORD_BYTES).long()
    joined = (rows << (8 * torch.arange(_WORD_BYTES, device=packed.device))).sum(1, keepdim=True)
    return ((joined >> (_WORD * torch.arange(4, device=packed.device))) & ((1 << _WORD) - 1)).view(-1)
