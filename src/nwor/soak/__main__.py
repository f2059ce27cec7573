"""See `nwor.soak.cli`."""

import sys

from nwor.soak.cli import main

if __name__ == "__main__":
    sys.exit(main())
