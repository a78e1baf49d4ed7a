"""`python -m bo_tuner` is `bo-tuner`."""

import sys

from bo_tuner.cli import main

if __name__ == "__main__":
    sys.exit(main())
