"""`python -m beam_rl`: the command line."""

import sys

from beam_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
