"""`python -m orbaxkit`."""

import sys

from orbaxkit.cli import main

sys.exit(main())
