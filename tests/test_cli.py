"""The command line: what is asked for, what is answered, and with which exit code."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bcg_compiler as bcg
from bcg_compiler.cli import app
from bcg_compiler.debug.explain import plan_model

FACTORIES = """
    import torch
    import bcg_compiler as bcg


    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def example_inputs(self, length):
            return {"x": torch.rand(1, length, 4)}

        def forward(self, x):
            self.calls.add_(1)
            return {"hidden": [self.inner(x), self.calls.clone()], "length": x.shape[1]}


    class WithBreak(Model):
        @bcg.eager_break(mutates_args=("out",))
        def attention(self, x, out):
            out.copy_(x.cumsum(1))

        def forward(self, x):
            out = torch.empty_like(x)
            h = self.inner(x).relu()
            self.attention(h, out)
            return self.inner(out).relu()


    class BreakWithoutFake(Model):
        @bcg.eager_break
        def double(self, x):
            return x * 2

        def forward(self, x):
            return self.double(x)


    class DrawsAndHasNans(Model):
        def forward(self, x):
            return (x - 0.5).log() + torch.rand_like(x)


    class OtherWhenCompiled(Model):
        def forward(self, x):
            return self.inner(x) + (0.25 if torch.compiler.is_compiling() else 0.0)


    class CountsOtherwiseWhenCompiled(Model):
        def forward(self, x):
            self.calls.add_(2 if torch.compiler.is_compiling() else 1)
            return self.inner(x)


    class ReadsItem(Model):
        def forward(self, x):
            y = self.inner(x)
            return y + 1 if y.sum().item() > 0 else y - 1


    class OneGraphForEachLength(Model):
        def forward(self, x):
            for position in range(x.shape[1]):
                x = x + position
            return x


    class AddsUpRows(Model):
        def forward(self, x):
            return (x + 1).sum(1, keepdim=True) + self.inner(x)


    class Fails(Model):
        def forward(self, x):
            raise ValueError("this model is broken")


    def failing_factory():
        raise RuntimeError("no weights to be found")


    def no_inputs():
        return torch.nn.Linear(4, 4)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a module of factories, as the current one."""
    (tmp_path / "user_factories.py").write_text(textwrap.dedent(FACTORIES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "user_factories", raising=False)
    bcg.reset()
    return tmp_path


def call(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def file(place: Path, content: str, name: str = "lengths.csv") -> str:
    (place / name).write_text(content)
    return str(place / name)


def run(model: str, place: Path, *args: str, lengths: str = "5\n9\n9\n") -> Any:
    return call("run", model, "--lengths", file(place, lengths), *args)


# -- what cannot be done: a message, no traceback, exit code 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "lama"], "did you mean llama"),
        (["explain", "lama"], "did you mean llama"),
        (["run", "user_factories:Modell"], "did you mean Model"),
        (["run", "no_such_module:factory"], "cannot import 'no_such_module'"),
        (["run", "user_factories:failing_factory"], "RuntimeError: no weights to be found"),
        (["explain", "user_factories:failing_factory"], "user_factories.py:"),
        (["run", "user_factories:no_inputs"], "example_inputs(length)"),
        (["run", "user_factories:Model", "--layers", "3"], "drop layers"),
        (["run", "user_factories:Fails"], "The model itself fails at length 374, without being compiled: ValueError"),
        (["explain", "user_factories:Fails"], "The model itself fails at length 128"),
        (["run", "."], "has no config.json"),
        (["explain", "."], "has no config.json"),
        (["run", "llama", "--option", "min_segment_kernel=3"], "Did you mean 'min_segment_kernels' or"),
        (["explain", "llama", "--option", "min_segment_kernels=few"], "it must be an integer"),
        (["run", "llama", "--option", "min_segment_kernels=true"], "it must be an integer"),
        (["run", "llama", "--option", "capture=maybe"], "it must be one of 'auto', 'cuda', 'emulated', 'off'"),
        (["run", "llama", "--option", "breaks"], "not of the form key=value"),
        (["run", "llama", "--option", "breaks=a", "--option", "breaks=b"], "'breaks' is given twice"),
        (["explain", "llama", "--config", "hiden_size=64"], "did you mean hidden_size"),
        (["explain", "llama", "--config", "hidden_size=many"], "hidden_size"),
        (["run", "llama", "--device", "gpu"], "'gpu' is not a device"),
        (["explain", "llama", "--json", "--text"], "exclude each other"),
        (["explain", "user_factories:Model", "--option", "breaks=op:aten::no_such_op"], "not registered"),
        (["explain", "user_factories:Model", "--option", "breaks=module:outer"], "matches nothing"),
        (["run", "user_factories:Model", "--option", "breaks=module:outer"], "matches nothing"),
        (["run", "llama", "--ladder", "linear:64"], "'linear:64' is no ladder. Give from-lengths:16"),
        (["run", "llama", "--ladder", "64,many"], "or a list of buckets: 64,128,256"),
        (["run", "llama", "--ladder", "relative:2048"], "relative:2048:0.1 (up to 2048"),
        (["run", "llama", "--ladder", "64,32"], "buckets[1] is 32, behind 64"),
        (["run", "llama", "--ladder", "64", "--option", "ladder=[64]"], "'ladder' is given twice: as an --option and"),
        (["explain", "llama", "--ladder", "default:0"], "ceiling is 0; it must be at least 1"),
        (["ladder"], "Give one of --count N, --relative WASTE and --default"),
        (["ladder", "--count", "4", "--default"], "Give one of"),
        (["ladder", "--count", "0"], "count is 0; it must be at least 1"),
        (["ladder", "--relative", "2"], "waste is 2.0; it must be a number above 0 and at most 1"),
        (["ladder", "--count", "4", "--multiple", "4096"], "multiple is 4096, above the ceiling 1940"),
        (["ladder", "--default", "--multiple", "0"], "multiple is 0"),
        (["ladder", "--count", "4", "--ceiling", "4"], "the shortest length is 8: no prompt fits"),
        (["ladder", "--default", "--ceiling", "4"], "the shortest length is 8: no prompt fits"),
        (["ladder", "--default", "--plot", "ladder.pdf"], "its name must end in .png or .svg"),
        (["ladder", "--default", "--plot", "missing/ladder.svg"], "missing/ladder.svg: No such file"),
    ],
)
def test_what_cannot_be_done_is_said_in_words(args: list[str], message: str) -> None:
    result = call(*args)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "args", [["run", "llama", "--layers", "0"], ["run", "llama", "--calls", "0"], ["run", "llama", "--dtype", "float7"]]
)
def test_values_out_of_range_are_refused(args: list[str]) -> None:
    result = call(*args)
    assert result.exit_code == 2
    assert args[-2] in result.stderr


def test_no_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = call("run", "llama", "--device", "cuda")
    assert result.exit_code == 2
    assert "sees no CUDA device" in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("ContextTokens\n", "no lengths below"),
        ("5\nfive\n", "line 2: 'five' is not a whole number"),
        ("5\n7.5\n", "line 2: '7.5' is not a whole number"),
        ("lengths\n0\n", "line 2: 0 is not a length"),
        ("ContextTokens,GeneratedTokens\n5,6\n-1,6\n", "line 3: -1 is not a length"),
        ("ContextToken,GeneratedTokens\n5,6\n", "Did you mean 'ContextToken'"),
        ("ContextTokens,GeneratedTokens\n5,6\n\n,6\n", "line 4: '' is not a whole number"),
        ("1,2\n3,4\n", "no column is named"),
        ("prompt\n5\n", "neither a number nor a header"),
        ("5\n2147483648\n", "line 2: 2147483648 is not a length: it is above 2147483647"),
    ],
)
def test_lengths_that_cannot_be_used(content: str, message: str, place: Path) -> None:
    for result in (
        run("user_factories:Model", place, lengths=content),
        call("ladder", "--default", "--lengths", file(place, content)),
    ):
        assert result.exit_code == 2
        assert message in result.stderr
        assert "Traceback" not in result.output


def test_lengths_from_no_file(place: Path) -> None:
    (place / "binary").write_bytes(bytes(range(256)))
    for name, message in (("missing.csv", "No such file"), (".", "Is a directory"), ("binary", "not a text file")):
        result = call("run", "user_factories:Model", "--lengths", name)
        assert result.exit_code == 2
        assert message in result.stderr


# -- bcg run


def test_run_compares_every_result_with_eager(place: Path) -> None:
    result = run("llama", place, lengths="TIMESTAMP,ContextTokens,GeneratedTokens\nx,6,1\nx,9,1\nx,9,1\n")
    assert result.exit_code == 0, result.output
    # Each of the two lengths is called four more times for its timing.
    assert "EQUAL  11 of 11 calls, bit for bit (11 result tensors" in result.stdout
    assert "6 to 9 tokens, 2 different lengths" in result.stdout
    assert "1 segment (1 different), 0 breaks" in result.stdout
    assert "int64[1, 6]" in result.stdout  # the graph of the first length,
    assert "int64[1, s0]" in result.stdout  # and that of all others
    assert "ran 2 times eagerly (warm_up), captured 2 times, replayed 8 times" in result.stdout
    assert "2 captures, 8 replays, on the emulated device" in result.stdout
    assert "(warm_up): the first call of a shape runs eagerly, the second is captured" in result.stdout
    assert "Dynamo compiled the whole model" in result.stdout
    assert "Medians over 6 pairs of calls, compiled and eager in turn, at lengths 6, 9" in result.stdout


def test_run_shows_breaks_with_their_lines(place: Path) -> None:
    result = run("user_factories:WithBreak", place, "--calls", "1")
    assert result.exit_code == 0, result.output
    assert "2 segments (2 different), 1 break" in result.stdout
    assert "eager_break: user_factories.WithBreak.attention" in result.stdout
    line = next(n for n, text in enumerate(FACTORIES.splitlines(), 1) if "self.attention(h, out)" in text)
    assert f"user_factories.py:{line}" in result.stdout
    assert "self.attention(h, out)" in result.stdout


def test_results_may_be_nested_and_state_is_compared(place: Path) -> None:
    result = run("user_factories:Model", place)
    assert result.exit_code == 0, result.output
    assert "EQUAL  11 of 11 calls, bit for bit (22 result tensors, 3 tensors of the model" in result.stdout


def test_nans_at_the_same_places_and_equal_draws_are_equal(place: Path) -> None:
    result = run("user_factories:DrawsAndHasNans", place)
    assert result.exit_code == 0, result.output


def test_a_result_that_differs_is_exit_code_1(place: Path) -> None:
    result = run("user_factories:OtherWhenCompiled", place)
    assert result.exit_code == 1
    assert "DIFFERENT  11 of 11 calls differ from eager" in result.stdout
    assert "Largest absolute difference: 0.25" in result.stdout
    assert "call 0, length 5: the result 20 of 20 numbers differ, by 0.25" in result.stdout


def test_an_error_of_the_compiled_model_alone_is_exit_code_1(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*args: Any) -> None:
        raise RuntimeError("a fault in the compiler")

    monkeypatch.setattr("bcg_compiler.backend.build_plan", fault)
    result = run("user_factories:Model", place)
    assert result.exit_code == 1
    assert "The compiled model raised where eager did not" in result.stderr
    assert "a fault in the compiler" in result.stderr  # in the traceback, which is wanted here


def test_a_break_that_cannot_be_compiled_says_what_to_add(place: Path) -> None:
    result = run("user_factories:BreakWithoutFake", place)
    assert result.exit_code == 2
    assert "fake=" in result.stderr
    assert "Traceback" not in result.output


def test_state_that_differs_is_exit_code_1(place: Path) -> None:
    result = run("user_factories:CountsOtherwiseWhenCompiled", place)
    assert result.exit_code == 1
    assert "after all calls state['calls'] 1 of 1 numbers differ, by 11" in result.stdout


def test_what_dynamo_left_uncompiled_is_said(place: Path) -> None:
    result = run("user_factories:ReadsItem", place)
    assert result.exit_code == 0, result.output
    assert "Dynamo did not compile the whole model" in result.stdout
    assert "Tensor.item()" in result.stdout
    line = next(n for n, text in enumerate(FACTORIES.splitlines(), 1) if ".item()" in text)
    assert f"user_factories.py:{line}" in result.stdout
    assert "But part of the model was not compiled" in result.stdout


def test_the_recompile_limit_is_said(place: Path) -> None:
    lengths = "".join(f"{n}\n" for n in range(2, 13))
    result = run("user_factories:OneGraphForEachLength", place, lengths=lengths)
    assert result.exit_code == 0, result.output
    assert "It hit its recompile limit on 1 function" in result.stdout
    assert "forward (last recompiled because: " in result.stdout


def test_calls_choose_how_many_lengths_are_run(place: Path) -> None:
    assert "the first 2 of 3 lengths" in run("user_factories:Model", place, "--calls", "2").stdout
    assert "all 3 lengths" in run("user_factories:Model", place, "--calls", "4").stdout


def test_options_are_json_where_they_can_be(place: Path) -> None:
    result = run(
        "user_factories:WithBreak", place, "--option", 'breaks=["module:inner"]', "--option", "min_segment_kernels=1"
    )
    assert result.exit_code == 0, result.output
    assert "user_rule 2 times" in result.stdout


def test_run_with_a_ladder_pads_and_says_how_it_went(place: Path) -> None:
    lengths = "".join(f"{n}\n" for n in (5, 6, 9, 16, 17, 12, 8, 3, 7, 30))
    result = run("llama", place, "--layers", "1", "--ladder", "8,16,40", lengths=lengths)
    assert result.exit_code == 0, result.output
    assert "ladder: s0, dimension 1 of in1 (input_ids), is padded to 3 buckets: 8, 16, 40" in result.stdout
    assert "proof: causal, shown from the graph; from 2 live rows on" in result.stdout
    assert "padded rows: in1 (input_ids): zero" in result.stdout
    # 17 tokens are less than half of 40, in one call, and in four more of those that are timed.
    assert (
        "5 runs of graphs without replay (padding): the smallest bucket that holds the live rows is too"
        in result.stdout
    )
    assert "raise max_padding_factor" in result.stdout
    assert "1 run of graphs without replay (warm_up)" in result.stdout
    (row,) = (line.split() for line in result.stdout.splitlines() if "3 buckets (causal)" in line)
    assert row[:6] == ["1", "3", "buckets", "(causal)", "3", "20"]
    assert "of calls in buckets, " in result.stdout
    assert "EQUAL  26 of 26 calls, " in result.stdout


def test_a_ladder_is_chosen_by_the_lengths_that_are_run(place: Path) -> None:
    result = run("llama", place, "--layers", "1", "--ladder", "from-lengths:2", lengths="5\n5\n9\n9\n8\n")
    assert result.exit_code == 0, result.output
    assert "is padded to 2 buckets: 5, 9" in result.stdout
    result = run("bert", place, "--layers", "1", "--ladder", "from-lengths:2", "--calls", "2", lengths="600\n700\n")
    assert "Ladder(buckets=(512,))" in " ".join(result.stdout.split())  # its positions end there


def test_a_model_that_cannot_be_padded_says_why_and_where(place: Path) -> None:
    result = run("user_factories:AddsUpRows", place, "--ladder", "8,16")
    assert result.exit_code == 0, result.output
    assert "ladder: not used (mixing_rows), exact shapes are captured" in result.stdout
    assert "padding may reach live rows: sum runs over all rows: .sum\n" in result.stdout
    line = next(n for n, text in enumerate(FACTORIES.splitlines(), 1) if ".sum(1, keepdim=True)" in text)
    assert f"user_factories.py:{line}" in result.stdout
    assert "return (x + 1).sum(1, keepdim=True) + self.inner(x)" in result.stdout
    assert "To change it: If you know that none does" in result.stdout
    assert "bit for bit" in result.stdout
    assert "in buckets" not in result.stdout


def test_an_assumption_that_is_wrong_is_found(place: Path) -> None:
    result = run("user_factories:AddsUpRows", place, "--ladder", "8,16", "--assume-rows-independent")
    assert result.exit_code == 1
    assert "proof: none, it is assumed (assume_rows_independent)" in result.stdout
    assert "2 buckets (assumed)" in result.stdout
    assert "DIFFERENT  10 of 11 calls" in result.stdout  # all but the first, which runs eagerly
    assert "so much is tolerated as the dtype rounds, and no more" in result.stdout


def test_a_model_that_fixes_its_number_of_tokens_runs_in_exact_shapes(place: Path) -> None:
    result = run("user_factories:OneGraphForEachLength", place, "--ladder", "8,16")
    assert result.exit_code == 0, result.output
    assert "no_token_dim, so exact shapes are captured" in result.stdout


def test_an_option_without_effect_is_said(place: Path) -> None:
    for result in (
        run("user_factories:AddsUpRows", place, "--assume-rows-independent"),
        call("explain", "user_factories:AddsUpRows", "--assume-rows-independent"),
    ):
        assert result.exit_code == 0, result.output
        assert "note assumption_unused: " in result.stdout
        assert "Drop it, or give a ladder." in result.stdout


def test_a_folder_with_a_configuration_is_a_model(place: Path) -> None:
    folder = place / "model"
    folder.mkdir()
    fields = dict(model_type="llama", vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=2)
    (folder / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 5}))
    result = call("explain", str(folder), "--layers", "1", "--config", "num_key_value_heads=1", "--length", "7")
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM" in result.stdout
    assert "int64[1, 7]" in result.stdout


# -- bcg explain


def test_explain_prints_steps_and_reasons() -> None:
    result = call("explain", "user_factories:WithBreak")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "1 graph, 2 segments (2 different), 1 break: eager_break 1"


def test_explain_with_a_ladder_says_how_it_is_used_or_why_not() -> None:
    result = call("explain", "llama", "--layers", "1", "--ladder", "default:32")
    assert result.exit_code == 0, result.output
    assert "is padded to 8 buckets: 4, 8, 12, 16, 20, 24, 28, 32" in result.stdout
    assert "proof: causal" in result.stdout
    assert "note" not in result.stdout
    result = call("explain", "user_factories:AddsUpRows", "--ladder", "32")
    assert result.exit_code == 0, result.output
    assert "mixing_rows, so exact shapes are captured: live rows may depend on padded ones" in result.stdout


def test_explain_text_is_the_stable_text() -> None:
    result = call("explain", "user_factories:WithBreak", "--text", "--length", "16")
    assert result.exit_code == 0, result.output
    assert result.stdout == plan_model("user_factories:WithBreak", length=16).text()


def test_explain_json_is_a_list_of_plans() -> None:
    result = call("explain", "user_factories:WithBreak", "--json")
    (plan,) = json.loads(result.stdout)
    assert [step["kind"] for step in plan["steps"]] == ["segment", "break", "segment"]


def test_explain_runs_a_model_that_reads_data_for_real() -> None:
    result = call("explain", "user_factories:ReadsItem")
    assert result.exit_code == 0, result.output
    assert "could not be followed without data" in result.stdout
    assert "2 graphs, 2 segments" in result.stdout


def test_nothing_but_the_plan_is_on_the_screen(place: Path) -> None:
    """Both transformers and Dynamo warn and log about the models of a mixture of experts."""
    command = [sys.executable, "-m", "bcg_compiler.cli", "explain", "deepseek_v3"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "host_sync 2 times" in done.stdout


# -- bcg ladder


def test_ladder_of_a_file(place: Path) -> None:
    """All rows choose 15 and 20. Rows 0, 2, 4 alone choose 10 and 20, which pad each 15 of the other rows by 5."""
    lengths = file(place, "\nContextTokens\n10\n15\n\n10\n15\n20\n15\n30\n")
    result = call("ladder", "--lengths", lengths, "--count", "2", "--ceiling", "20")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0].endswith("lengths.csv: 10 to 30 tokens, 4 different")
    assert "ladder the fewest padded tokens with at most 2 buckets, up to 20 tokens" in lines
    assert "2 buckets: [15, 20]" in lines
    assert "this ladder 2 11.76% 33.33%" in lines
    assert "default ladder 5 8.24% 6.67%" in lines
    assert "On odd rows: chosen by rows 0, 2, 4, … alone and counted on rows 1, 3, 5, …" in lines
    assert "Not counted: 1 prompt of 7 above the ceiling, which no bucket holds." in lines
    assert any(line.startswith("10 2 ██") for line in lines)
    assert any(line.startswith("15 3 ██") and line.endswith("█ 15") for line in lines)
    assert "above 20 1" in lines


def test_ladder_of_the_sample_by_each_way_of_choosing() -> None:
    default, relative, count = (
        call("ladder", *args, "--multiple", "8", "--ceiling", "2045")
        for args in (["--default"], ["--relative", "0.1"], ["--count", "16"])
    )
    for result, how in (
        (default, "the default ladder"),
        (relative, "no prompt padded by more than 0.1 of its length"),
        (count, "the fewest padded tokens with at most 16 buckets"),
    ):
        assert result.exit_code == 0, result.output
        assert result.stderr == ""
        assert f"{how}, all multiples of 8, up to 2048 tokens" in result.stdout
        assert "199 lengths of the bundled sample" in result.stdout
    assert "38 buckets: [8, 16, 24, 32, 48," in default.stdout
    assert "16 buckets: " in count.stdout
    assert "8 16 24 32 … 128: 10 rungs" in default.stdout


def test_ladder_of_one_row_has_no_odd_rows(place: Path) -> None:
    result = call("ladder", "--lengths", file(place, "7\n"), "--count", "3")
    assert result.exit_code == 0, result.output
    assert "1 bucket: [7]" in result.stdout
    assert "There are too few rows" in result.stdout


@pytest.mark.parametrize(("name", "begin"), [("ladder.png", b"\x89PNG"), ("ladder.SVG", b"<?xml")])
def test_ladder_as_a_picture(place: Path, name: str, begin: bytes) -> None:
    result = call("ladder", "--count", "4", "--plot", name)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"wrote {name}"
    assert (place / name).read_bytes().startswith(begin)


def test_a_picture_without_matplotlib_says_what_to_install(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcg_compiler.debug.ladder_plot.find_spec", lambda name: None)
    result = call("ladder", "--count", "4", "--plot", "ladder.png")
    assert result.exit_code == 2
    assert 'pip install "bcg-compiler[plot]"' in result.stderr
    assert result.stdout == ""


def test_explain_names_the_sizes_that_a_ladder_could_be_for() -> None:
    """An encoder and a decoder have a length each."""
    result = call("explain", "t5", "--ladder", "64")
    assert result.exit_code == 0
    assert "ambiguous_tokens" in result.stdout and "decoder_input_ids" in result.stdout


def test_explain_and_run_dump_what_they_compile(place: Path) -> None:
    assert call("explain", "user_factories:WithBreak", "--dump", "plans").exit_code == 0
    graph = place / "plans/000_WithBreak"
    assert (graph / "plan.txt").read_text() == call("explain", "user_factories:WithBreak", "--text").output
    assert not list(graph.glob("replay*"))  # of fakes nothing is captured
    assert run("user_factories:WithBreak", place, "--option", "dump=calls").exit_code == 0
    assert list(place.glob("calls/*_WithBreak/replay*.py"))


def test_a_report_has_what_passes_changed_and_what_steps_took(place: Path) -> None:
    assert call("explain", "user_factories:WithBreak", "--measure").exit_code == 2  # a report is where it is shown
    result = call("explain", "user_factories:WithBreak", "--html", "report.html", "--measure")
    assert result.exit_code == 0, result.output
    found = re.search(r'id="data">(.*?)</script>', (place / "report.html").read_text(), re.DOTALL)
    assert found is not None
    (graph,) = json.loads(found[1])["graphs"]
    assert any(step.get("time") for step in graph["steps"])
    assert "mark_break_functions" in json.dumps(graph["passes"])
    assert not list(place.glob("*_WithBreak")), "the dump that it is made of is no one's concern"
