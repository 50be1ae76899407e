"""Makes a SentenceTransformer or a CrossEncoder run texts without padding: `optimize`, and its handle with `undo`."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

from sentence_transformers import CrossEncoder, SentenceTransformer

from matmuls.integrations import transformers as integration

from .inference import Settings, _inference, _scores
from .support import Model, why_not


@dataclass
class Optimized:
    """The changes of a SentenceTransformer or CrossEncoder by `optimize`; `undo()` reverts them.

    Attributes:
        encoder: the handle of the model's encoder layers, or None if sentence-transformers runs the model as it is.

    Examples:
        >>> from matmuls.bert import model_folder
        >>> from matmuls.integrations.sentence_transformers import optimize
        >>> from sentence_transformers import SentenceTransformer
        >>> model = SentenceTransformer(str(model_folder()), device="cpu")
        >>> handle = optimize(model)
        >>> print(handle)
        texts are encoded without padding; 6 layers optimized
        >>> handle.undo()
    """

    encoder: integration.Optimized | None
    _model: Model
    _settings: Settings

    @property
    def tokens(self) -> int:
        """How many tokens were encoded since `optimize`, by calls that matmuls computed.

        Examples:
            >>> from matmuls.bert import model_folder
            >>> from matmuls.integrations.sentence_transformers import optimize
            >>> from sentence_transformers import SentenceTransformer
            >>> model = SentenceTransformer(str(model_folder()), device="cpu")
            >>> handle = optimize(model)
            >>> _ = model.encode(["one", "two words"])
            >>> handle.tokens
            7
        """
        return self._settings.tokens

    @property
    def reason(self) -> str | None:
        """Why sentence-transformers runs the model as it is now, or None if matmuls runs it.

        Examples:
            >>> from matmuls.bert import model_folder
            >>> from matmuls.integrations.sentence_transformers import optimize
            >>> from sentence_transformers import SentenceTransformer
            >>> from torch import nn
            >>> model = SentenceTransformer(str(model_folder()), device="cpu")
            >>> handle = optimize(model)
            >>> model.append(nn.Identity())[-1]
            Identity()
            >>> handle.reason
            'Identity is not one of Pooling, Normalize, Dense'
        """
        return why_not(self._model)

    def undo(self) -> None:
        """Restores the model: `encode` or `predict` is sentence-transformers' own again, and so are the layers."""
        if "_inference" in self._model.__dict__:
            del self._model._inference
        if self.encoder is not None:
            self.encoder.undo()

    def __str__(self) -> str:
        if self.reason is not None:
            return f"run by sentence-transformers as it is: {self.reason}"
        model: Any = self._model[0]
        padding = integration.can_pack(model.model)
        how = "without padding" if padding is None else f"in batches of equal numbers of tokens ({padding})"
        what = "scored" if isinstance(self._model, CrossEncoder) else "encoded"
        return f"texts are {what} {how}; {len(self.encoder.layers if self.encoder else ())} layers optimized"

    __repr__ = __str__  # not the layers'


def optimize(
    model: SentenceTransformer | CrossEncoder, *, tokens_per_batch: int | None = None, int8: bool = False
) -> Optimized:
    """Makes `encode`, `encode_query` and `encode_document` of a SentenceTransformer, or `predict` and `rank` of a
    CrossEncoder, compute texts without padding.

    More than 256 texts are tokenized in another thread while the model runs. Texts go through the model in batches of a
    number of tokens, not of texts: `batch_size` has no effect. Arguments and results are those of
    sentence-transformers, within rounding. Its own code runs as before where this does not apply: for models of other
    modules than Transformer, Pooling, Normalize and Dense, for inputs that are neither texts nor, for a CrossEncoder,
    pairs of texts, `output_value=None`, hooks, autocast and compiled models. In a pool of several processes, every
    process runs the optimized model. A CrossEncoder's activation function is called for each batch.

    The encoder layers are changed by `matmuls.integrations.transformers.optimize`, so move the model first.

    Args:
        model: a model of sentence-transformers.
        tokens_per_batch: most tokens of a batch; a longer text is a batch of its own. None means 8192 on the CPU and
            16384 on a GPU.
        int8: compute the products of the encoder layers in int8, with other results: see
            `matmuls.integrations.transformers.optimize`. Has no effect on a model that sentence-transformers runs.

    Returns:
        An `Optimized`, which says in `reason` why sentence-transformers runs the model as it is, if it does. Its
        `undo()` restores the model.

    Raises:
        TypeError: if the model is neither a SentenceTransformer nor a CrossEncoder.
        ValueError: if tokens_per_batch is not positive, the model is already optimized, or int8 is given for a model
            that is not in float32 on a CPU with VNNI instructions.

    Examples:
        >>> from matmuls.bert import model_folder
        >>> from matmuls.integrations.sentence_transformers import optimize
        >>> from sentence_transformers import SentenceTransformer
        >>> model = SentenceTransformer(str(model_folder()), device="cpu")
        >>> handle = optimize(model)
        >>> model.encode(["How old are you?", "A cat sat on the mat."]).shape
        (2, 384)
    """
    if not isinstance(model, (SentenceTransformer, CrossEncoder)):
        raise TypeError(f"optimize: expected a SentenceTransformer or CrossEncoder, got {type(model).__name__}")
    if tokens_per_batch is not None and tokens_per_batch < 1:
        raise ValueError(f"optimize: expected a positive tokens_per_batch, got {tokens_per_batch}")
    if "_inference" in model.__dict__:
        raise ValueError("optimize: expected a model that is not optimized; call undo() of its handle first")
    settings, encoder = Settings(tokens_per_batch), None
    if why_not(model) is None:
        transformer: Any = model[0]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            encoder = integration.optimize(transformer.model, int8=int8)
        for warning in found:
            warnings.warn(str(warning.message), warning.category, stacklevel=2)  # in the caller's line
    inference = _scores if isinstance(model, CrossEncoder) else _inference
    model._inference = partial(inference, model, settings)  # type: ignore[method-assign]
    return Optimized(encoder, model, settings)
