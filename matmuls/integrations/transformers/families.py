"""The encoder layers that `optimize` knows: where each family keeps the parts of a layer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


@dataclass(frozen=True)
class Family:
    """The attribute paths of a layer's parts: q, k and v start at its attention, the others at the layer."""

    attention: str
    qkv: tuple[str, ...]  # three linears, or one whose rows are those of q, k and v
    projection: str
    norms: tuple[str, str]
    up: tuple[str, ...]  # with a gate: the linear under the activation and the other, or one with the rows of both
    activation: str
    down: str
    norm_first: bool = False
    gated: bool = False  # down(activation(first) * second)
    scales: tuple[str, ...] = ()  # modules whose lambda1 multiplies what attention and feed-forward add
    scaling: str = "scaling"  # the attention's attribute with the factor of the scores
    clamped: bool = False  # float16 results stay finite
    positions: str = ""  # the layer's argument with positions: those that rotate q and k, or a bias of the scores
    tuples: bool = False  # the layer returns a tuple, with the probabilities if they are requested
    passed: tuple[tuple[str, str], ...] = ()  # further arguments of attention functions, and the attributes with them
    rms: tuple[str, float] | None = None  # the norms are RMS norms: their attribute with eps, what is added to weights
    after: tuple[str, ...] = ()  # norms of what attention and feed-forward add
    of_heads: tuple[str, ...] = ()  # the attention's norms of q and k
    causal: bool = False  # attention may be causal; there may be fewer k and v than q
    other: "Family | None" = None  # another form of the same class


BERT = Family(
    attention="attention.self",
    qkv=("query", "key", "value"),
    projection="attention.output.dense",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    up=("intermediate.dense",),
    activation="intermediate.intermediate_act_fn",
    down="output.dense",
)
VIT = Family(
    attention="attention",
    qkv=("q_proj", "k_proj", "v_proj"),
    projection="attention.o_proj",
    norms=("layernorm_before", "layernorm_after"),
    up=("mlp.fc1",),
    activation="mlp.activation_fn",
    down="mlp.fc2",
    norm_first=True,
)
SWIGLU: dict[str, Any] = {
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "activation": "mlp.act_fn",
    "down": "mlp.down_proj",
    "gated": True,
}
DINOV2 = replace(VIT, norms=("norm1", "norm2"), scales=("layer_scale1", "layer_scale2"))
DINOV2 = replace(DINOV2, other=replace(DINOV2, **SWIGLU))
CLIP = replace(
    VIT,
    attention="self_attn",
    projection="self_attn.out_proj",
    norms=("layer_norm1", "layer_norm2"),
    scaling="scale",
)
JINA = Family(
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    projection="self_attn.o_proj",
    norms=("post_attention_layernorm", "post_mlp_layernorm"),
    up=("mlp.fc1",),
    activation="mlp.activation_fn",
    down="mlp.fc2",
    positions="position_embeddings",
)
NOMIC = replace(JINA, **SWIGLU)
EUROBERT = replace(
    NOMIC,
    norms=("input_layernorm", "post_attention_layernorm"),
    norm_first=True,
    rms=("variance_epsilon", 0.0),
)
QWEN3 = replace(EUROBERT, of_heads=("q_norm", "k_norm"), causal=True, passed=(("sliding_window", "sliding_window"),))
GEMMA3 = replace(
    QWEN3,
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
    rms=("eps", 1.0),
)
NAMES = (
    *("BERT", "RoBERTa", "XLM-RoBERTa", "CamemBERT", "ELECTRA", "DistilBERT", "ALBERT"),
    *("MPNet", "ModernBERT", "NomicBERT", "GTE", "Jina embeddings v3", "EuroBERT", "Qwen3", "Gemma3"),
    *("ViT", "DeiT", "DINOv2", "CLIP", "SigLIP", "Whisper"),
)
FAMILIES = {  # by the model's folder in transformers and the layer's class
    **{f"{name.lower()}.{name}Layer": BERT for name in ("Bert", "Camembert", "Electra", "Roberta")},
    "xlm_roberta.XLMRobertaLayer": BERT,
    "distilbert.TransformerBlock": Family(
        attention="attention",
        qkv=("q_lin", "k_lin", "v_lin"),
        projection="attention.out_lin",
        norms=("sa_layer_norm", "output_layer_norm"),
        up=("ffn.lin1",),
        activation="ffn.activation",
        down="ffn.lin2",
    ),
    "albert.AlbertLayer": Family(
        attention="attention",
        qkv=("query", "key", "value"),
        projection="attention.dense",
        norms=("attention.LayerNorm", "full_layer_layer_norm"),
        up=("ffn",),
        activation="activation",
        down="ffn_output",
    ),
    "modernbert.ModernBertEncoderLayer": Family(
        attention="attn",
        qkv=("Wqkv",),
        projection="attn.Wo",
        norms=("attn_norm", "mlp_norm"),
        up=("mlp.Wi",),
        activation="mlp.act",
        down="mlp.Wo",
        norm_first=True,
        gated=True,
        positions="position_embeddings",
        passed=(("sliding_window", "sliding_window"), ("deterministic", "deterministic_flash_attn")),
    ),
    "nomic_bert.NomicBertLayer": NOMIC,
    "gte.GteLayer": NOMIC,
    "jina_embeddings_v3.JinaEmbeddingsV3Layer": JINA,
    "eurobert.EuroBertDecoderLayer": EUROBERT,
    "qwen3.Qwen3DecoderLayer": QWEN3,
    "gemma3.Gemma3DecoderLayer": GEMMA3,
    "mpnet.MPNetLayer": replace(  # computes attention itself, whatever implementation is set
        BERT,
        attention="attention.attn",
        qkv=("q", "k", "v"),
        projection="attention.attn.o",
        norms=("attention.LayerNorm", "output.LayerNorm"),
        positions="position_bias",
        tuples=True,
    ),
    "vit.ViTLayer": VIT,
    "deit.DeiTLayer": VIT,
    "dinov2.Dinov2Layer": DINOV2,
    "dinov2_with_registers.Dinov2WithRegistersLayer": DINOV2,
    "clip.CLIPEncoderLayer": CLIP,
    "siglip.SiglipEncoderLayer": CLIP,
    "whisper.WhisperEncoderLayer": replace(
        CLIP,
        norms=("self_attn_layer_norm", "final_layer_norm"),
        up=("fc1",),
        activation="activation_fn",
        down="fc2",
        scaling="scaling",
        clamped=True,
    ),
}
TEXTS = {  # models that pass the embeddings, and each layer's output, only to the next layer, by their word embeddings
    **{f"{name.lower()}.{name}Model": "word_embeddings" for name in ("Bert", "Camembert", "Electra", "Roberta")},
    "xlm_roberta.XLMRobertaModel": "word_embeddings",
    "distilbert.DistilBertModel": "word_embeddings",
    "albert.AlbertModel": "word_embeddings",
    "mpnet.MPNetModel": "word_embeddings",
    "modernbert.ModernBertModel": "tok_embeddings",
    "nomic_bert.NomicBertModel": "word_embeddings",
    "gte.GteModel": "word_embeddings",
    "jina_embeddings_v3.JinaEmbeddingsV3Model": "word_embeddings",
    "eurobert.EuroBertModel": "embed_tokens",
    "qwen3.Qwen3Model": "embed_tokens",
    "gemma3.Gemma3TextModel": "embed_tokens",
}
DECODERS = {"qwen3.Qwen3Model", "gemma3.Gemma3TextModel"}  # with a cache, unless use_cache=False
BARE = {"eurobert.EuroBertModel", *DECODERS}  # inputs_embeds are the first layer's input
BY_COLUMNS = {"mpnet.MPNetModel", "modernbert.ModernBertModel"}  # attention depends on the distance of tokens
BIASED = {"mpnet.MPNetEncoder"}  # encoders that make a relative position bias for their layers
# Models whose own forward makes the tuple: return_dict=None means the configuration's, and there is a place for a
# pooler's result without a pooler.
TUPLES = {"mpnet.MPNetModel"}
UNPACKED = {  # such models of texts whose padding cannot be left out, and why
    "clip.CLIPTextModel": "is causal",
    "siglip.SiglipTextModel": "pools the last token, padding or not",
}
MODELS = {
    *TEXTS,
    *UNPACKED,
    "vit.ViTModel",
    "deit.DeiTModel",
    "dinov2.Dinov2Model",
    "dinov2_with_registers.Dinov2WithRegistersModel",
    "clip.CLIPVisionModel",
    "siglip.SiglipVisionModel",
    "whisper.WhisperEncoder",
}


def of_class(function: Callable[[type], T]) -> Callable[[type], T]:
    """Caches a function of a class. A decorator, because type checkers refuse a class as an argument of what
    `lru_cache` returns."""
    return lru_cache(function)


def _kind(module: nn.Module) -> str:
    """A transformers module as "folder.Class"; "" for other modules."""
    where = type(module).__module__
    return f"{where.split('.')[2]}.{type(module).__name__}" if where.startswith("transformers.models.") else ""
