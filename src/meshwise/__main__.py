"""`python -m meshwise` is `meshwise`."""

import sys

from meshwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
