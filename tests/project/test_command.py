"""What every command does alike: it starts at once, shows progress, stops on Ctrl-C, and names what is missing."""

import io
import json
import re
import resource
import subprocess
import sys
import time
from importlib.metadata import version

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from matmuls import bert
from matmuls_cli import app, screen

COMMANDS = ("info", "bert", "embed", "bench", "bench-bert", "tune", "spmm", "report")
HEAVY = (
    "torch",
    "numpy",
    "scipy",
    "transformers",
    "sentence_transformers",
    "pyarrow",
    "matplotlib",
    "matmuls",
    "custom_mm",
)


def python(code, *args):
    """A process; stderr without the lines of progress, which a slow machine gets."""
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300)
    run.stderr = re.sub(r"^matmuls: \d+:\d\d .*\n", "", run.stderr, flags=re.MULTILINE)
    return run


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from typer.testing import CliRunner
from matmuls_cli.app import app
for args in ([], *([name] for name in {COMMANDS})):
    run = CliRunner().invoke(app, [*args, "--help"])
    assert run.exit_code == 0 and "Usage" in run.output, run.output
print([m for m in {HEAVY} if m in sys.modules])
"""
    run = python(code)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("args", [["--help"], ["spmm", "--help"]], ids=" ".join)
def test_help_is_quick(args):
    """Importing torch takes several seconds; the limits leave room for a busy machine."""
    walls, begin = [], resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(4):
        start = time.monotonic()
        run = subprocess.run([sys.executable, "-m", "matmuls_cli", *args], capture_output=True, text=True, timeout=60)
        walls.append(time.monotonic() - start)
        assert run.returncode == 0
        assert "Usage" in run.stdout
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime) / 4 < 1
    assert min(walls) < 4


@pytest.fixture
def alone(monkeypatch):
    """matmuls without matmuls-bench, that is without entry points."""
    monkeypatch.setattr(app, "entry_points", lambda **names: ())


@pytest.mark.parametrize("arguments", [[], ["--help"], ["x", "--quick"]], ids=" ".join)
@pytest.mark.parametrize("name", ["bench", "bench-bert", "spmm", "report"])
def test_a_command_of_matmuls_bench_says_what_to_install(alone, name, arguments):
    run = CliRunner().invoke(app.app, [name, *arguments])
    assert (run.exit_code, run.stdout) == (2, "")
    needed = "matmuls-bench, which is not installed; run in a clone of the repository: pip install ./benchmarks"
    assert run.stderr == f"matmuls: {name} is a command of {needed}\n"


def test_only_commands_that_are_installed_are_listed(alone):
    listed = re.findall(r"^│ ([a-z][a-z-]*) ", CliRunner().invoke(app.app, ["--help"]).stdout, re.M)
    assert listed == ["info", "bert", "embed", "tune"]


def test_own_commands_look_for_no_others(monkeypatch):
    def looked_up(**names):
        raise AssertionError(names)

    monkeypatch.setattr(app, "entry_points", looked_up)
    assert CliRunner().invoke(app.app, ["info", "--help"]).exit_code == 0
    assert CliRunner().invoke(app.app, ["--version"]).exit_code == 0


def test_a_command_of_matmuls_bench_takes_its_place():
    run = CliRunner().invoke(app.app, ["spmm", "-h"])
    assert run.exit_code == 0
    assert "Time every way to multiply the sparse matrices you name" in run.stdout


AT_IMPORT = """
import os, signal, sys
class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)
wanted = sys.argv.pop(1)
sys.meta_path.insert(0, AtImport())
from matmuls_cli import main
main()
"""


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("module", ["typer", "torch", "torch.nn", "matmuls", "transformers.models"])
def test_ctrl_c_during_an_import_is_one_line(module):
    """The signal comes when the module is looked up."""
    pytest.importorskip("transformers")
    run = python(AT_IMPORT, module, "bert", "x", "--device", "cpu")
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "matmuls: stopped\n")


@pytest.mark.exhaustive
def test_ctrl_c_during_a_run_is_one_line():
    pytest.importorskip("transformers")
    code = """
import os, signal, sys
from matmuls import bert
bert.Encoder.embed = lambda *args: os.kill(os.getpid(), signal.SIGINT)
from matmuls_cli import main
main()
"""
    run = python(code, "bert", "x", "--device", "cpu")
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "matmuls: stopped\n")


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize(
    ("package", "remedy", "args"),
    [
        ("scipy", "pip install scipy", ["spmm", "grid:4", "--device", "cpu"]),
        ("transformers", "pip install 'matmuls[bert]'", ["bert", "x", "--device", "cpu"]),
        ("transformers", "pip install 'matmuls[bert]'", ["bench-bert", "--tiny"]),
        ("torch", "pip install torch", ["bench", "--quick"]),
        (
            "sentence_transformers",
            "pip install 'matmuls[sentence-transformers]'",
            ["embed", __file__, "--model", "x", "--out", "new.npy", "--device", "cpu"],
        ),
        (
            "pyarrow",
            "pip install 'matmuls[parquet]'",
            ["embed", __file__, "--model", "x", "--out", "new.parquet", "--device", "cpu"],
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_a_package_that_is_not_installed_is_called_so(package, remedy, args):
    code = f"""
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Without())
from matmuls_cli import main
main()
"""
    run = python(code, *args)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"matmuls: {package}: not installed; run: {remedy}\n"


@pytest.mark.exhaustive
def test_info_runs_where_matmuls_cannot_be_imported():
    """As with another torch than it was built with."""
    code = """
import sys
class Beside:
    def find_spec(self, name, path=None, target=None):
        if name == "custom_mm":
            raise ImportError("custom_mm: built with torch 2.11, which does not run with torch 2.13", name=name)
sys.meta_path.insert(0, Beside())
from matmuls_cli import main
main()
"""
    run = python(code, "info")
    assert run.returncode == 1
    assert run.stderr == "matmuls: custom_mm: built with torch 2.11, which does not run with torch 2.13\n"
    assert re.search(rf"torch +{re.escape(version('torch'))}", run.stdout)
    facts = json.loads(python(code, "info", "--json").stdout)
    assert facts["error"] == run.stderr.removeprefix("matmuls: ").strip()
    assert (facts["torch"], facts["python"]) == (version("torch"), sys.version.split()[0])


def test_another_failing_import_keeps_its_words():
    assert screen.missing(ImportError("built for torch 2.11, got 2.13")) == "built for torch 2.11, got 2.13"
    own = ModuleNotFoundError("No module named 'matmuls.x'", name="matmuls.x")
    assert screen.missing(own) == "No module named 'matmuls.x'"


def test_progress_is_plain_lines_where_stderr_is_no_terminal(monkeypatch, capsys):
    with screen.Steps("first", total=4) as steps:
        steps.next("second")
    assert capsys.readouterr().err == ""  # nothing from a short command
    monkeypatch.setattr(screen, "LINE_SECONDS", 0.0)
    with screen.Steps("first", total=4) as steps:
        steps.show("first")
        steps.next("second")
        steps.restart("the measurements", total=2)
        steps.show("third", completed=0.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "matmuls: 0:00 first"
    assert re.fullmatch(r"matmuls: 0:00 second, 0:0\d left", lines[1])
    assert re.fullmatch(r"matmuls: 0:00 third, 0:0\d left", lines[2])


def test_progress_is_a_bar_on_a_terminal(monkeypatch):
    seen = io.StringIO()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(screen, "errors", Console(file=seen, force_terminal=True, width=100))
    with screen.Steps("first", total=4) as steps:
        steps.next("second")
        steps._bar.refresh()
    assert "second" in seen.getvalue()
    assert re.search(r"0:0\d left", seen.getvalue())


def test_time_left():
    assert [screen.time_left(10, done, 4) for done in (0, 1, 2, 4)] == ["", "0:30 left", "0:10 left", "0:00 left"]
    assert screen.time_left(100, 1, 3) == "3:20 left"


@pytest.fixture(scope="module")
def folder():
    pytest.importorskip("transformers")
    try:
        return bert.model_folder()
    except bert.ModelMissing as error:
        pytest.skip(str(error))


def test_bert_says_what_runs_as_often_as_it_says(folder):
    told = []
    bert.compare(["x"], folder, "cpu", torch.float32, "eager", True, None, told.append)
    assert len(told) == bert.parts("eager", True, False)
    assert told[:2] == ["running stock attention", "timing custom_mm"]
    assert told[-1] == "timing custom_mm, optimized with probabilities"


def test_the_picture_of_heads_says_what_it_shows(folder, monkeypatch, tmp_path):
    mpl = pytest.importorskip("matplotlib.figure")
    drawn, save = [], mpl.Figure.savefig
    monkeypatch.setattr(mpl.Figure, "savefig", lambda figure, *a, **k: (drawn.append(figure), save(figure, *a, **k)))
    encoder = bert.Encoder.load(folder, "cpu", torch.float32)
    encoder.draw_heads("How old are you?", "custom_mm", tmp_path / "heads.png")
    (figure,) = drawn
    assert figure.get_suptitle() == 'Attention of "How old are you?" in layer 6 of 6 of BertModel'
    *heads, scale = figure.axes
    assert [axes.get_title() for axes in heads] == [f"head {n}" for n in range(1, 13)]
    assert {axes.get_xlabel() for axes in heads[8:]} == {"key: token attended to"}
    assert {axes.get_ylabel() for axes in heads[::4]} == {"query: token that attends"}
    assert [t.get_text() for t in heads[0].get_xticklabels()] == ["[CLS]", "how", "old", "are", "you", "?", "[SEP]"]
    assert scale.get_ylabel() == "probability (each row sums to 1)"
    assert figure.get_supxlabel() == f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
