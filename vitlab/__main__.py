"""``python -m vitlab`` is the ``vitlab`` command."""

import sys

from vitlab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
