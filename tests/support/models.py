"""All models that the tests split, by name: those of `own_models`, and transformers from tiny configurations.

Nothing is downloaded. Caches, dropout, tied weights and the kind of attention are what each model has by default.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from own_models import CLASSES, IGNORED, OWN, PAD, WORDS, Case, labels_counted, targets_of
from torch import Tensor, nn

__all__ = ["CASES", "HF", "Case"]

SIDE = 16
FRAMES = 40
MELS = 8


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _words(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """Sequences with padding at the end, of which all but one row have some."""
    words = torch.randint(4, WORDS, (samples, length), generator=_generator(seed))
    mask = torch.ones_like(words)
    for row in range(samples):
        mask[row, max(2, length - row % 3) :] = 0
    return {"input_ids": words * mask, "attention_mask": mask}


def causal(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """For a language model: labels are the words, padding does not count."""
    batch = _words(seed, samples, length)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)}


def masked(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """For a masked language model: every third word counts."""
    batch = causal(seed, samples, length)
    labels = torch.full_like(batch["labels"], IGNORED)
    labels[:, ::3] = batch["labels"][:, ::3]
    return {**batch, "labels": labels}


def detected(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """For ELECTRA: which words were replaced."""
    batch = _words(seed, samples, length)
    return {**batch, "labels": (batch["input_ids"] % 2).to(torch.float32)}


def classified(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """A class for each sequence."""
    labels = torch.randint(CLASSES, (samples,), generator=_generator(seed + 1))
    return {**_words(seed, samples, length), "labels": labels}


def answered(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """The first and last word of the answer."""
    ends = torch.randint(2, (2, samples), generator=_generator(seed + 1))
    return {**_words(seed, samples, length), "start_positions": ends[0], "end_positions": ends[1]}


def translated(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """Source and target; the model shifts the labels itself."""
    return {**_words(seed, samples, length), "labels": causal(seed + 1, samples, length + 1)["labels"]}


def pictures(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """Images and classes."""
    g = _generator(seed)
    pixels = torch.randn(samples, 3, SIDE, SIDE, generator=g)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (samples,), generator=g)}


def large_pictures(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """Images whose side follows from the length, and classes."""
    g = _generator(seed)
    side = 40 + 8 * (length % 2)
    pixels = torch.randn(samples, 3, side, side, generator=g)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (samples,), generator=g)}


def segmented(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """Images and a class for each pixel."""
    g = _generator(seed)
    pixels = torch.randn(samples, 3, 64, 64, generator=g)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (samples, 64, 64), generator=g)}


def spoken(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """Spectra and their text, for Whisper."""
    spectra = torch.randn(samples, MELS, FRAMES, generator=_generator(seed))
    return {"input_features": spectra, "labels": causal(seed + 1, samples, length + 1)["labels"]}


def waves(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """Sound and a class for each."""
    g = _generator(seed)
    sound = torch.randn(samples, 400 + 20 * length, generator=g)
    return {"input_values": sound, "labels": torch.randint(CLASSES, (samples,), generator=g)}


def targeted(batch: Callable[[int, int, int], dict[str, Tensor]]) -> Callable[[int, int, int], Any]:
    """Makes the inputs alone of a batch, with classes as targets: for models without a loss."""

    def pairs(seed: int, samples: int, length: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs = dict(batch(seed, samples, length))
        return inputs, inputs.pop("labels")

    return pairs


def pooled(output: Any, batch: Any) -> Tensor:
    """A loss over the pooled output of a model without a head."""
    return F.cross_entropy(output.pooler_output[:, :CLASSES], batch[1])


def shifted(batch: dict[str, Tensor]) -> float:
    """Returns the number of labels that count if the first is not predicted."""
    return float((batch["labels"][:, 1:] != IGNORED).sum())


def unpadded(batch: dict[str, Tensor]) -> float:
    """Returns the number of words."""
    return float(batch["attention_mask"].sum())


AUTO = {
    causal: "CausalLM",
    masked: "MaskedLM",
    detected: "PreTraining",
    classified: "SequenceClassification",
    answered: "QuestionAnswering",
    translated: "Seq2SeqLM",
    pictures: "ImageClassification",
    large_pictures: "ImageClassification",
    segmented: "SemanticSegmentation",
    spoken: "SpeechSeq2Seq",
    waves: "AudioClassification",
}
"""The class of transformers that takes such batches, after "AutoModelFor"."""
AMOUNTS = {
    causal: shifted,
    masked: labels_counted,
    translated: labels_counted,
    spoken: labels_counted,
    detected: unpadded,
}


def _make(kind: str, batch: Callable[..., Any], settings: dict[str, Any]) -> nn.Module:
    transformers = import_module("transformers")
    config = transformers.AutoConfig.for_model(kind, **settings)
    config.architectures = []  # the first class that takes such batches
    for name in ("initializer_range", "init_std"):  # with 0.02 the gradients of so narrow a model vanish
        if hasattr(config, name):
            setattr(config, name, 0.2)
    auto = f"AutoModelFor{AUTO[batch]}" if batch in AUTO else "AutoModel"
    return getattr(transformers, auto).from_config(config)


def _case(name: str, batch: Callable[..., Any], settings: dict[str, Any], kind: str = "") -> Case:
    """Returns a case of the model type `kind` of transformers, which is the name by default."""
    case = Case(f"hf_{name}", partial(_make, kind or name, batch, settings), batch, needs_hf=True)
    # Losses of language models are computed in float32, and T5's norms.
    single = batch in (causal, detected) or name in ("modernbert", "t5")
    fixed = batch in (pictures, segmented) or name == "clip_vision"
    return replace(case, amount=AMOUNTS.get(batch, targets_of), float32_inside=single, varies_length=not fixed)


TEXT = {"vocab_size": WORDS, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
SIZE = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
PLACES = {"max_position_embeddings": 64}
LLAMA = TEXT | SIZE | PLACES | {"num_key_value_heads": 1}
BERT = TEXT | SIZE | PLACES
LABELS = {"num_labels": CLASSES}
PICTURE = SIZE | LABELS | {"image_size": SIDE, "patch_size": 4}
SEQ2SEQ = TEXT | {"decoder_start_token_id": 1, "forced_eos_token_id": 2}
BART = SEQ2SEQ | PLACES | {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
T5 = SEQ2SEQ | {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
GPT2 = TEXT | {"n_positions": 64, "n_embd": 16, "n_layer": 3, "n_head": 2}
EAGER = {"experts_implementation": "eager"}  # the default multiplies no matrices of float64
EXPERTS = EAGER | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = TEXT | {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 3, "time_step_rank": 2}
GPT_OSS = LLAMA | EAGER | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 4}
GPT_OSS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
WAVES = SIZE | LABELS | {"conv_dim": (8, 8), "conv_kernel": (10, 4), "conv_stride": (5, 4)}
WAVES |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8}
WAVES |= {"num_feat_extract_layers": 2, "layerdrop": 0.0, "mask_time_prob": 0.0, "vocab_size": WORDS}

MODELS = (  # name, batches, settings
    _case("gpt2", causal, GPT2),
    _case("llama", causal, LLAMA),
    _case("qwen3", causal, LLAMA | {"head_dim": 8}),
    _case("bert", masked, BERT),
    _case("t5", translated, T5),
    _case("vit", pictures, PICTURE),
    _case(
        "resnet",
        large_pictures,
        LABELS | {"embedding_size": 8, "hidden_sizes": [8, 16, 16], "depths": [1, 2, 1], "layer_type": "basic"},
    ),
    _case("mixtral", causal, LLAMA | EAGER | {"num_local_experts": 4}),
    _case(
        "whisper",
        spoken,
        {key: value for key, value in BART.items() if key not in PLACES}
        | {"num_mel_bins": MELS, "max_source_positions": FRAMES // 2, "max_target_positions": 64}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    _case("mamba", causal, MAMBA),
    _case("bert_classes", classified, BERT | LABELS, "bert"),
    _case("bert_answers", answered, BERT, "bert"),
    _case("roberta", masked, BERT),
    _case(
        "distilbert", classified, TEXT | LABELS | PLACES | {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24}
    ),
    _case("electra", detected, BERT | {"embedding_size": 12}),
    _case("albert", masked, BERT | {"embedding_size": 12}),
    _case(
        "deberta_v2",
        masked,
        BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        "deberta-v2",
    ),
    _case("modernbert", masked, BERT),
    _case("gpt_neox", causal, BERT),
    _case(
        "gpt_neo",
        causal,
        TEXT
        | PLACES
        | {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
        | {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    _case("gptj", causal, GPT2 | {"rotary_dim": 4}),
    _case(
        "opt",
        causal,
        TEXT
        | PLACES
        | {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 24}
        | {"word_embed_proj_dim": 16},
    ),
    _case("bloom", causal, TEXT | {"hidden_size": 16, "n_layer": 3, "n_head": 2}),
    _case("mpt", causal, TEXT | {"d_model": 16, "n_layers": 3, "n_heads": 2, "expansion_ratio": 2, "max_seq_len": 64}),
    _case("falcon", causal, BERT),
    _case("gemma", causal, LLAMA | {"head_dim": 8}),
    _case("gemma2", causal, LLAMA | {"head_dim": 8, "sliding_window": 4}),
    _case("gemma3", causal, LLAMA | {"head_dim": 8, "sliding_window": 4}, "gemma3_text"),
    _case("phi", causal, LLAMA),
    _case("phi3", causal, LLAMA),
    _case("mistral", causal, LLAMA | {"sliding_window": 4}),
    _case("qwen2", causal, LLAMA),
    _case("qwen3_moe", causal, LLAMA | EXPERTS | {"head_dim": 8}),
    _case("olmo2", causal, LLAMA),
    _case("olmoe", causal, LLAMA | EXPERTS),
    _case("stablelm", causal, LLAMA),
    _case("cohere", causal, LLAMA),
    _case("granite", causal, LLAMA),
    _case("gpt_oss", causal, GPT_OSS),
    _case(
        "deepseek_v3",
        causal,
        LLAMA
        | EAGER
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2}
        | {"topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
        | {"v_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 2},
    ),
    _case("mamba2", causal, MAMBA | {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}),
    _case("bart", translated, BART),
    _case("mbart", translated, BART),
    _case("pegasus", translated, BART),
    _case("marian", translated, BART),
    _case("xlnet", classified, TEXT | LABELS | {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}),
    _case(
        "swin",
        pictures,
        LABELS
        | {
            "image_size": SIDE,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 2,
        },
    ),
    _case("convnext", large_pictures, LABELS | {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1]}),
    _case("deit", pictures, PICTURE),
    _case("beit", pictures, PICTURE),
    _case("dinov2", pictures, PICTURE),
    _case(
        "segformer",
        segmented,
        LABELS
        | {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
        | {"decoder_hidden_size": 16, "sr_ratios": [2, 2, 1, 1]},
    ),
    replace(
        _case(
            "mobilenet_v2", large_pictures, LABELS | {"depth_multiplier": 0.25, "image_size": 48, "output_stride": 8}
        ),
        amplifies=True,
    ),
    _case("wav2vec2", waves, WAVES),
    _case("hubert", waves, WAVES),
    replace(_case("clip_text", targeted(classified), BERT, "clip_text_model"), loss=pooled),
    replace(_case("clip_vision", targeted(pictures), PICTURE, "clip_vision_model"), loss=pooled),
)

HF: dict[str, Case] = {case.name: case for case in MODELS}
CASES: dict[str, Case] = OWN | HF
