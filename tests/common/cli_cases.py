"""What the tests of cli share."""

import pytest

pytest.importorskip("transformers")
