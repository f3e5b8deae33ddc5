"""What the commands write to stderr."""

import sys
from typing import Any

from orbaxkit.errors import shown


def warn_on_stderr(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line of ours, without the source line that Python adds."""
    print(f"warning: {shown(message)}", file=sys.stderr)
