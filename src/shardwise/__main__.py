"""`python -m shardwise`, which is the command `shardwise`."""

import sys

from shardwise.run.command import main

if __name__ == "__main__":
    sys.exit(main())
