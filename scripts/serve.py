"""Starts `ccjax serve` from a checkout, installed or not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ccjax.cli.serve import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
