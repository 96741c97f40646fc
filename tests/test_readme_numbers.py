"""Every measured number in README is that of a shipped run, or is printed by the command beside it."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from support.shipped_runs import open_shipped

from headscope.results.collection import all_results
from headscope.study.config import build_study

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = " ".join(re.sub(r"^```\w*\n.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL).split())
"""README without its code blocks, on one line."""
COMMANDS = [line for line in README.splitlines() if line.startswith(("$ headscope patch ", "$ headscope ablate "))]
"""Commands whose output README shows."""
MEASURED = r"\d[\d,.]* ?(?:%|percentage points|trials|minutes|seconds|hours|s\b|GB|MB)|\(\d\S* to \d\S*\)"
"""Texts that only a measurement can justify."""


def finding_sentences() -> list[str]:
    """The sentences of the first screen, with the numbers of the shipped run `needle`."""
    run = open_shipped("needle")
    results = {result.question: result for result in all_results(run)}
    ablated, control, drop = (
        results[f"retrieval.{name}"] for name in ("ablated_success", "random_ablated_success", "ablation_drop")
    )
    assert control.value == results["retrieval.success"].value, "as without ablation"
    assert ablated.where["size"] == 4
    assert run.manifest["hardware"]["cpus"] == 1
    low, high = f"{100 * ablated.low:.0f} %", f"{100 * ablated.high:.0f} %"
    return [
        f"Four of {len(run.heads)} heads",
        f"the model answers {100 * ablated.value:.0f} % of the questions",
        f"(95 % confidence interval {low} to {high}, {ablated.n} trials)",
        f"random heads of the same layers ablated it answers {100 * control.value:.0f} %, as without ablation",
        f"a difference of {100 * drop.value:.0f} percentage points ({100 * drop.low:.0f} to {100 * drop.high:.0f})",
        f"the top heads fall to {100 * ablated.value:.0f} %",
        f"random heads of the same layers stay at {100 * control.value:.0f} %",
        f"in {run.manifest['timings']['seconds'] / 60:.0f} minutes on one core",
    ]


def memory_sentences() -> list[str]:
    """The sentence about memory, with the numbers of the shipped example."""
    run = open_shipped("example")
    (length,) = run.manifest["config"]["measure"]["lengths"]
    return [f"{length:,} tokens took {run.manifest['timings']['peak_bytes'] / 1e9:.1f} GB of memory"]


def test_the_measured_numbers_of_the_readme_are_those_of_shipped_runs() -> None:
    assert [sentence for sentence in finding_sentences() + memory_sentences() if sentence not in PROSE] == []


def test_the_readme_has_no_other_measured_number() -> None:
    rest = PROSE
    for sentence in finding_sentences() + memory_sentences():
        rest = rest.replace(sentence, "")
    assert re.findall(MEASURED, PROSE)
    assert re.findall(MEASURED, rest) == []


def test_the_shipped_run_of_the_finding_is_that_of_the_command_in_the_readme() -> None:
    command = next(line for line in README.splitlines() if line.startswith("$ headscope needle"))
    options = dict(re.findall(r"--([a-z-]+) (\S+)", command))
    stored = open_shipped("needle").manifest["config"]
    assert stored["texts"]["source"] == build_study({}).texts.source, "the default texts"
    assert options.pop("model") == "base=" + stored["models"]["base"]
    for name, value in options.items():
        setting = stored["needle"][name.replace("-", "_")]
        assert value == ",".join(map(str, setting if isinstance(setting, list) else [setting])), name


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.usefixtures("opened_once", "studies_run_once")
def test_the_commands_of_the_readme_print_what_it_shows(
    headscope: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (pairs,) = re.findall(r'^```json title="pairs.jsonl"\n(.*?)^```', README, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text(pairs, encoding="utf-8")
    printed = ""
    for command in COMMANDS:
        code, out, err = headscope(*shlex.split(command.removeprefix("$ headscope ")))
        assert code == 0, err
        printed += " ".join(out.split())
    shown = " ".join(block.split()).split(" base: ")
    assert len(shown) == len(pairs.splitlines()) + 1
    assert [sentence for sentence in shown if sentence.removeprefix("base: ") not in printed] == []
