"""All models that the tests split, by name: those of `own_models`, and transformers from tiny configurations.

Nothing is downloaded. Caches, dropout, tied weights and the kind of attention are what each model has by default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from own_models import CLASSES, IGNORED, OWN, PAD, WORDS, Case
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


def counted(batch: dict[str, Tensor]) -> float:
    """Returns the number of labels that count."""
    return float((batch["labels"] != IGNORED).sum())


def unpadded(batch: dict[str, Tensor]) -> float:
    """Returns the number of words."""
    return float(batch["attention_mask"].sum())


def _make(kind: str, config: str, settings: dict[str, Any]) -> nn.Module:
    transformers = import_module("transformers")
    configuration = getattr(transformers, config)(**settings)
    for name in ("initializer_range", "init_std"):  # with 0.02 the gradients of so narrow a model vanish
        if hasattr(configuration, name):
            setattr(configuration, name, 0.2)
    return getattr(transformers, kind)(configuration)


def _case(name: str, kind: str, config: str, batch: Callable[..., Any], settings: dict[str, Any]) -> Case:
    amounts = {causal: shifted, masked: counted, translated: counted, spoken: counted, detected: unpadded}
    # Losses of language models are computed in float32, and T5's norms.
    single = batch in (causal, detected) or name in ("hf_modernbert", "hf_t5")
    case = Case(name, partial(_make, kind, config, settings), batch, needs_hf=True, float32_inside=single)
    return replace(case, amount=amounts[batch]) if batch in amounts else case


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

# Name, class, configuration, batches, settings.
NAMED_BY_THE_DOCS = (
    _case("hf_gpt2", "GPT2LMHeadModel", "GPT2Config", causal, GPT2),
    _case("hf_llama", "LlamaForCausalLM", "LlamaConfig", causal, LLAMA),
    _case("hf_qwen3", "Qwen3ForCausalLM", "Qwen3Config", causal, LLAMA | {"head_dim": 8}),
    _case("hf_bert", "BertForMaskedLM", "BertConfig", masked, BERT),
    _case("hf_t5", "T5ForConditionalGeneration", "T5Config", translated, T5),
    _case("hf_vit", "ViTForImageClassification", "ViTConfig", pictures, PICTURE),
    _case(
        "hf_resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        large_pictures,
        LABELS | {"embedding_size": 8, "hidden_sizes": [8, 16, 16], "depths": [1, 2, 1], "layer_type": "basic"},
    ),
    _case("hf_mixtral", "MixtralForCausalLM", "MixtralConfig", causal, LLAMA | EAGER | {"num_local_experts": 4}),
    _case(
        "hf_whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        spoken,
        {key: value for key, value in BART.items() if key not in PLACES}
        | {"num_mel_bins": MELS, "max_source_positions": FRAMES // 2, "max_target_positions": 64}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    _case("hf_mamba", "MambaForCausalLM", "MambaConfig", causal, MAMBA),
)

OTHERS = (
    _case("hf_bert_classes", "BertForSequenceClassification", "BertConfig", classified, BERT | LABELS),
    _case("hf_bert_answers", "BertForQuestionAnswering", "BertConfig", answered, BERT),
    _case("hf_roberta", "RobertaForMaskedLM", "RobertaConfig", masked, BERT),
    _case(
        "hf_distilbert",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        classified,
        TEXT | LABELS | PLACES | {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24},
    ),
    _case("hf_electra", "ElectraForPreTraining", "ElectraConfig", detected, BERT | {"embedding_size": 12}),
    _case("hf_albert", "AlbertForMaskedLM", "AlbertConfig", masked, BERT | {"embedding_size": 12}),
    _case(
        "hf_deberta_v2",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        masked,
        BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    ),
    _case("hf_modernbert", "ModernBertForMaskedLM", "ModernBertConfig", masked, BERT),
    _case("hf_gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", causal, BERT),
    _case(
        "hf_gpt_neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        causal,
        TEXT
        | PLACES
        | {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
        | {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    _case("hf_gptj", "GPTJForCausalLM", "GPTJConfig", causal, GPT2 | {"rotary_dim": 4}),
    _case(
        "hf_opt",
        "OPTForCausalLM",
        "OPTConfig",
        causal,
        TEXT
        | PLACES
        | {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 24}
        | {"word_embed_proj_dim": 16},
    ),
    _case("hf_bloom", "BloomForCausalLM", "BloomConfig", causal, TEXT | {"hidden_size": 16, "n_layer": 3, "n_head": 2}),
    _case(
        "hf_mpt",
        "MptForCausalLM",
        "MptConfig",
        causal,
        TEXT | {"d_model": 16, "n_layers": 3, "n_heads": 2, "expansion_ratio": 2, "max_seq_len": 64},
    ),
    _case("hf_falcon", "FalconForCausalLM", "FalconConfig", causal, BERT),
    _case("hf_gemma", "GemmaForCausalLM", "GemmaConfig", causal, LLAMA | {"head_dim": 8}),
    _case("hf_gemma2", "Gemma2ForCausalLM", "Gemma2Config", causal, LLAMA | {"head_dim": 8, "sliding_window": 4}),
    _case("hf_gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", causal, LLAMA | {"head_dim": 8, "sliding_window": 4}),
    _case("hf_phi", "PhiForCausalLM", "PhiConfig", causal, LLAMA),
    _case("hf_phi3", "Phi3ForCausalLM", "Phi3Config", causal, LLAMA),
    _case("hf_mistral", "MistralForCausalLM", "MistralConfig", causal, LLAMA | {"sliding_window": 4}),
    _case("hf_qwen2", "Qwen2ForCausalLM", "Qwen2Config", causal, LLAMA),
    _case("hf_qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", causal, LLAMA | EXPERTS | {"head_dim": 8}),
    _case("hf_olmo2", "Olmo2ForCausalLM", "Olmo2Config", causal, LLAMA),
    _case("hf_olmoe", "OlmoeForCausalLM", "OlmoeConfig", causal, LLAMA | EXPERTS),
    _case("hf_stablelm", "StableLmForCausalLM", "StableLmConfig", causal, LLAMA),
    _case("hf_cohere", "CohereForCausalLM", "CohereConfig", causal, LLAMA),
    _case("hf_granite", "GraniteForCausalLM", "GraniteConfig", causal, LLAMA),
    _case(
        "hf_gpt_oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        causal,
        GPT_OSS,
    ),
    _case(
        "hf_deepseek_v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        causal,
        LLAMA
        | EAGER
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2}
        | {"topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
        | {"v_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 2},
    ),
    _case(
        "hf_mamba2",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        causal,
        MAMBA | {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    ),
    _case("hf_bart", "BartForConditionalGeneration", "BartConfig", translated, BART),
    _case("hf_mbart", "MBartForConditionalGeneration", "MBartConfig", translated, BART),
    _case("hf_pegasus", "PegasusForConditionalGeneration", "PegasusConfig", translated, BART),
    _case("hf_marian", "MarianMTModel", "MarianConfig", translated, BART),
    _case(
        "hf_xlnet",
        "XLNetForSequenceClassification",
        "XLNetConfig",
        classified,
        TEXT | LABELS | {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
    ),
    _case(
        "hf_swin",
        "SwinForImageClassification",
        "SwinConfig",
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
    _case(
        "hf_convnext",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        large_pictures,
        LABELS | {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1]},
    ),
    _case("hf_deit", "DeiTForImageClassification", "DeiTConfig", pictures, PICTURE),
    _case("hf_beit", "BeitForImageClassification", "BeitConfig", pictures, PICTURE),
    _case("hf_dinov2", "Dinov2ForImageClassification", "Dinov2Config", pictures, PICTURE),
    _case(
        "hf_segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        segmented,
        LABELS
        | {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
        | {"decoder_hidden_size": 16, "sr_ratios": [2, 2, 1, 1]},
    ),
    replace(
        _case(
            "hf_mobilenet_v2",
            "MobileNetV2ForImageClassification",
            "MobileNetV2Config",
            large_pictures,
            LABELS | {"depth_multiplier": 0.25, "image_size": 48, "output_stride": 8},
        ),
        amplifies=True,
    ),
    _case("hf_wav2vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", waves, WAVES),
    _case("hf_hubert", "HubertForSequenceClassification", "HubertConfig", waves, WAVES),
    replace(
        _case("hf_clip_text", "CLIPTextModel", "CLIPTextConfig", targeted(classified), BERT),
        loss=pooled,
    ),
    replace(_case("hf_clip_vision", "CLIPVisionModel", "CLIPVisionConfig", targeted(pictures), PICTURE), loss=pooled),
)

FIXED = (pictures, segmented)
HF: dict[str, Case] = {
    case.name: replace(case, varies_length=case.batch not in FIXED and case.name != "hf_clip_vision")
    for case in (*NAMED_BY_THE_DOCS, *OTHERS)
}

CASES: dict[str, Case] = OWN | HF
