"""`matmuls report`: pages, plots and quoted sentences made from the committed results."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import matmuls_report as report
from matmuls import cli
from matmuls_bench import figures, operations, timing
from matmuls_bench.operations import jobs
from matmuls_bench.table import TABLE
from matmuls_report import graphs, index
from matmuls_report.format import losses, number, table
from matmuls_report.format import lost as lost_rows
from matmuls_report.plot import Panel, Plot, data_of
from matmuls_report.results import Results

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGES = ("index", "dense", "inplace", "rows", "attention", "sparse", "masked", "encoders")

pytest.importorskip("transformers")  # the support page asks it which models look up their attention


@pytest.fixture(scope="module")
def made():
    return report.make(ROOT / "README.md", ROOT / "docs", RESULTS)


def run(*args):
    return CliRunner().invoke(cli.app, ["report", *map(str, args)])


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A source folder with README, docs and results, as the current one."""
    shutil.copytree(RESULTS, tmp_path / "benchmarks/results")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "README.md").write_text("# matmuls\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_committed_pages_are_up_to_date(made):
    assert made.stale() == []
    assert {ROOT / f"docs/performance/{page}.md" for page in PAGES} | {ROOT / "docs/support.md"} <= made.texts.keys()


def test_the_same_results_make_the_same_pages(made):
    again = report.make(ROOT / "README.md", ROOT / "docs", RESULTS)
    assert again.texts == made.texts
    assert {path: plot.data for path, plot in again.plots.items()} == {p: plot.data for p, plot in made.plots.items()}


@pytest.mark.exhaustive
def test_check_names_a_page_whose_result_changed_and_the_command(copied):
    file = copied / "benchmarks/results/bert-cuda.json"
    content = json.loads(file.read_text())
    content["rows"][0]["above_mib"] *= 2
    content["rows"][0]["peak_mib"] *= 2
    file.write_text(json.dumps(content))
    (copied / "README.md").write_text("<!-- report:memory -->\nold\n<!-- /report -->\n")
    checked = run("--check")
    assert checked.exit_code == 1
    told = checked.stderr.splitlines()
    for name in ("docs/performance/encoders.md", "docs/performance/index.md", "docs/assets/headline-memory.svg"):
        assert f"{name} is out of date; run: matmuls report" in told
    assert "README.md is out of date; run: matmuls report" in told
    assert not any("dense.md" in line for line in told)
    assert run().exit_code == 0
    assert "20,208 MiB" in (copied / "README.md").read_text()  # twice eager attention's 10,104
    assert run("--check").exit_code == 0


def bench_rows(share):
    """Rows as `matmuls bench` writes them now, of every case for a GPU; a call takes `share` times the GPU's time."""
    for spec in TABLE:
        for job in jobs.cases_of(spec, "cuda", []):
            names = [job.rival, *job.case.others, *([operations.DENSE] if job.case.dense else [])]
            names += [operations.COMPILED] * job.compiled
            replayed = [operations.REPLAYED] * job.replayed
            times = {"ours_us": 10.0, "rival": names[-1], "rival_us": 20.0, "ratio": 2.0, "roof": 0.5}
            times["rivals_us"] = dict.fromkeys(names, 20.0)
            if job.kind == "gpu":
                times |= {"called_us": 10.0 * share, "called_rival": names[0], "called_ratio": 30.0 / (10.0 * share)}
                times["called_rivals_us"] = dict.fromkeys((*names, *replayed), 30.0)
            if job.kind == "memory":
                times = {"rival": job.rival, "ratio": 2.0, "ours_mib": 1.0, "rival_mib": 2.0}
            yield job.row(**times)


@pytest.mark.parametrize(
    ("share", "time", "speed"), [(1.05, "10.5", "2.86 (GPU 2.00)"), (1.2, "12.0 (GPU 10.0)", "2.50 (GPU 2.00)")]
)
def test_figures_as_called_come_first(copied, share, time, speed):
    """The GPU's figure follows in brackets where it differs by more than 10 %."""
    file = copied / "benchmarks/results/bench-cuda.json"
    environment = json.loads(file.read_text())["environment"] | {"date": "2027-01-01"}
    rows = [asdict(row) for row in bench_rows(share)]
    for older in file.parent.glob("bench-cuda*.json"):
        older.unlink()
    file.write_text(json.dumps({"environment": environment, "rows": rows}))
    made = report.make(copied / "README.md", copied / "docs", copied / "benchmarks/results")
    text = {path.stem: text for path, text in made.texts.items() if path.parent.name == "performance"}
    assert f"| 30000x1280 | {speed} |" in text["inplace"]
    assert f"| forward | 12288x2048x2048 | span | {time} | {speed} | {speed} |" in text["masked"]
    assert re.search(rf"\| 26876x936 \| 0.500 \({re.escape(speed)}\)", text["rows"])
    assert f"| {time} | 30.0 | 30.0 | {speed} | {speed} |" in text["attention"]
    assert f"bfloat16 | {time} | 30.0 | {speed} | 0.500 |" in text["dense"]
    low, _, gpu = speed.partition(" (GPU ")
    told = f"{low} to {low} times as fast as eager torch (GPU time: {gpu[:-1]} to {gpu[:-1]})"
    assert f"{told} and " in text["index"]
    assert "as called, 8 cases" not in text["index"]
    assert "16-bit, as called, 16 cases" in text["index"]
    for page in ("inplace", "masked", "rows", "attention", "dense"):
        assert f"The speed is on average {low} (lowest {low}) in the " in text[page]
        assert text[page].count("*(GPU x)* is the figure by GPU time") == 1
        assert "Figures: as called." in text[page]
        assert "Times: GPU time." not in text[page]
    plot = next(plot for plot in made.plots.values() if plot.name == "performance/inplace")
    assert "30000x1280" in plot.panels[0].names
    assert "40000x1024" not in plot.panels[0].names
    assert "as called" in plot.panels[0].title


def test_files_without_times_as_called_say_gpu_time(made):
    for page in ("rows", "attention", "dense"):
        text = made.texts[ROOT / f"docs/performance/{page}.md"]
        assert "Times: GPU time." in text
        assert "(GPU " not in text
    assert "16-bit, GPU time, 8 cases" in made.texts[ROOT / "README.md"]


@pytest.mark.exhaustive
def test_a_page_that_is_made_no_more_is_removed(copied):
    old = copied / "docs/performance/old.md"
    old.write_text("old\n")
    assert "docs/performance/old.md is out of date" in run("--check").stderr
    assert run().exit_code == 0
    assert not old.exists()


def test_every_result_is_shown_or_not_shown_for_a_reason(made):
    page = made.texts[ROOT / "docs/performance/index.md"]
    for file in RESULTS.rglob("*.json"):
        name = file.relative_to(RESULTS).as_posix()
        line = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert ".md)" in line or "not shown: " in line
    with pytest.raises(ValueError, match=r"no page shows new\.json; add it to a page"):
        index.reason("new.json")


def test_tables_are_narrow_and_follow_a_sentence(made):
    for path, text in made.texts.items():
        if "docs/performance" in str(path):
            parts = text.split("\n\n")
            tables = [i for i, part in enumerate(parts) if part.startswith("|")]
            assert tables or path.name == "index.md"
            for i in tables:
                assert parts[i].split("\n")[0].count("|") <= 11, parts[i].split("\n")[0]
                assert re.search(r"\brow|same operations", parts[i - 1]), parts[i - 1]
    families = [path for path in made.texts if path.parent.name == "performance" and path.stem in PAGES[1:]]
    performance = [made.texts[path] for path in families]
    assert len(performance) == len(PAGES) - 1
    assert all("The lowest speed is" in text and "Measured on: " in text for text in performance)


def test_plots_have_title_labels_machine_and_a_line_at_one(made):
    assert {f"headline-{name}" for name in ("attention", "sparse", "memory")} <= {p.name for p in made.plots.values()}
    for plot in made.plots.values():
        assert plot.title
        assert re.search(r"(NVIDIA H\d00|CPU).*, torch 2\..*commit [0-9a-f]{7}", plot.caption), plot.caption
        for panel in plot.panels:
            assert panel.title
            assert panel.along
            assert re.search(r"(higher|lower) is better", panel.values)
            assert panel.ratio == ("relative to" in panel.values or "speed" in panel.values)
            assert len(panel.series) <= len(figures.COLOURS)


def test_drawing_is_reproducible_and_holds_its_data(made, tmp_path):
    kinds = {}
    for plot in made.plots.values():
        kinds.setdefault(plot.panels[0].kind, plot)
    assert kinds.keys() == {"bars", "strips", "lines"}
    for kind, plot in kinds.items():
        files = [tmp_path / f"{kind}{i}.svg" for i in range(2)]
        for file in files:
            plot.draw(file)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert data_of(files[0]) == plot.data
        assert data_of(files[0]) != replace(plot, caption="another").data


def test_what_is_drawn_has_the_labels(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(figures, "finish", lambda figure, *args, **kwargs: drawn.append((figure, args)))
    panels = [
        Panel("bars", "one", "speed (higher is better)", "case", {"a": [1, 2], "b": [3, None]}, ["x", "y"], ratio=True),
        Panel("lines", "two", "share (higher is better)", "columns", {"a": [0.5, 0.9]}, [64, 1024], ratio=True),
        Panel("strips", "three", "speed (higher is better)", "dtype", {"a": [0.5, 2.0]}, ratio=True, log=True),
    ]
    Plot("p", "The title", "The machine", panels).draw(tmp_path / "p.svg")
    ((figure, (_, caption)),) = drawn
    assert figure.get_suptitle() == "The title"
    assert caption == "The machine"
    bars, lines, strips = figure.axes
    assert (bars.get_xlabel(), bars.get_ylabel()) == ("speed (higher is better)", "case")
    assert (lines.get_xlabel(), lines.get_ylabel()) == ("columns", "share (higher is better)")
    assert strips.get_xlabel().startswith("speed (higher is better)")
    assert [t.get_text() for t in bars.get_legend().get_texts()] == ["a", "b"]
    for axes, at in ((bars, "get_xdata"), (lines, "get_ydata"), (strips, "get_xdata")):
        assert any(list(getattr(line, at)()) == [1.0, 1.0] for line in axes.lines)
    assert any("lowest 0.500" in text.get_text() for text in strips.texts)


def test_more_gpus_have_their_tables_with_what_was_predicted_of_them(copied):
    folder = copied / "benchmarks/results/cuda"
    of_four = json.loads((folder / "distributed-4.json").read_text())
    case = next(c for c in of_four["cases"] if (c["matrix"], c["dtype"]) == ("grid:4096", "float32"))
    model = next(m for m in of_four["models"] if (m["matrix"], m["dtype"]) == ("grid:4096", "float32"))
    seconds = next(row["seconds"] for row in model["predicted"] if row["gpus"] == 8)
    new = of_four | {"cases": [case | {"ranks": 8, "wall": case["wall"] | {"distributed plan": 0.000777}}]}
    (folder / "distributed-8.json").write_text(json.dumps(new))
    ways = [f"{name}, {where}" for name in ("matmuls", "nn.Linear") for where in ("divided", "alone")]
    seconds_of = dict.fromkeys(ways, 0.002)
    sizes = {"rows": 96, "ranks": 8, "dtype": "bfloat16", "seconds": seconds_of, "seconds_backward": seconds_of}
    module = sizes | {"case": "MaskedLinear", "by": "columns", "in": 48, "out": 32, "error": {"matmuls": 0.003}}
    step = sizes | {"case": "GCN", "graph": "grid:32", "efficiency": 0.5, "losses": {"divided": [4.5], "alone": [4.25]}}
    step["seconds"] = {"divided": 0.001, "alone": 0.004}
    rows = [step, module, {"case": "SparseLinear", "failed": "Traceback"}]
    models = {"environment": of_four["environment"], "rows": rows}
    (folder / "distributed-models-8.json").write_text(json.dumps(models))
    assert run().exit_code == 0
    page = (copied / "docs/performance/distributed.md").read_text()
    assert [page.index(f"## On {ranks} GPUs") for ranks in (2, 4, 8)] == sorted(
        page.index(f"## On {ranks} GPUs") for ranks in (2, 4, 8)
    )
    of_eight = page[page.index("## On 8 GPUs") :]
    assert "| distributed plan | predicted from 4 GPUs |" in of_eight
    assert f"| grid:4096, float32, 128 | 12.0 | 777 | {seconds * 1e6:.0f} |" in of_eight
    assert "| grid:32, bfloat16 | 96 | 1.00 | 4.00 | 0.50 | 4.50000 | 4.25000 |" in of_eight
    assert "| MaskedLinear, columns | 96 x 48 x 32 | forward | 2.00 | 2.00 |" in of_eight
    assert "1 of 3 cases ended with an error" in of_eight


def test_sentences_are_quoted_where_they_are_marked():
    results, path = Results(RESULTS), Path("x.md")
    inline = report.quoted("a <!-- report:cpu -->old<!-- /report --> b", results, path)
    assert re.fullmatch(r"a <!-- report:cpu -->On 2 CPU threads .*<!-- /report --> b", inline)
    assert report.quoted(inline, results, path) == inline
    block = report.quoted("<!-- report:cpu -->\n<!-- /report -->\n", results, path)
    assert block.splitlines()[1].startswith("On 2 CPU threads")
    assert (
        report.quoted("<!-- table: old -->\nx\n<!-- end -->", results, path) == "<!-- table: old -->\nx\n<!-- end -->"
    )
    with pytest.raises(ValueError, match=r"x\.md: no sentence named nothing; there are attention, .*, masked, cpu"):
        report.quoted("<!-- report:nothing --><!-- /report -->", results, path)


def test_without_docs_or_results_it_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for args in ((), ("--check",)):
        told = run(*args)
        assert told.exit_code == 2
        assert "expected the folder of the documentation, got docs, which is none" in told.stderr.replace("\n", " ")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("")
    assert "expected a folder with the JSON files of benchmarks" in run().stderr


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("bert-cuda.json", '{"environment"', "expected what a benchmark wrote in .*bert-cuda.json: JSONDecodeError"),
        ("bench-cuda.json", "[]", "expected what a benchmark wrote in .*bench-cuda.json"),
        ("spmm-cuda.json", None, "expected what a benchmark wrote in .*spmm-cuda.json: FileNotFoundError"),
        (
            "blocks-cuda.json",
            '{"environment": {"device": "x", "torch": "2"}, "rows": [{}]}',
            "for the page of .*sparse",
        ),
    ],
)
def test_malformed_results_are_named(copied, name, content, words):
    file = copied / "benchmarks/results" / name
    file.unlink() if content is None else file.write_text(content)
    before = (copied / "docs/performance/sparse.md").read_text()
    told = run()
    assert told.exit_code == 2
    assert re.search(words, told.stderr)
    assert (copied / "docs/performance/sparse.md").read_text() == before


def test_numbers_tables_and_losses():
    values = (0.0912, 0.9996, 1.0, 3.14159, 42.5, 99.96, 888.0, 999.6, 37901.3)
    assert [number(x) for x in values] == ["0.0912", "1.00", "1.00", "3.14", "42.5", "100", "888", "1,000", "37,900"]
    assert table(("case", "speed"), [("a", "1.20 (0.90)"), ("b", "")]).splitlines()[1] == "| --- | ---: |"
    told = losses([(1.5, "a"), (0.98, "b"), (0.999, "c"), (None, "d")], "torch")
    lost = "In 1 of 3 cases, matmuls is more than 0.5 % slower than torch."
    assert told == f"**Slower cases.** {lost} The lowest speed is 0.980 (b)."
    rows = lost_rows([("x", [(1.5, "a"), (0.98, "b"), (None, "c")]), ("y", [(0.9, "a")])]).splitlines()
    assert rows[2:] == ["| x | 1 of 2 | 0.980 | b |", "| y | 1 of 1 | 0.900 | a |"]


def test_measured_names_every_machine_and_file_once(made):
    page = made.texts[ROOT / "docs/performance/sparse.md"]
    assert "Measured on: H200 (`spmm-cuda.json`), H100 (`spmm-h100.json`).\n" in page
    assert "AMD EPYC (family 26), two cores, 2 threads (`spmm-cpu.json`)" in page


def test_steps_captured_in_cuda_graphs_have_their_own_table(copied):
    file = copied / "benchmarks/results/pyg-steps-cuda.json"
    content = json.loads(file.read_text())
    for row in content["rows"]:
        row["ways"] = {name: way for name, way in row["ways"].items() if not name.endswith(", captured")}
        row["ways"]["plan"] = {"ms": row["ways"]["torch.sparse"]["ms"]}
        row["ways"]["plan, captured"] = {"ms": row["ways"]["torch.sparse"]["ms"] / 4}
        row["ways"]["torch.sparse, captured"] = {"error": "not permitted when stream is capturing"}
    row["ways"]["torch.sparse, captured"] = {"ms": row["ways"]["torch.sparse"]["ms"] / 8}
    file.write_text(json.dumps(content))
    text = graphs.steps(Results(copied / "benchmarks/results")).text
    assert "| model | graph | width | torch.sparse | plan |" in text
    mean = timing.geometric_mean([4] * (len(content["rows"]) - 1) + [0.5])
    assert f"*plan* is {number(mean)} times as fast as torch.sparse in the same model (geometric mean)" in text
