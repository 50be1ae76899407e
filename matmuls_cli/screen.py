"""What commands show: results on stdout, errors and progress on stderr, Ctrl-C without a traceback."""

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

KEPT = "\n\u200c\u200d"  # line ends, and the joiners of Persian and of emoji
LINE_SECONDS = 10.0  # time between two lines of progress where stderr is no terminal: short commands print none
REMEDIES = {  # package -> what installs it
    "matplotlib": "pip install 'matmuls[plot]'",
    "pyarrow": "pip install 'matmuls[parquet]'",
    "sentence_transformers": "pip install 'matmuls[sentence-transformers]'",
    "transformers": "pip install 'matmuls[bert]'",
}


def clean(text: str) -> str:
    """Text as a terminal may show it: control characters, and others that it would not show as they are, escaped.

    Names of files, columns or words come from others; they could move the cursor, or turn the line around. Line ends
    are kept: they are those of our own tables and lists.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in KEPT else c.encode("unicode_escape").decode() for c in text)


class _Screen(Console):
    """All strings that it prints, also those of tables, are shown as they are: without rich's markup, and clean."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:  # what rich calls for every string
        return super().render_str(clean(text), **options)


console = _Screen(width=None if sys.stdout.isatty() else 160)
errors = _Screen(stderr=True)


def line(text: str) -> str:
    """Clean, and on one line."""
    return clean(text.replace("\n", "\\n"))


def fail(*messages: str, status: int = 2) -> typer.Exit:
    """Print a line each to stderr; the returned exception exits with `status`: 2 for wrong usage or a missing
    requirement, 1 for a result that is not as it must be."""
    shown = "\n".join(map(line, messages))
    errors.print(f"matmuls: {shown}", style="red", highlight=False, soft_wrap=True)
    return typer.Exit(status)


def warn(message: str) -> None:
    errors.print(f"matmuls: {line(message)}", style="yellow", highlight=False, soft_wrap=True)


def missing(error: ImportError) -> str:
    """An import that failed, in one line: a package that is not installed is called so."""
    if not isinstance(error, ModuleNotFoundError) or not error.name or error.name.split(".")[0].startswith("matmuls"):
        return str(error)
    name = error.name.split(".")[0]
    if name != error.name or name.startswith(("_", "custom_mm")):  # a submodule, or nothing that pip would add
        return str(error)
    return f"{name}: not installed; run: {REMEDIES.get(name, f'pip install {name}')}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or the name of its class."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def need_writable(option: str, folder: Path) -> None:
    """Create `folder` and write a temporary file to it, so that a long run does not fail when it saves its results."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise fail(f"{option}: expected a folder that can be written, got {folder}: {error.strerror}") from None


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02d}"


def time_left(elapsed: float, done: float, total: float) -> str:
    """ "1:05 left" at the mean speed so far; "" as long as nothing is done."""
    return f"{clock(elapsed / done * (total - done))} left" if done > 0 else ""


class _TimeLeft(ProgressColumn):
    """rich's own column knows nothing before the second step, which takes a minute in some commands."""

    def render(self, task: Task) -> Text:
        return Text(time_left(task.elapsed or 0.0, task.completed, task.total or 0.0), style="progress.remaining")


class Steps:
    """Progress over `total` steps on stderr: on a terminal a bar with the time left, which is removed at the end;
    elsewhere at most every LINE_SECONDS seconds a plain line, with the time since the start."""

    def __init__(self, now: str, total: float) -> None:
        self.total, self.completed = total, 0.0
        self._start = self._begin = self._printed = time.monotonic()
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), _TimeLeft()
        self._bar = Progress(*columns, console=errors, disable=not sys.stderr.isatty(), transient=True)
        self._task = self._bar.add_task(line(now), total=total)

    def __enter__(self) -> "Steps":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def show(self, now: str, completed: float | None = None, total: float | None = None) -> None:
        """Say what runs now, and how many steps are done (by default as many as before)."""
        self.total = self.total if total is None else total
        self.completed = self.completed if completed is None else completed
        now = line(now)
        self._bar.update(self._task, description=now, completed=self.completed, total=self.total)
        moment = time.monotonic()
        if self._bar.disable and moment - self._printed >= LINE_SECONDS:
            self._printed = moment
            left = time_left(moment - self._begin, self.completed, self.total)
            print(
                f"matmuls: {clock(moment - self._start)} {now}" + (f", {left}" if left else ""),
                file=sys.stderr,
                flush=True,
            )

    def restart(self, now: str, total: float | None = None) -> None:
        """The steps begin here: the time before, such as that of imports, says nothing of theirs."""
        self.total = self.total if total is None else total
        self.completed, self._begin = 0.0, time.monotonic()
        self._bar.reset(self._task, description=line(now), total=self.total)

    def next(self, now: str, steps: float = 1) -> None:
        """`steps` more are done, and `now` runs."""
        self.show(now, self.completed + steps)


@contextmanager
def may_be_stopped() -> Iterator[list[int]]:
    """Ctrl-C (SIGINT) and SIGTERM end the block without an exception; the yielded list then holds the exit status."""
    stopped: list[int] = []

    def stop(number: int, frame: Any) -> None:
        stopped.append(128 + number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    except KeyboardInterrupt:
        errors.print("stopped; the results below were measured before the stop")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
