"""The code blocks and commands of the tutorials run in order, on smaller settings than the pages show."""

import glob
import json
import re
import shlex
import tomllib
from configparser import ConfigParser
from itertools import chain
from pathlib import Path

import pytest
import torch

import headscope as hs

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    "start",
    "effective-length",
    "retrieval-heads",
    "heads-for-a-prompt",
    "heads-at-my-context",
    "training-run",
    "learn-adarope",
    "kv-budget",
    "cluster",
    "figures",
    "spans",
    "from-transformer-lens",
)
SMALLER = {
    "--docs 3": "--docs 1",
    "--docs 4": "--docs 2",
    "docs: 3": "docs: 1",
    "--phase 256:4": "--phase 64:2",
    "--draws 2 --shares 0.25,0.5,0.75": "--draws 1 --shares 0.5",
    " --engine ray --workers 2": "",
    "lengths: [256, 1024]": "lengths: [64]",
    "lengths: [256], depths: 2, needles: 2": "lengths: [128], depths: 1, needles: 1",
    "docs=3": "docs=1",
    "--lengths 512,1024 --depths 3 --needles 2 --ablate-top 4 --draws 2": "--lengths 128 --depths 1 --needles 2 "
    "--ablate-top 4 --draws 1",
    "256": "64",
    "1024": "96",
    "--name without": "--name without --heads L23H4,L0H4",
    "--verify-top 5 --verify-random 5": "--verify-top 1 --verify-random 1",
    'boats lay still. " * 40': 'boats lay still. " * 4',
    "--checkpoints 0,10,20,40": "--checkpoints 0,40",
}
"""Settings of the pages, and what the tests run instead, replaced in order."""


def page_path(name: str) -> Path:
    return next(path for path in (DOCS / f"{name}.md", DOCS / "tutorials" / f"{name}.md") if path.is_file())


def blocks(name: str) -> list[tuple[str, str, str]]:
    """Language, file name ("" for code to run) and content of the code blocks of a page."""
    page = page_path(name).read_text(encoding="utf-8")
    return re.findall(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```', page, re.MULTILINE | re.DOTALL)


@pytest.mark.exhaustive(sample=3)
@pytest.mark.model
@pytest.mark.usefixtures("opened_once", "studies_run_once")
@pytest.mark.parametrize("name", PAGES)
def test_tutorial_runs_from_its_first_block_to_its_last(name, headscope, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "headscope").symlink_to(DOCS.parent / "headscope")  # for the shipped runs
    namespace = {"__name__": name}
    for language, file, content in blocks(name):
        for setting, smaller in SMALLER.items():
            content = content.replace(setting, smaller)
        if file:
            Path(file).write_text(content, encoding="utf-8")
        elif language == "python":
            exec(compile(content, f"{name}.md", "exec"), namespace)
        elif language == "console":
            for line in content.splitlines():
                words = shlex.split(line.removeprefix("$ headscope "))
                has_pattern = "--checkpoints" in words  # the command expands its own pattern
                arguments = words if has_pattern else chain.from_iterable(sorted(glob.glob(w)) or [w] for w in words)
                code, _, err = headscope(*arguments)
                assert code == 0, f"{line}: {err}"
        else:
            assert language == "text", f"{name}.md has a block in {language}, which no test runs"
    if name == "from-transformer-lens":
        logits = (
            namespace["dla"].attribution_answer_parts.query("part == 'logit'").set_index("position")["contribution"]
        )
        sums = namespace["parts"].groupby("position")["contribution"].sum()
        assert sums.to_numpy() == pytest.approx(logits.loc[sums.index].to_numpy(), abs=1e-3)
        assert namespace["lens"][-1] == pytest.approx(logits[sums.index[-1]], abs=1e-3)
        check_halves(namespace)


def check_halves(names):
    """The losses of the second halves are those of the plain model, and A A is the lowest."""
    model, halves = names["model"], names["halves"].patching.drop_duplicates("pair").set_index("pair")
    lines = [json.loads(line) for line in Path("halves.jsonl").read_text().splitlines()]
    for pair in lines:
        answer = model.tokenizer(pair["answer"])["input_ids"]
        for side, following in (("clean", pair["answer"]), ("corrupted", pair.get("corrupted_answer", pair["answer"]))):
            ids = torch.tensor([model.tokenizer(pair[side] + following)["input_ids"]])
            with torch.no_grad():
                logits = model.module(ids, use_cache=False).logits[0, -len(answer) - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(answer))
            assert halves.loc[pair["name"], f"metric_{side}"] == pytest.approx(float(loss), abs=1e-3)
    assert (halves["metric_corrupted"] > halves["metric_clean"]).all()


MAX_LINES, STEPS, STEPS_WITH_CODE = 5, 90, 87
"""Of 110 steps that were tried, 90 are listed; all but three have code."""


def test_every_listed_step_has_its_line_on_the_page_or_a_reason():
    """Each step of the list has at most five lines of code under its number, among them the quoted one."""
    code: dict[int, list[str]] = {}
    for language, _, content in blocks("from-transformer-lens"):
        numbers: list[int] = []
        for line in content.splitlines() if language == "python" else []:
            if match := re.match(r"# (\d+(?:, \d+)*) ", line):
                numbers = [int(number) for number in match[1].split(", ")]
            elif line.strip() and not line.startswith("#"):
                for number in numbers:
                    code.setdefault(number, []).append(line)
    page = page_path("from-transformer-lens").read_text(encoding="utf-8")
    reasons = re.findall(r"^\| (\d+(?:, \d+)*)", page[page.index("## Not here") :], re.MULTILINE)
    explained = {int(number) for numbers in reasons for number in numbers.split(", ")}
    rows = re.findall(r"^\| (\d+) \|.*?\| ([^|]*) \| (\d*) ?\|$", page_path("comparison").read_text(), re.MULTILINE)
    assert [int(step) for step, *_ in rows] == [*range(1, STEPS + 1)]
    listed = {int(step): line for step, line, _ in rows}
    assert {step for step, line in listed.items() if line == "not here"} <= explained
    for step, line, count in rows:
        if line != "not here":
            own = code[int(step)]
            assert any(line.strip("`") in part for part in own), step
            assert len(own) == int(count) <= MAX_LINES, step
    assert {*code} == {step for step, line in listed.items() if line != "not here"}
    assert len(code) == STEPS_WITH_CODE
    assert explained >= OTHER_NUMBERS


OTHER_NUMBERS = {8, 21, 32, 42, 45, 46, 64, 75, 78, 85}
"""Steps that gave another number than the tool of the notebook when they were first tried."""


def test_bertviz_and_circuitsvis_take_the_patterns_of_the_page():
    pytest.importorskip("bertviz")
    pytest.importorskip("circuitsvis")
    views = next(content for _, file, content in blocks("from-transformer-lens") if file == "views.py")
    weights = torch.rand(1, 9, 4, 4).tril().softmax(-1)
    names = {"maps": [weights] * 30, "tokens": ["When", " Mary", " and", " John"]}
    *imports, head, model, heads = [line for line in views.strip().splitlines() if not line.startswith("#")]
    exec("\n".join(imports), names)
    for view in (head, model, heads):
        html = eval(view, names)
        assert "Mary" in str(getattr(html, "data", html))


@pytest.mark.model
def test_a_bridge_of_the_page_has_the_patterns_and_effects_of_the_model(tmp_path, monkeypatch):
    """With the BOS token that the bridge's tokenizer prepends; patterns are those of the record."""
    monkeypatch.chdir(tmp_path)
    code = {file: content for _, file, content in blocks("from-transformer-lens") if file}
    Path("ioi.jsonl").write_text(code["ioi.jsonl"], encoding="utf-8")
    setup = next(content for language, file, content in blocks("from-transformer-lens") if language == "python")
    names = {"__name__": "bridge"}
    exec(setup, names)
    expected = hs.patch(names["model"], bos="yes", **names["quick"])
    bos = torch.tensor([[names["model"].tokenizer.bos_token_id]])
    weights = names["patterns"]({"input_ids": torch.cat([bos, names["ids"]["input_ids"]], 1)})[23]
    exec(code["bridge.py"], names)
    (pattern,) = names["hooked"]
    torch.testing.assert_close(pattern[0], weights, atol=1e-5, rtol=0)
    run = names["compatible"]
    assert run.patching["effect"].to_numpy() == pytest.approx(expected.patching["effect"].to_numpy(), abs=1e-4)
    assert "models.compatibility_mode" in {*run.findings()["question"]}


def test_every_tutorial_is_tested():
    tutorials = {path.stem for path in (DOCS / "tutorials").glob("*.md")}
    assert tutorials <= {*PAGES, "your-own-probe"}  # the files of that one are those of test_plugins


def test_the_tutorial_probe_declares_the_entry_point_of_the_tested_package():
    package = tomllib.loads(next(content for _, file, content in blocks("your-own-probe") if file == "pyproject.toml"))
    tested = ConfigParser()
    tested.read(Path(__file__).parent / "external_plugin" / "query_norms-1.0.dist-info" / "entry_points.txt")
    assert package["project"]["entry-points"] == {group: dict(tested[group]) for group in tested.sections()}
