"""`python -m ringverify` is the command `ringverify`."""

import sys

from ringverify.cli import main

sys.exit(main())
