"""The page as a whole: it parses, asks for nothing, claims nothing false, and takes any name and any size."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rco.report
from rco.core.result import StepRecord
from rco.report import ReportError, RunData, build_report, read_run, render_report
from rco.report.theme import DARK, LIGHT, WIDTHS
from rco.runs import RunDirectory, RunError

VOID = {"br", "col", "hr", "meta", "wbr"}


class Page(HTMLParser):
    """Checks nesting while it collects what the tests ask about."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> repeats an attribute: {names}"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"]):
            self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def sections(self) -> list[str]:
        return [str(attributes["id"]) for attributes in self.all("section")]


def with_metrics(run: RunData, **changes) -> RunData:
    """The run with sections of its metrics replaced; None removes one."""
    metrics = {key: value for key, value in {**run.metrics, **changes}.items() if value is not None}
    return dataclasses.replace(run, metrics=metrics)


def check_page(page: str) -> Page:
    parsed = Page(page)
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in parsed.all("a"):
        assert attributes["href"].startswith("#")
        assert attributes["href"][1:] in ids
    for attributes in (a for _, a in parsed.tags):
        assert "src" not in attributes
        assert "style" not in attributes  # which the page's own policy would refuse
        assert not any(name.startswith("on") for name in attributes)
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in ids
    assert not re.search(r"https?://|url\(|@import|//[a-z]", page)
    for attributes in (a for tag, a in parsed.tags if tag in ("path", "rect", "text", "use")):
        for key in ("d", "x", "y", "transform", "width", "height"):
            assert not re.search("nan|inf|None", attributes.get(key) or "")
        # Colours are those of the theme, so that they follow it.
        for key in ("fill", "stroke"):
            assert re.fullmatch(r"none|var\(--[a-z0-9]+\)|", attributes.get(key) or "")
    for attributes in parsed.all("use"):
        assert attributes["href"][1:] in ids
    for attributes in parsed.all("svg"):
        assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"
    for attributes in parsed.all("th"):
        assert attributes["scope"] in ("row", "col")
    assert len(parsed.all("caption")) == len(parsed.all("table"))
    levels = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    return parsed


def test_a_full_quantization_page(make_quantized):
    run = make_quantized(tied=True)
    page = check_page(render_report([run]))
    assert page.sections == ["results", "bits", "sensitivity", "search", "certificate", "use", "reproduce"]
    words = page.words
    assert "tiny-llama at 2.5 bits" in words
    assert "0.1884 ± 0.0041" in words
    assert "uniform 2: 0.613" in words
    assert "vllm serve runs/tiny-llama-bits-2.5/model" in words
    assert "--lock lm_head=8" in words
    assert "“refined” was chosen" in words
    assert "0.0111 below the next" in words  # 0.19624 - 0.18510
    assert "Does not hold" not in words
    # Every group and every tensor is in a table.
    for row in run.metrics["groups"]:
        assert row["name"] in words
    for name in run.metrics["export"]["tensors"]:
        assert name in words


def test_a_full_pruning_page(make_pruned):
    run = make_pruned()
    page = check_page(render_report([run]))
    assert page.sections == ["results", "experts", "search", "certificate", "use", "reproduce"]
    words = page.words
    assert "tiny-moe, 25 % of the experts pruned" in words
    assert "144 of 192 experts kept (75.0 %)" in words
    assert "83.0 % of the kept experts" in words
    assert "trust_remote_code=True" in words  # layers keep different counts
    assert "rco prune tiny-moe" in words
    # Of the two models, each is better on the domain it was pruned on.
    assert re.search(r"python\s+0\.03100\s+0\.4120\s+prose\s+0\.3770\s+0\.04300", words)


def test_equal_counts_need_no_remote_code(make_pruned):
    run = make_pruned(layers=2, experts=4)
    layers = [{"layer": layer, "experts": 4, "kept": [0, 1, 3]} for layer in range(2)]
    page = check_page(render_report([with_metrics(run, moe={"layers": layers})]))
    assert "from_pretrained" in page.words
    assert "trust_remote_code" not in page.words


@pytest.mark.parametrize(
    ("missing", "gone"),
    [
        ("evaluation", "results"),
        ("groups", "bits"),
        ("export", "use"),
        ("budget", None),
        ("model", None),
        ("timings", None),
        ("engine", None),
        ("kind", None),
    ],
)
def test_a_missing_section_is_left_out(make_quantized, missing, gone):
    run = dataclasses.replace(make_quantized(blocks=2), history=())
    assert gone is None or gone in check_page(render_report([run])).sections
    page = check_page(render_report([with_metrics(run, **{missing: None})]))
    assert gone not in page.sections
    if missing == "engine":
        assert "vllm serve" not in page.words
    if missing == "timings":
        assert "Time" not in page.words


def test_a_run_with_nothing_but_a_name():
    page = check_page(render_report([RunData(name="empty")]))
    assert page.sections == []
    assert "has not finished" in page.words
    assert not re.search(r"\d", page.words.replace(rco.__version__, ""))  # no number from nowhere


def test_violations_and_overspending_are_shown_as_such(make_quantized):
    run = make_quantized()
    budget = {**run.metrics["budget"], "used_units": run.metrics["budget"]["budget_units"] + 1}
    engine = {"preset": "vllm", "violations": ["group_0: vllm takes symmetric widths only"]}
    words = check_page(render_report([with_metrics(run, budget=budget, engine=engine)])).words
    assert "1 more than the" in words
    assert "Does not hold: vllm: group_0" in words
    assert "vllm serve" not in words


@pytest.mark.parametrize("steps", [0, 1, 2, 5000])
@pytest.mark.parametrize("exchanges", [0, 1, 90])
def test_histories_of_any_length(make_quantized, steps, exchanges):
    run = make_quantized(blocks=1, steps=max(steps, 1), exchanges=exchanges)
    records = [r for r in run.history if r.phase != "search" or r.step <= steps]
    page = render_report([dataclasses.replace(run, history=records, metrics={})])
    parsed = check_page(page)
    assert ("Loss per step" in page) == bool(steps or exchanges)
    assert ("exchanges, on the selection split" in parsed.words) == bool(exchanges)
    assert len(page) < 400_000


def test_histories_with_holes(make_quantized):
    bare = [
        StepRecord(step=1, steps=2, loss=float("nan"), best_loss=float("inf")),
        StepRecord(2, 2, 0.5, 0.5),
    ]
    run = dataclasses.replace(make_quantized(blocks=1), history=bare)
    page = render_report([run])
    check_page(page)
    assert "Temperature" not in page  # was not recorded
    endless = [dataclasses.replace(record, loss=float("nan"), best_loss=float("nan")) for record in bare]
    check_page(render_report([dataclasses.replace(run, history=endless, result=None)]))


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script></style></title>",
    "a & b <b>'quoted'</b>",
    "nul\x00 bell\x07 surrogate\ud800 override\u202e",
    "{{ 7 * 7 }}{% raw %} 模型 $x_1$\n",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(make_quantized, make_pruned, name):
    def poison(value):
        if isinstance(value, str):
            meant = ("quantization", "expert-pruning", "bits", "experts", "size")
            return value if value in meant or re.fullmatch(r"\d+/\d+", value) else value + name
        if isinstance(value, dict):
            return {
                key if key in KEYS or key.isdigit() else key + name: poison(v) for key, v in value.items()
            }
        return [poison(entry) for entry in value] if isinstance(value, list) else value

    for run in (make_quantized(blocks=2), make_pruned(layers=2)):
        poisoned = dataclasses.replace(
            run,
            name=run.name + name,
            metrics=poison(run.metrics),
            config=poison(run.config),
            environment=poison(run.environment),
            result=dataclasses.replace(run.result, chosen_from=name, candidates={name: 0.1, "final": 0.2}),
        )
        page = render_report([poisoned])
        parsed = check_page(page)
        page.encode("utf-8")
        assert len(parsed.all("script")) == 1
        assert not parsed.all("img")
        assert not parsed.all("b")
        assert not re.search("[\x00\x07\ud800\u202e]", page)
        if "<script>" in name:
            assert "<script>alert(1)</script>" in parsed.words  # as text
        if "{{" in name:
            assert "{{ 7 * 7 }}{% raw %} 模型 $x_1$" in parsed.words


KEYS = {
    "kind", "model", "budget", "groups", "evaluation", "export", "engine", "timings", "moe", "name", "parameters",
    "blocks", "dtype", "fingerprint", "requested", "effective", "used", "unit", "used_units", "budget_units",
    "range", "average_bits", "average_bits_exact", "bits_per_weight_stored", "members", "block", "sensitivity",
    "relative_error", "width", "bits", "within_budget", "kl", "kl_error", "perplexity", "perplexity_error",
    "by_domain", "format", "path", "files", "tensors", "total_bytes", "preset", "violations", "layers", "layer",
    "experts", "kept", "scores", "overlap_with_reap",
}  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters()))
def test_any_name_is_shown_as_text(words):
    page = render_report([RunData(name=words)])
    page.encode("utf-8")
    parsed = check_page(page)
    assert len(parsed.tags) == len(check_page(render_report([RunData(name="run")])).tags)
    shown = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]", "\ufffd", words)
    assert re.sub(r"\s+", " ", f"run {shown} ") in parsed.words


def test_the_same_run_gives_the_same_bytes(make_quantized, make_pruned):
    for make in (make_quantized, make_pruned):
        assert render_report([make()]) == render_report([make()])


def test_libraries_of_the_page_load_when_it_is_made():
    for path in sorted(Path(rco.report.__file__).parent.glob("*.py")):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                names = [getattr(statement, "module", None) or "", *(alias.name for alias in statement.names)]
                assert not [name for name in names if name.startswith(("matplotlib", "jinja2"))], path.name


def test_pages_stay_small(make_quantized, make_pruned):
    dense = render_report([make_quantized(blocks=36)])  # 252 linears
    check_page(dense)
    assert len(dense) < 500_000
    experts = render_report([make_pruned(layers=48, experts=512)])  # 24576 experts
    check_page(experts)
    assert len(experts) < 500_000


def test_huge_group_counts_are_added_up(make_quantized):
    """Experts quantized one by one: cells and rows stand for many groups, and the sums stay right."""
    run = make_quantized(blocks=1, head=False)
    rows = [
        {
            "name": f"model.layers.{block}.mlp.experts.{expert}.{kind}",
            "kind": kind,
            "block": block,
            "parameters": 1000,
            "width": 2 + (expert + block) % 3,
            "sensitivity": {"2": 10.0 ** -(1 + expert % 5)},
        }
        for block in range(48)
        for expert in range(128)
        for kind in ("gate_proj", "up_proj", "down_proj")
    ]
    tensors = {f"{row['name']}.weight_packed": 250 * row["width"] for row in rows}
    total = sum(tensors.values())
    export = {"format": "compressed-tensors", "path": "model", "tensors": tensors, "total_bytes": total}
    page = render_report([with_metrics(run, groups=rows, export=export)])
    parsed = check_page(page)
    assert len(page) < 700_000
    assert "18,432 groups by block and kind" in parsed.words
    assert f"The 18,432 tensors add up to the total of {total:,} bytes" in parsed.words
    assert "model.layers.47.mlp.experts.*.up_proj.weight_packed" in parsed.words
    assert "Tensors together 18,432" in parsed.words


def test_several_runs(make_quantized, make_pruned):
    runs = [make_quantized(), make_quantized(tied=True, bits="2.75", blocks=3), make_pruned()]
    page = check_page(render_report(runs))
    assert "3 runs compared" in page.words
    assert "tiny-llama-bits-2.5 (2)" in page.words  # the same folder name twice
    assert [name for name in page.sections if name.endswith("certificate")] == [
        "run1-certificate",
        "run2-certificate",
        "run3-certificate",
    ]
    same_model = render_report(runs[:2])
    assert "points on the dashed line" in same_model
    assert "tiny-llama: 2 runs compared" in check_page(same_model).words
    # Another text behind the same name: the points do not belong into one plot.
    rows = [{**row, "kl": 2 * row["kl"]} for row in runs[1].metrics["evaluation"]]
    assert "points on the dashed line" not in render_report([runs[0], with_metrics(runs[1], evaluation=rows)])


def test_no_runs():
    with pytest.raises(ReportError, match="at least one run"):
        render_report([])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": [1]}, "'budget' in metrics.json must be an object, got list"),
        ({"evaluation": [{"kl": 1.0}]}, "evaluation row of metrics.json lacks 'name'"),
        (
            {"evaluation": [{"name": "RCO", "kl": "low"}]},
            "'kl' in evaluation row 'RCO'.*must be a number, got 'low'",
        ),
        ({"groups": [{"name": "a"}]}, "group 'a' of metrics.json lacks 'width'"),
        ({"groups": "none"}, "'groups' in metrics.json must be a list of objects"),
        ({"budget": {"used_units": 1.5}}, "must be a whole number, got 1.5"),
        ({"moe": {"layers": [{"layer": 0, "experts": 4, "kept": [4]}]}}, "outside 0..3"),
        (
            {"moe": {"layers": [{"layer": 0, "experts": 2, "kept": [1], "scores": {"reap": [1.0]}}]}},
            "1 reap scores for 2 experts",
        ),
        ({"moe": {"by_domain": {"code": 0.1}}}, "maps a domain to its measurements, got 0.1 for 'code'"),
        ({"certificate": {"used": 1, "allowed": "much"}}, "must be a number, got 'much'"),
    ],
)
def test_damaged_metrics_are_named(make_quantized, changes, message):
    with pytest.raises(ReportError, match=message):
        render_report([with_metrics(make_quantized(blocks=1), **changes)])


# ---------------------------------------------------------------------------- files


def write_run(folder, run: RunData, *, finished: bool = True) -> RunDirectory:
    with RunDirectory.create(folder, run.config) as made:
        made.write_problem(run.problem)
        for record in run.history:
            made.append_history(record)
        made.update_metrics(run.metrics)
        if finished:
            made.write_result(run.result)
    return RunDirectory.open(folder)


def test_a_run_directory_gives_the_same_page(tmp_path, make_quantized):
    run = make_quantized(blocks=2)
    written = read_run(write_run(tmp_path / run.name, run))
    same = dataclasses.replace(written, environment=run.environment, header_bytes=run.header_bytes)
    assert render_report([same]) == render_report([run])


def test_build_report_writes_one_whole_file(tmp_path, make_quantized):
    run = write_run(tmp_path / "run", make_quantized(blocks=1))
    out = build_report([run], tmp_path / "deep" / "report.html")
    assert out == tmp_path / "deep" / "report.html"
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    first = out.read_bytes()
    check_page(first.decode("utf-8"))
    # A second report that fails leaves the first as it was.
    damaged = tmp_path / "run" / "metrics.json"
    damaged.write_text(json.dumps({"budget": []}), encoding="utf-8")
    with pytest.raises(ReportError):
        build_report([run], out)
    assert out.read_bytes() == first


def test_an_unfinished_run(tmp_path, make_quantized):
    run = dataclasses.replace(make_quantized(blocks=1), metrics={})
    page = check_page(render_report([read_run(write_run(tmp_path / "run", run, finished=False))]))
    assert "has not finished" in page.words
    assert page.sections == ["search", "certificate", "reproduce"]


def test_damaged_history_is_named(tmp_path, make_quantized):
    opened = write_run(tmp_path / "run", make_quantized(blocks=1))
    (tmp_path / "run" / "history.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    with pytest.raises(ReportError, match="incomplete record"):
        read_run(opened)
    with pytest.raises(RunError):
        RunDirectory.open(tmp_path / "nothing")


def test_header_bytes_come_from_the_files(tmp_path, make_quantized):
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    model = tmp_path / "model"
    model.mkdir()
    safetensors.save_file({"a": torch.zeros(7), "b": torch.zeros(3)}, model / "x.safetensors")
    size = (model / "x.safetensors").stat().st_size
    export = {
        "format": "dense",
        "path": str(model),
        "files": {"x.safetensors": size, "config.json": 12},
        "tensors": {"a": 28, "b": 12},
        "total_bytes": size,
    }
    run = with_metrics(make_quantized(blocks=1), export=export)
    read = read_run(write_run(tmp_path / "run", run))
    assert read.header_bytes == size - 40
    assert f"add up to the total of {size:,} bytes" in check_page(render_report([read])).words
    # A run moved as a whole takes its checkpoint along.
    model.rename(tmp_path / "run" / "model")
    assert read_run(RunDirectory.open(tmp_path / "run")).header_bytes == size - 40
    (tmp_path / "run" / "model" / "x.safetensors").unlink()
    moved = read_run(RunDirectory.open(tmp_path / "run"))
    assert moved.header_bytes is None
    words = check_page(render_report([moved])).words
    assert "add up" not in words
    assert f"a difference of {size - 40:,} bytes" in words


# --------------------------------------------------------------------------- colours


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_can_be_read(theme):
    for background in ("page", "raised"):
        for ink in ("ink", "muted", "accent", "c1", "good", "bad"):
            assert contrast(theme[ink], theme[background]) >= 4.5, (ink, background)
        for line in ("c0", "c1", "c2", "c3"):
            assert contrast(theme[line], theme[background]) >= 3, (line, background)
    assert contrast(theme["muted"], theme["band"]) >= 4.5


@pytest.mark.parametrize("first", [0, 2])
def test_widths_can_be_read_and_are_ordered(first):
    tones = [(tone[first], tone[first + 1]) for tone in WIDTHS.values()]
    for fill, ink in tones:
        assert contrast(fill, ink) >= 4.5, fill
    steps = [luminance(WIDTHS[bits][first]) for bits in range(2, 9)]  # lightness alone tells the order
    assert steps == sorted(steps, reverse=first == 0)
