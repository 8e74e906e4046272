"""The conformance suite: does this ring attention compute attention?

`from ringverify import AttentionCall, implementation` is all that a plug-in needs; `run_conformance` and `conformance`
try one from a test file. Importing this package does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ringverify.implementation import AttentionCall, Implementation, implementation

if TYPE_CHECKING:
    from ringverify.testing.conformance import conformance, run_conformance
    from ringverify.testing.results import ConformanceError

__all__ = [
    "AttentionCall",
    "ConformanceError",
    "Implementation",
    "__version__",
    "conformance",
    "implementation",
    "run_conformance",
]
__version__ = "0.1.0"

_ON_DEMAND = {
    "ConformanceError": "ringverify.testing.results",
    "conformance": "ringverify.testing.conformance",
    "run_conformance": "ringverify.testing.conformance",
}
"""Names that this package hands out when they are asked for, and where they live."""


def __getattr__(name: str) -> Any:
    """One of them."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)
