"""`python -m offbeat` is the command line, as `offbeat` is where it is on the path."""

import sys

from offbeat.cli.main import main

if __name__ == "__main__":  # else a process of the demo's has imported it
    sys.exit(main())
