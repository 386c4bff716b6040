"""`python -m tvmconv`."""

import sys

from tvmconv.cli import main

sys.exit(main())
