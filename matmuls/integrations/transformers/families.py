"""The encoder layers that `optimize` knows: where each family keeps the parts of a layer."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Family:
    """The attribute paths of a layer's parts: q, k and v start at its attention, the others at the layer."""

    attention: str
    qkv: tuple[str, str, str]
    projection: str
    norms: tuple[str, str]
    up: str
    activation: str
    down: str
    norm_first: bool = False


BERT = Family(
    attention="attention.self",
    qkv=("query", "key", "value"),
    projection="attention.output.dense",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    up="intermediate.dense",
    activation="intermediate.intermediate_act_fn",
    down="output.dense",
)
NAMES = ("BERT", "RoBERTa", "XLM-RoBERTa", "CamemBERT", "ELECTRA", "DistilBERT", "ALBERT", "ViT")
FAMILIES = {  # by the model's folder in transformers and the layer's class
    **{f"{name.lower()}.{name}Layer": BERT for name in ("Bert", "Camembert", "Electra", "Roberta")},
    "xlm_roberta.XLMRobertaLayer": BERT,
    "distilbert.TransformerBlock": Family(
        attention="attention",
        qkv=("q_lin", "k_lin", "v_lin"),
        projection="attention.out_lin",
        norms=("sa_layer_norm", "output_layer_norm"),
        up="ffn.lin1",
        activation="ffn.activation",
        down="ffn.lin2",
    ),
    "albert.AlbertLayer": Family(
        attention="attention",
        qkv=("query", "key", "value"),
        projection="attention.dense",
        norms=("attention.LayerNorm", "full_layer_layer_norm"),
        up="ffn",
        activation="activation",
        down="ffn_output",
    ),
    "vit.ViTLayer": Family(
        attention="attention",
        qkv=("q_proj", "k_proj", "v_proj"),
        projection="attention.o_proj",
        norms=("layernorm_before", "layernorm_after"),
        up="mlp.fc1",
        activation="mlp.activation_fn",
        down="mlp.fc2",
        norm_first=True,
    ),
}
MODELS = {  # models that pass the embeddings, and each layer's output, only to the next layer
    *(f"{name.lower()}.{name}Model" for name in ("Bert", "Camembert", "Electra", "Roberta")),
    "xlm_roberta.XLMRobertaModel",
    "distilbert.DistilBertModel",
    "albert.AlbertModel",
    "vit.ViTModel",
}


def _kind(module: nn.Module) -> str:
    """A transformers module as "folder.Class"; "" for other modules."""
    where = type(module).__module__
    return f"{where.split('.')[2]}.{type(module).__name__}" if where.startswith("transformers.models.") else ""
