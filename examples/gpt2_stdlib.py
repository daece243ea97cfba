"""GPT-2 from transformers, unmodified, over bytes of the source of Python's standard library; nothing is downloaded.

Run it: pipedream train examples/gpt2_stdlib.py --workers 2
"""

from functools import partial
from pathlib import Path
from sysconfig import get_path

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import pipedream

MODULES = "argparse ast calendar configparser copy csv dataclasses datetime difflib doctest enum fractions ftplib"
CONTEXT, EPOCHS = 64, 2


def collate(windows: list[Tensor]) -> dict[str, Tensor]:
    """The model takes its batch as keyword arguments, and computes the loss itself; it shifts the labels by one."""
    ids = torch.stack(windows)
    return {"input_ids": ids, "labels": ids}


def recipe(seed: int = 0) -> pipedream.Recipe:
    """Windows of the text, of which every tenth is kept for the test."""
    torch.manual_seed(seed)
    text = "".join(Path(get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8") for name in MODULES.split())
    windows = torch.tensor(list(text.encode("ascii", "replace"))).unfold(0, CONTEXT + 1, CONTEXT)
    train, order = [window for i, window in enumerate(windows) if i % 10], torch.Generator().manual_seed(seed)
    loader = DataLoader(train, batch_size=16, shuffle=True, generator=order, collate_fn=collate)
    size = {
        "vocab_size": 128,
        "n_positions": CONTEXT + 1,
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "initializer_range": 0.1,
    }
    rest = {"embd_pdrop": 0.1, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return pipedream.Recipe(
        model=GPT2LMHeadModel(GPT2Config(**size, **rest)),
        loss=None,  # the model's own
        optimizer=partial(torch.optim.AdamW, lr=4e-3),
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=EPOCHS * len(loader)),  # one step an update
        train=loader,
        test=DataLoader(windows[::10], batch_size=64, collate_fn=collate),
        metrics={"bits_per_byte": lambda output, batch: output.loss / torch.tensor(2.0).log()},
        phases="1f1b/4",  # the embeddings are one weight, which stages that update at different times cannot share
        epochs=EPOCHS,
        target=("loss", 1.6),
    )


if __name__ == "__main__":
    pipedream.run(recipe)
