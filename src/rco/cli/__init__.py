"""The command line: ``main(argv) -> int``, one file per verb, heavy imports inside the verbs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

__all__ = ["entry_point", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 for success, 1 for failure, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _command().main(args=arguments, prog_name="rco")
    except SystemExit as request:
        return request.code if isinstance(request.code, int) else int(request.code is not None)
    except (ValueError, OSError, FloatingPointError) as error:
        # What a user can mend is said in one line; anything else is a defect and keeps its traceback.
        from rco.cli.flags import as_flags

        sys.stderr.write(f"Error: {as_flags(str(error))}\n")
        return 1
    return 0


@cache
def _command() -> Any:
    """The verbs with their options, made once per process: a tenth of a second."""
    from typer.main import get_command

    from rco.cli.app import app

    return get_command(app)


def entry_point() -> None:
    """The ``rco`` console script."""
    sys.exit(main())
