"""``python -m specrs``: the command line."""

import sys

from specrs.cli import main

sys.exit(main())
