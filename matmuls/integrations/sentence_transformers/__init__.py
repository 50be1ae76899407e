"""Embeddings and scores of texts without padding for sentence-transformers. Importing it imports sentence-transformers,
6.2 or later."""

try:
    from sentence_transformers import SentenceTransformer

    SentenceTransformer._inference  # noqa: B018
except (ModuleNotFoundError, AttributeError) as error:
    if getattr(error, "name", None) not in ("sentence_transformers", "_inference"):
        raise
    raise ModuleNotFoundError(
        "matmuls.integrations.sentence_transformers needs sentence-transformers 6.2 or later: "
        "pip install 'matmuls[sentence-transformers]'",
        name="sentence_transformers",
    ) from None

from .optimized import Optimized, optimize

__all__ = ["Optimized", "optimize"]
