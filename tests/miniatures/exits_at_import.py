"""A script, not a module: it ends the interpreter."""

import sys

sys.exit(4)
