"""`python -m jrnn` is the command `jrnn`."""

import sys

from jrnn.cli import main

sys.exit(main())
