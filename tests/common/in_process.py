"""Runs commands and scripts in this process: another one spends seconds on importing torch and transformers."""

import contextlib
import io
import re
import runpy
import sys
from types import SimpleNamespace
from unittest import mock

from typer.testing import CliRunner

from matmuls_cli.app import app


def matmuls(*args):
    """The command `matmuls`; stderr without the lines of progress, which a slow machine gets. test_command.py tests
    what a process of its own adds."""
    run = CliRunner().invoke(app, [str(arg) for arg in args])
    stderr = re.sub(r"^matmuls: \d+:\d\d .*\n", "", run.stderr, flags=re.MULTILINE)
    return SimpleNamespace(returncode=run.exit_code, stdout=run.stdout, stderr=stderr)


def script(path, *args):
    """A Python file as `python path args` runs it. Warnings go to pytest."""
    code, out, errors = 0, io.StringIO(), io.StringIO()
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors)
    given = mock.patch.object(sys, "argv", [str(path), *map(str, args)])
    paths = mock.patch.object(sys, "path", [str(path.parent), *sys.path])
    with streams[0], streams[1], given, paths:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
            if not isinstance(code, int):
                print(code, file=errors)
                code = 1
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=errors.getvalue())
