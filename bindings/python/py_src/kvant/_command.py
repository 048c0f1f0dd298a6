"""The command `kvant`."""

import signal
import sys

from . import _kvant


def main() -> int:
    # Python's handler would wait for the end of the command.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _kvant.run_command(["kvant", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
