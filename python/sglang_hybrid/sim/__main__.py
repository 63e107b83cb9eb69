"""`python -m sglang_hybrid.sim`."""

import sys

from sglang_hybrid.sim.cli import main

if __name__ == "__main__":
    sys.exit(main())
