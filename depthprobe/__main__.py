"""`python -m depthprobe` is `depthprobe`."""

from __future__ import annotations

import sys

from depthprobe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
