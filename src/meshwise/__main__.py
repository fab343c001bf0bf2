"""`python -m meshwise`, and the script `meshwise`: nothing is loaded before Ctrl-C is answered in words."""

from __future__ import annotations

import sys


def _lost(told: sys.UnraisableHookArgs) -> None:
    """Show what could not be raised, but for a Ctrl-C that fell into a callback of an import: the command goes on."""
    if not issubclass(told.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(told)


def _of_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is what was raised, or what another error was made of: imports do so."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def main() -> int:
    """Run the command line and return its exit code."""
    sys.unraisablehook = _lost
    try:
        from meshwise.cli.main import main as run  # noqa: PLC0415

        return run()
    except BaseException as error:
        if not _of_interrupt(error):
            raise
        print("error: interrupted", file=sys.stderr)  # noqa: T201
        return 130
    finally:
        import gc  # noqa: PLC0415 -- as the next
        import signal  # noqa: PLC0415 -- takes milliseconds, in which Ctrl-C would be a traceback

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said
        gc.freeze()  # what is left goes with the process: looking through it took half of the end


if __name__ == "__main__":
    sys.exit(main())
