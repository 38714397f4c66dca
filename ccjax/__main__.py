"""`python -m ccjax` is the command `ccjax`."""

import sys

from ccjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
