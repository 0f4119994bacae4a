"""The report in one HTML file: what it says, and that a browser shows it."""

import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.compat.dynamo_log import CodePlace, GraphBreak, Uncompiled
from bcg_compiler.debug.report import PassDiff, Report, page, read_passes, write_report
from bcg_compiler.debug.report.changes import MOST_LINES, changed_lines
from bcg_compiler.debug.report.content import content
from bcg_compiler.debug.report.layers import layer_of, rows_of
from bcg_compiler.debug.steps import StepTime
from bcg_compiler.plan import Plan, plan_text
from bcg_compiler.runtime import programs_of

BUCKETS = [*range(8, 8 * 59, 8)]


@torch.library.custom_op("bcg_test_report::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x * 2


@opaque.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.after = nn.Linear(8, 8)

    @bcg.eager_break(mutates_args=("out",))
    def attention(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x.cumsum(0))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.attention(self.before(x).relu(), out)
        return x + self.after(out).relu()


class Layered(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).relu()
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.ops.bcg_test_report.opaque(x)).relu()


def plan_of(layers: int, **options: Any) -> Plan:
    bcg.reset()
    model = Layered(layers)
    compiled = torch.compile(model, backend="bcg", options=options or None)
    x = torch.rand(16, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.inference_mode():
        compiled(x)
    (program,) = programs_of(compiled)
    assert program.plan is not None
    return program.plan


@pytest.fixture(scope="module")
def small() -> Plan:
    return plan_of(6)


@pytest.fixture(scope="module")
def deep() -> Plan:
    return plan_of(61, ladder=BUCKETS, assume_rows_independent=True)


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


# -- what it says


def test_each_layer_is_a_row_and_every_operation_is_in_one(small: Plan) -> None:
    rows = rows_of(small)
    assert [row.label for row in rows] == ["embed", *(f"layers.{i}" for i in range(6)), "head"]
    for step in small.steps:
        pieces = [piece for row in rows for piece in row.pieces if piece.step == step.index]
        assert sum(piece.ops for piece in pieces) == len(step.nodes)
        assert sum(piece.kernels for piece in pieces) == step.kernels
        assert [piece.begins for piece in pieces] == [True, *[False] * (len(pieces) - 1)]
        assert [piece.ends for piece in pieces] == [*[False] * (len(pieces) - 1), True]


@pytest.mark.parametrize(
    ("module", "layer"),
    [("model.layers.3.mlp.experts.0", "model.layers.3"), ("0.linear", "0"), ("lm_head", ""), ("layer1.conv", "")],
)
def test_a_layer_is_the_path_up_to_the_first_number(module: str, layer: str) -> None:
    assert layer_of(module) == layer


def test_61_layers_and_58_buckets_are_a_small_file(deep: Plan) -> None:
    text = page(Report("deep", [deep], lengths=[9, 100, 464, 500]))
    assert len(text.encode()) < 1_000_000
    (graph,) = data_of(text)["graphs"]
    assert len(graph["steps"]) == len(deep.steps) and len(deep.breaks) == 62
    _, period, repeats, labels = max(graph["blocks"], key=lambda block: block[2])
    assert (period, repeats, labels) == (1, 59, ["layers.{1…59}"])
    assert [use[0] for use in graph["buckets"]] == BUCKETS
    used = {rows: (prompts, live, padded) for rows, _, prompts, live, padded in graph["buckets"] if prompts}
    assert used == {16: (1, 9, 7), 104: (1, 100, 4), 464: (1, 464, 0)}
    assert graph["above"] == 1
    alone = [sum(use[1]) for use in graph["buckets"]]
    assert alone == sorted(alone) and alone[-1] <= sum(graph["forecast"])


def test_a_step_knows_its_reasons_lines_values_and_times(small: Plan) -> None:
    times = [
        StepTime(index=1, kind="break", name="", start_us=0.0, host_us=12.5, device_us=None),
        StepTime(index=1, kind="fill", name="", start_us=0.0, host_us=2.0, device_us=None),
        StepTime(index=2, kind="fill", name="", start_us=0.0, host_us=1.0, device_us=3.0),
    ]
    data = content(Report("small", [small], length=16, times={0: times}))
    (graph,) = data["graphs"]
    step = graph["steps"][1]
    assert step["break"] and step["codes"] == ["eager_break"] and step["time"] == [12.5, None]
    assert "time" not in graph["steps"][2] and graph["other_times"] == {"fill": [3.0, 3.0]}
    _, text, op, module, source, remedy = step["reasons"][0]
    assert data["modules"][module] == "layers.0" and "attention" in data["ops"][op] and text and remedy
    file, line, code = data["sources"][source]
    assert file.endswith("test_report.py") and code == "self.attention(self.before(x).relu(), out)" and line > 0
    made = small.steps[0].outputs[-1]
    assert graph["sizes"] == {"s0": 16} and graph["values"][made][5] == 16 * 8 * 4
    assert step["peak"] is not None


def test_measured_times_are_those_of_the_steps() -> None:
    bcg.reset()
    compiled = torch.compile(Layered(2), backend="bcg")
    x = torch.rand(16, 8)
    with torch.inference_mode():
        compiled(x)
        compiled(x)
        (program,) = programs_of(compiled)
        with bcg.trace(compiled) as timeline:
            compiled(x)
    times = timeline.steps(1)
    (graph,) = content(Report("traced", [program.plan], times={0: times}))["graphs"]
    assert [step["time"][0] > 0 for step in graph["steps"]] == [True] * len(program.plan.steps)
    assert graph["other_times"].keys() == {"fill", "copy_back"} & {time.kind for time in times}


def test_breaks_say_what_would_remove_them(small: Plan) -> None:
    (graph,) = content(Report("small", [small]))["graphs"]
    found = {one["code"]: one for one in graph["breaks"]}
    assert found["eager_break"]["times"] == found["eager_break"]["alone"] == 6
    assert "capturable" in found["unknown_op"]["remedies"][0]
    ((_, places),) = found["eager_break"]["texts"]
    assert [where for _, where, _ in places] == ["layers.{0…5}"]


def test_without_a_length_no_bytes_are_made_up(small: Plan) -> None:
    (graph,) = content(Report("small", [small]))["graphs"]
    assert graph["sizes"] == {} and graph["forecast"] is None
    assert all(step["peak"] is None for step in graph["steps"] if step["allocations"])


def test_names_of_a_model_are_never_html(small: Plan) -> None:
    text = page(Report("</script><script>alert(1)</script>", [small, None], note="<img src=x onerror=alert(1)>"))
    assert "alert(1)</script>" not in text and "<img" not in text
    assert data_of(text)["label"] == "</script><script>alert(1)</script>"


def test_nothing_is_loaded_from_elsewhere(small: Plan) -> None:
    text = page(Report("small", [small]))
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", text)


# -- passes


def test_only_what_changed_is_shown_of_a_long_text() -> None:
    before = "\n".join(f"line {i}" for i in range(5000))
    found = changed_lines(before, before.replace("line 2500\n", "line 2500\n  break\n"))
    assert found == [
        ("@", "line 2500"),
        (" ", "line 2499"),
        (" ", "line 2500"),
        ("+", "  break"),
        (" ", "line 2501"),
        (" ", "line 2502"),
    ]
    everything = changed_lines("", before)
    assert len(everything) == MOST_LINES + 1 and "more" in everything[-1][1]
    assert changed_lines(before, before) == []


def test_passes_are_read_from_the_dump_that_made_the_plan(small: Plan, tmp_path: Path) -> None:
    for name, text in (("000_dropped", "another plan"), ("001_forward", plan_text(small))):
        (tmp_path / name / "passes").mkdir(parents=True)
        (tmp_path / name / "plan.txt").write_text(text)
        for file, graph in (("00_dynamo", "a\n"), ("03_mark_a", "a\nb\n"), ("11_mark_b", f"a\nc of {name}\n")):
            (tmp_path / name / "passes" / f"{file}.txt").write_text(graph)
    found = read_passes(tmp_path, [None, small])
    assert found == {
        1: (PassDiff("mark_a", "a\n", "a\nb\n"), PassDiff("mark_b", "a\nb\n", "a\nc of 001_forward\n")),
    }


# -- in a browser


def browser() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is installed (make browser)")
    return found


@pytest.fixture
def look(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Open a file in a browser, and give what the page has become; fails if its script complained."""
    found = browser()

    def run(file: Path, fragment: str = "", *more: str) -> str:
        command = [found, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        command += ["--disable-dev-shm-usage", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
        command += [*(more or ["--dump-dom"]), f"{file.as_uri()}{fragment}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert done.returncode == 0 and not said, (said, done.stderr[-2000:])
        return done.stdout

    yield run


def pieces(dom: str) -> list[str]:
    return re.findall(r'<button class="(piece [^"]*)"', dom)


def test_a_fragment_opens_a_step(small: Plan, tmp_path: Path, look: Callable[..., str]) -> None:
    file = tmp_path / "report.html"
    write_report(Report("<b>small</b>", [small], length=16), file)
    dom = look(file, "#step-7")
    assert "<h1>&lt;b&gt;small&lt;/b&gt;</h1>" in dom
    assert 'id="step-7-panel"' in dom and "Step 7: break" in dom
    assert "self.attention(self.before(x).relu(), out)" in dom
    every = sum(len(row.pieces) for row in rows_of(small))
    assert len(pieces(dom)) == every and len([one for one in pieces(dom) if "chosen" in one]) == 1
    assert len(pieces(look(file))) < every  # layers that are alike are folded as long as no step of theirs is chosen


#: Works the page as a reader would, and notes what is to be seen after each step.
WORK = """
const seen = [];
const note = () => seen.push(document.querySelector("#panel h2").textContent);
const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
note();
document.querySelector('.piece[data-step="1"]').click(); note();
press("ArrowRight"); note();
press("n"); note();
press("ArrowDown"); note();
press("Escape"); note();
const find = document.querySelector("input[type=search]");
find.value = "opaque"; find.dispatchEvent(new Event("input"));
seen.push([...document.querySelectorAll(".piece:not(.faint)")].map((one) => one.dataset.step).join());
for (const tab of ["breaks", "memory", "values", "passes", "outside"]) {
  document.getElementById(`tab-${tab}`).click();
  seen.push(document.getElementById("main").textContent);
}
const result = document.createElement("pre");
result.id = "seen"; result.textContent = JSON.stringify(seen);
document.body.append(result);
"""


def test_clicks_and_keys_show_steps_and_tabs(deep: Plan, tmp_path: Path, look: Callable[..., str]) -> None:
    uncompiled = Uncompiled(graph_breaks=(GraphBreak("a call of print", 2, (CodePlace("model.py", 7, "f"),)),))
    passes = {0: (PassDiff("mark_break_functions", "a\n", "a\n       break: eager_break\n"),)}
    text = page(Report("deep", [deep], uncompiled, lengths=[9, 100], passes=passes))
    file = tmp_path / "report.html"
    file.write_text(text.replace("</body>", f"<script>{WORK}</script></body>"))
    found = re.search(r'<pre id="seen">(.*?)</pre>', look(file), re.DOTALL)
    assert found is not None
    seen = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert seen[:6] == [
        "What stands between the segments",
        "Step 1: break eager_break",
        "Step 2: segment ",
        "Step 3: break eager_break",
        "Step 5: break eager_break",
        "What stands between the segments",
    ]
    assert seen[6] == str(deep.breaks[-1].index)
    breaks, memory, values, passed, outside = seen[7:]
    assert "declared a break" in breaks and "61 operations in 61 breaks" in breaks
    assert "58 buckets" in memory and "2 prompts, 11 padded tokens over 109 live ones: 10.1%" in memory
    assert "What a call gives" in values and "float32[s0, 8]" in values
    assert "mark_break_functions61" in passed and "+        break: eager_break" in passed
    assert "a call of print" in outside and "model.py:7 f" in outside


def test_the_page_is_drawn(deep: Plan, tmp_path: Path, look: Callable[..., str]) -> None:
    file, picture = tmp_path / "report.html", tmp_path / "report.png"
    write_report(Report("deep", [deep]), file)
    look(file, "#step-1", f"--screenshot={picture}", "--window-size=1200,800")
    assert colours(picture) > 100


def colours(picture: Path) -> int:
    """How many different bytes the lines of a PNG hold: a blank page has next to none."""
    data, at, packed = picture.read_bytes(), 8, b""
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + size]
        at += 12 + size
    return len(set(zlib.decompress(packed)))
