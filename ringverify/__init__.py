"""The conformance suite: does this ring attention compute attention?

`from ringverify import AttentionCall, implementation` is all that a plug-in needs, and `balancer` where its sharding
depends on documents; `QueryKeySharding` and `PageTable` say how a growing cache lies; `merge` declares a merge of
partial results, `model` a model for `ringverify reach`; `run_conformance` and `conformance` check one from a test file,
`check_case` runs one case of `ringverify.strategies`. Importing this package does not
import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ringverify.implementation import AttentionCall, Implementation, implementation

if TYPE_CHECKING:
    from ringref.sharding import PageTable, QueryKeySharding, balancer
    from ringverify.merge_contract import MergeImplementation, merge
    from ringverify.reach.declared import model
    from ringverify.testing.conformance import conformance, run_conformance
    from ringverify.testing.one_case import check_case
    from ringverify.testing.results import ConformanceError

__all__ = [
    "AttentionCall",
    "ConformanceError",
    "Implementation",
    "MergeImplementation",
    "PageTable",
    "QueryKeySharding",
    "__version__",
    "balancer",
    "check_case",
    "conformance",
    "implementation",
    "merge",
    "model",
    "run_conformance",
]
__version__ = "0.1.0"

_ON_DEMAND = {
    "ConformanceError": "ringverify.testing.results",
    "MergeImplementation": "ringverify.merge_contract",
    "PageTable": "ringref.sharding",
    "QueryKeySharding": "ringref.sharding",
    "balancer": "ringref.sharding",
    "check_case": "ringverify.testing.one_case",
    "conformance": "ringverify.testing.conformance",
    "merge": "ringverify.merge_contract",
    "model": "ringverify.reach.declared",
    "run_conformance": "ringverify.testing.conformance",
}
"""Public names that are imported on first access, each with its module."""


def __getattr__(name: str) -> Any:
    """Import a public name on first access."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)
