"""SentenceTransformers of the tests: MiniLM from its folder, and small random models of other families."""

import json
from pathlib import Path

import pytest
import torch

sentence_transformers = pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from sentence_transformers.sentence_transformer import modules  # noqa: E402

from matmuls import bert  # noqa: E402

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{n}" for n in range(50)))
PLACES = {"max_position_embeddings": 40, "vocab_size": len(WORDS), "pad_token_id": 0}
GEMMA3 = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "use_bidirectional_attention": True}
t = transformers
MODELS = {  # the last cannot be packed
    "bert": lambda: t.BertModel(t.BertConfig(**SIZES, **PLACES)),
    "roberta": lambda: t.RobertaModel(t.RobertaConfig(**SIZES, **PLACES)),
    "electra": lambda: t.ElectraModel(t.ElectraConfig(**SIZES, **PLACES, embedding_size=16)),
    "distilbert": lambda: t.DistilBertModel(t.DistilBertConfig(**DISTIL, **PLACES)),
    "mpnet": lambda: t.MPNetModel(t.MPNetConfig(**SIZES, **PLACES)),
    "modernbert": lambda: t.ModernBertModel(t.ModernBertConfig(**SIZES, **PLACES, local_attention=8)),
    "nomic_bert": lambda: t.NomicBertModel(t.NomicBertConfig(**SIZES, **PLACES)),
    "eurobert": lambda: t.EuroBertModel(t.EuroBertConfig(**SIZES, **PLACES, num_key_value_heads=2)),
    "qwen3": lambda: t.Qwen3Model(t.Qwen3Config(**SIZES, **PLACES, num_key_value_heads=2, head_dim=8)),
    "gemma3_text": lambda: t.Gemma3TextModel(t.Gemma3TextConfig(**SIZES, **PLACES, **GEMMA3)),
    "ernie": lambda: t.ErnieModel(t.ErnieConfig(**SIZES, **PLACES)),
}


def minilm(**options):
    try:
        folder = bert.model_folder()
    except bert.ModelMissing as error:
        pytest.skip(str(error))
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu", **options)


def saved(name: str, folder: Path, special: bool = True) -> Path:
    """A folder with a small random model and a tokenizer of WORDS. special: it adds [CLS] and [SEP]."""
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if special:
        words.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    names = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")}
    fast = t.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, **names)
    if name in ("distilbert", "roberta", "modernbert", "eurobert", "qwen3", "gemma3_text"):
        fast.model_input_names = ["input_ids", "attention_mask"]
    fast.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == name
    return folder


def small(name: str, folder: Path, *after, pooling="mean", special: bool = True):
    """A small random SentenceTransformer: Transformer, Pooling and the modules of `after`."""
    first = modules.Transformer(str(saved(name, folder, special)))
    pooled = modules.Pooling(32, pooling_mode=pooling)
    st = sentence_transformers.SentenceTransformer(modules=[first, pooled, *after], device="cpu")
    return st.eval()


def texts(count: int, most: int = 45, seed: int = 0) -> list[str]:
    """Texts of 0 to `most` words of WORDS: some have more tokens than a small model takes."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(most + 1, (count,), generator=draw).tolist()
    return [" ".join(f"word{n}" for n in torch.randint(50, (length,), generator=draw).tolist()) for length in lengths]


def small_ranker(name: str, folder: Path, labels: int = 1, *, special: bool = True, **options):
    """A small random CrossEncoder with weights so large that its scores differ."""
    ranker = sentence_transformers.CrossEncoder(
        str(saved(name, folder, special)), num_labels=labels, device="cpu", local_files_only=True, **options
    )
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in ranker.parameters():
            if weight.dim() == 2:
                weight.copy_(torch.randn(weight.shape, generator=draw) / weight.size(1) ** 0.5)
    return ranker.eval()


def pairs(count: int, most: int = 22, seed: int = 0) -> list[list[str]]:
    """Pairs of `texts`."""
    return [list(pair) for pair in zip(texts(count, most, seed), texts(count, most, seed + 1), strict=True)]
