"""What the tests of optimize share."""

import pytest
import torch

transformers = pytest.importorskip("transformers")


KNOWN = ("bert", "bert decoder", "roberta", "electra", "distilbert", "albert", "vit")


def hidden(model, batch, **wanted):
    with torch.no_grad():
        return model(**batch, **wanted).last_hidden_state
