"""`python -m sglang_hybrid`: the same as the command `sglang-hybrid`."""

import sys

from sglang_hybrid.cli import main

if __name__ == "__main__":
    sys.exit(main())
