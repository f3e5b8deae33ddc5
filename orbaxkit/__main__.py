"""`python -m orbaxkit`."""

import sys

from orbaxkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
