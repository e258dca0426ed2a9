"""The command line: ``main(argv) -> int``, one file per verb, heavy imports inside the verbs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

__all__ = ["entry_point", "main", "run_command"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of ``rco``; returns the exit status of :func:`run_command`."""
    return run_command(_command(), argv, "rco")


def run_command(command: Any, argv: Sequence[str] | None, name: str) -> int:
    """Run a click command on its arguments, by default the process's; 0: success, 1: failure, 2: wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        command.main(args=arguments, prog_name=name)
    except SystemExit as request:
        return request.code if isinstance(request.code, int) else int(request.code is not None)
    except (ValueError, OSError, FloatingPointError) as error:
        # Errors that a user can fix are one line; others are defects and keep their traceback.
        from rco.cli.flags import as_flags

        sys.stderr.write(f"Error: {as_flags(str(error))}\n")
        return 1
    return 0


@cache
def _command() -> Any:
    """All commands with their options; made once per process, in a tenth of a second."""
    from typer.main import get_command

    from rco.cli.app import app

    return get_command(app)


def entry_point() -> None:
    """The ``rco`` console script."""
    sys.exit(main())
