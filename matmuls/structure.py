"""Old name of matmuls.sparse.csr_pattern, which pickled plans of earlier versions hold."""

from .sparse.csr_pattern import Blocks  # noqa: F401
from .sparse.csr_pattern import CsrPattern as Structure  # noqa: F401
