"""`python -m nwor.cli`."""

import sys

from nwor.cli import main

sys.exit(main())
