"""T5 from transformers, unmodified, translates dates: "March 3, 2024" -> "2024-03-03", as bytes; nothing is downloaded.

Run it: pipedream train examples/t5_dates.py --workers 2
"""

from datetime import date, timedelta
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

import pipedream

PAD, IGNORED, EPOCHS = 0, -100, 4
FORMATS = ("%B %d, %Y", "%d %b %Y", "%m/%d/%Y", "%A, %d %B %Y")


def collate(pairs: list[tuple[str, str]]) -> dict[str, Tensor]:
    """Pads sources and targets; the model leaves padded targets out of its loss."""
    sources, targets = ([torch.tensor(list(text.encode())) for text in texts] for texts in zip(*pairs, strict=True))
    ids = pad_sequence(sources, batch_first=True, padding_value=PAD)
    labels = pad_sequence(targets, batch_first=True, padding_value=IGNORED)
    return {"input_ids": ids, "attention_mask": ids != PAD, "labels": labels}


def exact(output, batch: dict[str, Tensor]) -> Tensor:
    """The share of dates of which every byte is right, each given the bytes before it."""
    return (output.logits.argmax(2) == batch["labels"]).all(1).float().mean()


def recipe(seed: int = 0) -> pipedream.Recipe:
    """Each day of 40 years in one of four formats; every tenth is kept for the test."""
    torch.manual_seed(seed)
    days = [date(1990, 1, 1) + timedelta(i) for i in range(40 * 365)]
    pairs = [(day.strftime(FORMATS[i % 4]).replace(" 0", " "), day.isoformat()) for i, day in enumerate(days)]
    train, order = [pair for i, pair in enumerate(pairs) if i % 10], torch.Generator().manual_seed(seed)
    loader = DataLoader(train, batch_size=64, shuffle=True, generator=order, collate_fn=collate)
    size = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return pipedream.Recipe(
        model=T5ForConditionalGeneration(T5Config(vocab_size=128, decoder_start_token_id=PAD, **size)),
        loss=None,  # the model's own
        optimizer=partial(torch.optim.AdamW, lr=5e-3),
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=EPOCHS * len(loader)),  # one step an update
        train=loader,
        test=DataLoader(pairs[::10], batch_size=128, collate_fn=collate),
        metrics={"exact": exact},
        phases="1f1b/4",  # the embeddings are one weight, which stages that update at different times cannot share
        epochs=EPOCHS,
        target=("exact", 0.98),
    )


if __name__ == "__main__":
    pipedream.run(recipe)
