"""What the tests of transformers share."""

import pytest
import torch
from packaging.version import Version

transformers = pytest.importorskip("transformers")


from matmuls.integrations.transformers import (  # noqa: E402
    register,
)

# implementations: sdpa unless probabilities are requested; always ours; ours without saved scores (recompute)
WAYS = {"custom_mm": {}, "always": {"sdpa": False}, "again": {"sdpa": False, "recompute": True}}
for way, options in WAYS.items():
    register(way, **options)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 60}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
IMAGES = SMALL | {"image_size": 24, "patch_size": 8}
MODERN = SMALL | {"num_hidden_layers": 2, "local_attention": 4, "global_attn_every_n_layers": 2, "pad_token_id": 0}
MODERN_BIASES = {"norm_bias": True, "mlp_bias": True, "attention_bias": True, "hidden_activation": "silu"}
WHISPER = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "vocab_size": 60}
WHISPER |= {"num_mel_bins": 6, "max_source_positions": 9, "decoder_layers": 1, "decoder_attention_heads": 4}
DECODER = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "use_cache": False}
QWEN3_WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "attention_bias": True}
GEMMA3_CAUSAL = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA3 = GEMMA3_CAUSAL | {"use_bidirectional_attention": True}
t = transformers
MODELS = {
    "bert": lambda: t.BertModel(t.BertConfig(**SMALL)),
    "bert decoder": lambda: t.BertModel(t.BertConfig(**SMALL, is_decoder=True)),
    "roberta": lambda: t.RobertaModel(t.RobertaConfig(**SMALL)),
    "electra": lambda: t.ElectraModel(t.ElectraConfig(**SMALL, embedding_size=16)),
    "distilbert": lambda: t.DistilBertModel(t.DistilBertConfig(**DISTIL)),
    "albert": lambda: t.AlbertModel(t.AlbertConfig(**SMALL, embedding_size=16)),
    "vit": lambda: t.ViTModel(t.ViTConfig(**IMAGES)),
    "grouped heads": lambda: t.LlamaModel(t.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "position bias": lambda: t.T5EncoderModel(t.T5Config(**T5)),
    "sliding window": lambda: t.MistralModel(t.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=3)),
    "says nothing of causality": lambda: t.LayoutLMModel(t.LayoutLMConfig(**SMALL)),
}
ENCODERS = {  # tested with optimize alone
    "mpnet": lambda: t.MPNetModel(t.MPNetConfig(**SMALL)),
    "modernbert": lambda: t.ModernBertModel(t.ModernBertConfig(**MODERN)),
    "modernbert biases": lambda: t.ModernBertModel(t.ModernBertConfig(**MODERN, **MODERN_BIASES)),
    "nomic": lambda: t.NomicBertModel(t.NomicBertConfig(**SMALL)),
    "gte": lambda: t.GteModel(t.GteConfig(**SMALL)),
    "jina": lambda: t.JinaEmbeddingsV3Model(t.JinaEmbeddingsV3Config(**SMALL)),
    "eurobert": lambda: t.EuroBertModel(t.EuroBertConfig(**SMALL, num_key_value_heads=2, pad_token_id=0)),
    "qwen3": lambda: t.Qwen3Model(t.Qwen3Config(**SMALL, **DECODER)),
    "qwen3 window": lambda: t.Qwen3Model(t.Qwen3Config(**SMALL, **DECODER, **QWEN3_WINDOW)),
    "gemma3": lambda: t.Gemma3TextModel(t.Gemma3TextConfig(**SMALL, **DECODER, **GEMMA3)),
    "gemma3 causal": lambda: t.Gemma3TextModel(t.Gemma3TextConfig(**SMALL, **DECODER, **GEMMA3_CAUSAL)),
    "deit": lambda: t.DeiTModel(t.DeiTConfig(**IMAGES)),
    "dinov2": lambda: t.Dinov2Model(t.Dinov2Config(**IMAGES, layerscale_value=0.5)),
    "dinov2 swiglu": lambda: t.Dinov2Model(t.Dinov2Config(**IMAGES, layerscale_value=0.5, use_swiglu_ffn=True)),
    "dinov2 registers": lambda: t.Dinov2WithRegistersModel(t.Dinov2WithRegistersConfig(**IMAGES)),
    "clip text": lambda: t.CLIPTextModel(t.CLIPTextConfig(**SMALL)),
    "clip vision": lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**IMAGES)),
    "siglip text": lambda: t.SiglipTextModel(t.SiglipTextConfig(**SMALL)),
    "siglip vision": lambda: t.SiglipVisionModel(t.SiglipVisionConfig(**IMAGES)),
    "whisper": lambda: t.WhisperModel(t.WhisperConfig(**WHISPER, pad_token_id=0)).encoder,
}


SINCE = {"gte": "5.24", "dinov2": "5.24", "dinov2 swiglu": "5.24", "dinov2 registers": "5.24"}  # earlier layers differ


def model_of(name, device="cpu", dtype=torch.float32):
    if Version(t.__version__) < Version(SINCE.get(name, "0")):
        pytest.skip(f"{name} needs transformers {SINCE[name]}")
    torch.manual_seed(0)
    return (MODELS | ENCODERS)[name]().to(device, dtype).eval()


def batch_of(model, padded=False):
    torch.manual_seed(1)
    options = {"device": model.device, "dtype": model.dtype}
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(3, 3, 24, 24, **options)}
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(3, 6, 18, **options)}
    mask = torch.ones(3, 9, dtype=torch.long, device=model.device)
    if padded:
        mask[0, 5:] = 0
        mask[1, 8:] = 0
    return {"input_ids": torch.randint(3, 60, (3, 9), device=model.device), "attention_mask": mask}


IGNORING = {
    "mpnet": (lambda: t.MPNetModel(t.MPNetConfig(**SMALL)), "MPNetSelfAttention"),
    "deberta": (lambda: t.DebertaModel(t.DebertaConfig(**SMALL)), "DisentangledSelfAttention"),
    "deberta v2": (lambda: t.DebertaV2Model(t.DebertaV2Config(**SMALL)), "DisentangledSelfAttention"),
    "xlnet": (
        lambda: t.XLNetModel(t.XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=48, vocab_size=60)),
        "XLNetRelativeAttention",
    ),
}
