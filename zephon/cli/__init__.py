"""The command line: `zephon verify`, `explain`, `bench` and `doctor`. One command a file; this one puts them together.

Exit status: 0 all is well, 1 the command found what it looks for, 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from zephon.errors import ZephonError

FOUND = 1
WRONG_USE = 2
INTERRUPTED = 130

_MISSING = "zephon's command line needs {name}, which is not installed: pip install zephon[cli]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status. `arguments`: those of the process where None."""
    try:
        app = _app()
    except ImportError as error:
        if error.name not in ("typer", "click", "rich"):
            raise
        return _wrong(_MISSING.format(name=error.name))
    try:
        status = app(args=None if arguments is None else list(arguments), prog_name="zephon", standalone_mode=True)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
    except ZephonError as error:
        return _wrong(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    return status if isinstance(status, int) else 0


def _wrong(message: str) -> int:
    print(f"zephon: {message}", file=sys.stderr)
    return WRONG_USE


def _app() -> Any:
    """The commands. Their packages are loaded here, so that importing zephon never needs them."""
    import rich  # noqa: F401  # typer works without it, the commands do not
    import typer

    from zephon.cli.bench import bench
    from zephon.cli.doctor import doctor
    from zephon.cli.explain import explain
    from zephon.cli.verify import verify

    app = typer.Typer(
        help="Zephon: the same training stream on any number of workers, machines and GPUs.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.command()(verify)
    app.command()(explain)
    app.command()(bench)
    app.command()(doctor)
    return app
