"""The command `matmuls`. It is a package of its own, because importing matmuls imports torch, which takes seconds:
here that happens when a command runs, and --help answers at once."""

import os
import signal
import sys
from types import FrameType
from typing import Any

STOPPED = "matmuls: stopped"


def main() -> None:
    """Run the command line. Ctrl-C ends it at any moment with one line and exit status 130."""
    signal.signal(signal.SIGINT, _stop)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads; without it torch's profiler logs to stderr
    from .app import app

    try:
        app()
    except ImportError as error:
        from .screen import fail, missing

        sys.exit(fail(missing(error)).exit_code)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what runs at the interpreter's end shows no traceback


def _stop(number: int, frame: FrameType | None) -> Any:
    """Ends the process by SystemExit, which closes what is open; during an import at once, because modules such as
    torch's, which are written in C, lose an exception or show it."""
    at_once = _is_importing(frame)
    if sys.stderr.isatty():
        os.write(2, b"\r\x1b[2K\x1b[?25h")  # the line of a progress bar is cleared, and the cursor shown
    os.write(2, f"{STOPPED}\n".encode())
    if at_once:
        os._exit(128 + number)
    raise SystemExit(128 + number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
