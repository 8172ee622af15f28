"""`python -m apportion`, and `torchrun … -m apportion selftest`."""

import sys

from apportion.cli import main

sys.exit(main())
