"""`python -m ringverify` is the command `ringverify`."""

import sys

from ringverify.cli.main import main

code = main()
exec("")  # CPython remembers that Ctrl-C met an `exec`, and ends by signal 2 whatever came of it, unless one follows
sys.exit(code)
