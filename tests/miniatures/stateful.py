"""J2: an implementation that remembers its first call, right in every process that makes only one kind of call."""

import right

from ringverify import implementation

SCALES = []


@implementation(name="remembers", causal="both", gradients=False)
def remembers(q, k, v, call):
    """The scale of the first call serves all later ones, whatever their head_dim."""
    SCALES.append(call.scale)
    return right.attend.function(q * (SCALES[0] / call.scale), k, v, call)
