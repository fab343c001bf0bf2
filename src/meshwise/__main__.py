"""`python -m meshwise`, and the script `meshwise`: nothing is loaded before Ctrl-C is answered in words."""

import signal
import sys


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        from meshwise.cli.main import main as run  # noqa: PLC0415

        return run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)  # noqa: T201
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said


if __name__ == "__main__":
    sys.exit(main())
