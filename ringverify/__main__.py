"""`python -m ringverify` is the command `ringverify`."""

import sys

from ringverify.cli.main import main

code = main()
# A KeyboardInterrupt that passes through an `exec` makes CPython end by SIGINT, even if it was caught; the next `exec`
# clears that.
exec("")
sys.exit(code)
