"""The conformance suite: does this ring attention compute attention?

`from ringverify import AttentionCall, implementation` is all that a plug-in needs. Importing this package does not
import torch.
"""

from ringverify.implementation import AttentionCall, Implementation, implementation

__all__ = ["AttentionCall", "Implementation", "__version__", "implementation"]
__version__ = "0.1.0"
