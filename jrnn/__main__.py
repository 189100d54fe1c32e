"""`python -m jrnn` is the command `jrnn`."""

import sys

from .cli import main

sys.exit(main())
