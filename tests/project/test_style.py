"""Limits on the size of files, functions and folders, and on the language of comments and docstrings."""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES, MOST_FUNCTION_LINES, MOST_FILES = 500, 80, 25
CPP = {".h", ".cpp", ".cu", ".cuh"}
FOLDERS = ("src", "matmuls", "matmuls_cli", "custom_mm", "tests", "benchmarks", "examples", "tools")


def files(*suffixes: str) -> list[Path]:
    """Source files of the repository with one of these suffixes."""
    found = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*")) if p.suffix in suffixes]
    return [p for p in found if "__pycache__" not in p.parts]


def test_files_are_short():
    long = {
        str(p.relative_to(ROOT)): n for p in files(".py", *CPP) if (n := len(p.read_text().splitlines())) > MOST_LINES
    }
    assert not long


def test_folders_have_few_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:  # an unpacked archive
        pytest.skip("not a git repository")
    counts = Counter(str(Path(name).parent) for name in listed.stdout.splitlines())
    assert not {folder: n for folder, n in counts.items() if n > MOST_FILES}


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


# A definition in a formatted file begins in the first column, or behind two spaces in a class, and ends with its brace
# in the same column.
OPENS = re.compile(r"^(?P<indent>(?:  )?)(?P<head>[A-Za-z_~].*)\{(?:\s*//.*)?$")
NO_FUNCTION = re.compile(
    r"^\s*(?:namespace|struct|class|enum|union|extern|if|for|while|switch|else|do)\b|=\s*$|\breturn\b"
)


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """(first line, lines) of every function that is not device code."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        opened = OPENS.match(line)
        if not opened or NO_FUNCTION.search(opened["head"]) or "(" not in "".join(lines[max(i - 4, 0) : i + 1]):
            continue
        end = next((j for j in range(i + 1, len(lines)) if lines[j].startswith(opened["indent"] + "}")), i)
        begin = i
        while begin > 0 and lines[begin - 1].strip() and not re.search(r"[;{}]\s*$|^\s*(//|#)", lines[begin - 1]):
            begin -= 1
        head = " ".join(lines[begin : i + 1])
        if not re.search(r"__global__|__device__", head):
            yield lines[begin], end - begin + 1


def test_functions_are_short():
    """But for kernels, whose device code must be one function where it shares registers."""
    python = {f"{p.name}:{name}": n for p in files(".py") for name, n in python_functions(p) if n > MOST_FUNCTION_LINES}
    cpp = {
        f"{p.relative_to(ROOT)}: {head}": n
        for p in files(*CPP)
        for head, n in cpp_functions(p.read_text())
        if n > MOST_FUNCTION_LINES
    }
    assert not python | cpp


def test_functions_are_found():
    """The reading of C++ above sees most functions of a file."""
    found = [head for head, _ in cpp_functions((ROOT / "src/sparse/spmm/choose.cpp").read_text())]
    assert {"choose_split", "set_slots", "set_grid", "set_shares", "choose_rows"} <= {
        name for head in found for name in re.findall(r"(\w+)\(", head)
    }


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment and docstring."""
    text = path.read_text(encoding="utf-8")
    mark = r"//" if path.suffix in CPP else r"#"
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.search(rf"(?:^|\s){mark}(?!\S*include\b)\s?(.*)$", line):
            yield number, found[1]
    if path.suffix == ".py":
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
                yield getattr(node, "lineno", 1), docstring


# Phrases of a private language; the field has a term or a plain verb for each.
BANNED = re.compile(r"\btold\b|\bwent so\b|\bto be had\b|\bbeside\b|\bnobody looks\b|\bgoes by (twos|fours|eights)\b")


@pytest.mark.parametrize("path", files(".py", *CPP), ids=lambda p: str(p.relative_to(ROOT)))
def test_comments_are_plain_english(path):
    if path == Path(__file__).resolve():
        return
    found = list(comments(path))
    assert not [(line, text) for line, text in found if re.match(r"\W*Of\s", text)], "a comment that begins with Of"
    assert not [(line, text) for line, text in found if BANNED.search(text)]


# Identifiers of a private language. The right ones: row_in_block, messages, mbarrier, publish, poll, transposed_tile.
BANNED_NAMES = re.compile(r"\b(beside|row_beside|letters?|mailbox|Glance|Way|launch_early|bring|turn_among_four)\b")


@pytest.mark.parametrize("path", files(*CPP), ids=lambda p: str(p.relative_to(ROOT)))
def test_identifiers_are_terms_of_the_field(path):
    code = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
    assert not set(BANNED_NAMES.findall(code)), "see the glossary of CONTRIBUTING.md"


def literals(path: Path) -> Iterator[str]:
    """The string literals: names of operations, options, errors."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from (n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and type(n.value) is str)
    else:
        yield from re.findall(r'"((?:[^"\\\n]|\\.)*)"', text)


@pytest.mark.parametrize("path", files(".py", *CPP), ids=lambda p: str(p.relative_to(ROOT)))
def test_messages_are_plain_english(path):
    if "tests" not in path.relative_to(ROOT).parts:
        assert not [text for text in literals(path) if BANNED.search(text)]
