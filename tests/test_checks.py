"""Checks of a run: outcomes by the interval, statistics of heads, relative bounds, mistakes, files."""

import json
import math
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import yaml
from support.fake_runs import AFTER, BEFORE, DOCUMENTS, QUESTIONS, fake_run, mean_of
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import PROBES, save_checkpoint, save_texts

import headscope as hs
from headscope.errors import BadInput, CannotWrite
from headscope.rendering.comparison import outcome_text
from headscope.rendering.html_page import render_report
from headscope.rendering.junit import remove_earlier_outcomes, write_junit
from headscope.rendering.terminal import run_to_dict
from headscope.results import head_statistics
from headscope.results.check_file import Check, read_checks, write_checks
from headscope.results.checks import CheckResult, run_checks
from headscope.results.result import Result
from headscope.run import Run
from headscope.runs.aggregation import Samples, confidence_interval
from headscope.runs.summary import default_models


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "nights" in request.fixturenames:  # on real runs
        return
    monkeypatch.setattr("headscope.results.collection.results_of_all_models", lambda run: run.results)
    for module in ("comparison", "checks"):
        monkeypatch.setattr(f"headscope.results.{module}.questions", lambda: QUESTIONS)


def outcomes(results: list[Result], earlier: list[Result] | None = None, /, **check: Any) -> list[CheckResult]:
    models = list(dict.fromkeys(result.model for result in results))
    old = None if earlier is None else fake_run(earlier, models)
    return run_checks(fake_run(results, models), [Check.model_validate(check)], old)


def loss(low: float, high: float, n: int | None = 8, **changes: Any) -> Result:
    values = {"question": "x.loss", "model": "base", "value": (low + high) / 2, "low": low, "high": high, "n": n}
    return Result(**{**values, **changes})


@pytest.mark.parametrize(
    ("bound", "outcome"),
    [
        ({"at_most": 0.5}, "passes"),
        ({"at_most": 0.35}, "undecided"),
        ({"at_most": 0.2}, "fails"),
        ({"at_least": 0.3}, "passes"),
        ({"at_least": 0.35}, "undecided"),
        ({"at_least": 0.6}, "fails"),
    ],
)
def test_outcome_follows_the_whole_interval(bound: dict[str, float], outcome: str) -> None:
    (found,) = outcomes([loss(0.3, 0.5)], result="x.loss", **bound)
    assert found.outcome == outcome


def test_undecided_says_how_many_documents_would_decide() -> None:
    (found,) = outcomes([loss(0.3, 0.5)], result="x.loss", at_most=0.45)
    assert found.needed == 32, "half width 0.1 at distance 0.05, 8 documents"
    assert_names(outcome_text(found), "0.3 to 0.5", "32 documents")


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (loss(math.nan, math.nan, 2, value=0.1), "few samples"),
        (loss(0.1, 0.2, is_exact=False), "estimate"),
    ],
)
def test_values_without_interval_and_estimates_decide_nothing(result: Result, reason: str) -> None:
    (found,) = outcomes([result], result="x.loss", at_most=1)
    assert found.outcome == "undecided"
    assert_names(found.reason, reason)


def test_a_check_covers_every_matching_result() -> None:
    results = [loss(0, 1), loss(4, 5, where={"context_length": 512}), loss(9, 10, model="yarn")]
    assert [found.outcome for found in outcomes(results, result="x.loss", at_most=2)] == ["passes", "fails", "fails"]
    (found,) = outcomes(results, result="x.loss", at_most=5, where={"context_length": 512})
    assert found.subject == "base, context_length 512"
    assert len(outcomes(results, result="x.loss", at_most=5, model="base")) == 2


def test_bounds_relative_to_an_earlier_run_are_paired() -> None:
    new, old = [mean_of(AFTER)], [mean_of(BEFORE)]
    (rise,) = outcomes(new, old, result="x.loss", rises_at_most=0.2)
    assert (rise.outcome, rise.is_change) == ("undecided" if rise.high > 0.2 else "passes", True)
    assert rise.value == pytest.approx(0.15)
    (share,) = outcomes(new, old, result="x.loss", at_least="90 %")
    expected = np.array(AFTER) - 0.9 * np.array(BEFORE)
    assert share.value == pytest.approx(expected.mean())
    assert share.outcome == "passes"
    with refuses(BadInput, "x.loss", "90 %", "--against"):
        outcomes(new, None, result="x.loss", at_least="90 %")


def test_what_the_earlier_run_lacks_is_named_with_its_conditions() -> None:
    later = loss(0, 1, model="yarn", baseline="base", where={"context_length": 512})
    with refuses(BadInput, "--against", "x.loss for yarn against base, context_length 512", "by label"):
        outcomes([later], [loss(0, 1)], result="x.loss", rises_at_most=1)


def test_a_bound_relative_to_an_estimate_decides_nothing() -> None:
    (outcome,) = outcomes([mean_of(AFTER)], [mean_of(BEFORE, is_exact=False)], result="x.loss", rises_at_most=9)
    assert outcome.outcome == "undecided"
    assert_names(outcome.reason, "estimate")


def test_documents_needed_for_a_change_are_counted_from_the_paired_ones() -> None:
    new, old = [mean_of(AFTER[:4], names=DOCUMENTS[:4])], [mean_of(BEFORE)]
    (outcome,) = outcomes(new, old, result="x.loss", rises_at_most=0.2)
    half, distance = (outcome.high - outcome.low) / 2, 0.2 - outcome.value
    assert outcome.outcome == "undecided"
    assert outcome.needed == max(3, math.ceil(4 * (half / distance) ** 2 - 1e-9))


# Statistics of heads ------------------------------------------------------------------------------------------------


def heads(**columns: list[float]) -> pd.DataFrame:
    count = len(next(iter(columns.values())))
    return pd.DataFrame({"model": "base", "layer": 0, "head": range(count), **columns})


def check_heads(table: pd.DataFrame, **check: Any) -> CheckResult:
    run = fake_run([], ["base"], heads=table)
    (found,) = run_checks(run, [Check.model_validate({"statistic": "induction_token", **check})])
    return found


INDUCTION = {
    "induction_token": [0.9, 0.6, 0.55, 0.1],
    "induction_token_low": [0.8, 0.52, 0.45, 0.0],
    "induction_token_high": [1.0, 0.68, 0.65, 0.2],
}


@pytest.mark.parametrize(("at_least", "outcome"), [(2, "passes"), (3, "undecided"), (4, "fails")])
def test_count_of_heads_is_bounded_by_those_surely_and_possibly_above(at_least: int, outcome: str) -> None:
    found = check_heads(heads(**INDUCTION), count_above=0.5, at_least=at_least)
    assert (found.outcome, found.value, found.low, found.high) == (outcome, 3, 2, 3)


def test_count_below_and_median_and_head() -> None:
    table = heads(**INDUCTION)
    below = check_heads(table, count_below=0.5, at_least=1)
    assert (below.value, below.low, below.high) == (1, 1, 2)
    median = check_heads(table, median=True, at_least=0.4)
    assert (median.value, median.low, median.high) == pytest.approx((0.575, 0.485, 0.665))
    head = check_heads(table, head="0.1", at_most=0.7)
    assert (head.outcome, head.subject) == ("passes", "base: induction_token of L0H1")


def test_statistic_of_the_weights_is_decided_by_its_value() -> None:
    run = fake_run([], ["base"], heads=heads(ov_copying=[0.9, 0.1]))
    check = Check.model_validate({"statistic": "ov_copying", "count_above": 0.5, "at_least": 1})
    assert run_checks(run, [check])[0].outcome == "passes"


@pytest.mark.parametrize("value", [np.float32(0.7), np.nextafter(np.float32(0.7), np.float32(1)), 0.7])
@pytest.mark.parametrize("bound", [{"at_least": 0.7}, {"at_most": 0.7}])
def test_a_value_on_the_bound_passes(value: float, bound: dict[str, float]) -> None:
    run = fake_run([], ["base"], heads=heads(ov_copying=[float(value)]))
    assert run_checks(run, [Check.model_validate({"statistic": "ov_copying", "head": "0.0", **bound})])[0].outcome == (
        "passes"
    )


def test_written_checks_leave_out_a_head_whose_interval_ends_on_the_threshold_of_a_role(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("headscope.results.check_file.results_of_all_models", lambda run: run.results)
    low = float(np.nextafter(np.float32(0.5), np.float32(1)))
    table = heads(induction_token=[0.9, 0.6], induction_token_low=[0.8, low], induction_token_high=[1.0, 0.7])
    write_checks(fake_run([], ["base"], heads=table), tmp_path / "checks.yaml")
    assert [check.at_least for check in read_checks(tmp_path / "checks.yaml")] == [1]


def test_too_few_documents_leave_a_statistic_undecided() -> None:
    missing = dict.fromkeys(("induction_token_low", "induction_token_high"), [math.nan] * 4)
    found = check_heads(heads(**INDUCTION | missing), median=True, at_least=0)
    assert found.outcome == "undecided"


# Mistakes and files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{}", ["headscope check --help"]),
        ("- 3", ["check 1: 3", "at_least"]),
        ("- {result: x.loss}", ["check 1", "at_least, at_most, rises_at_most, falls_at_most"]),
        ("- {at_least: 1}", ["check 1", "'result'", "'statistic'"]),
        ("- {result: x, at_least: 1, at_most: 2}", ["check 1", "at_least, at_most, rises_at_most, falls_at_most"]),
        ("- {statistic: induction, at_least: 1}", ["check 1", "head, count_above, count_below, median"]),
        ("- {result: x, median: true, at_least: 1}", ["check 1", "'median'", "'statistic'"]),
        ("- {result: x, at_last: 1}", ["check 1", "'at_last'", "'at_least'"]),
        ("- {result: x, at_least: much}", ["check 1", "'at_least'", "'much'"]),
        ("- {statistic: induction, head: top, at_least: 1}", ["check 1", "'head'", "'top'", "L18H6"]),
        ("- {statistic: induction, head: 18.6, at_least: 1}", ["check 1", "'head'", "18.6", "quotes"]),
        ("- {statistic: induction, head: [L1H1], at_least: 1}", ["check 1", "'head'", "['L1H1']", "L18H6"]),
        ("- {result: x, at_least: .nan}", ["check 1", "'at_least'", "nan"]),
    ],
)
def test_mistakes_in_a_file_of_checks_are_one_line(text: str, named: list[str], tmp_path: Path) -> None:
    file = tmp_path / "checks.yaml"
    file.write_text(text, encoding="utf-8")
    with refuses(BadInput, file, *named) as error:
        read_checks(file)
    assert "\n" not in str(error.value)


def test_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"
    with refuses(BadInput, f"'{file}'", f"headscope check RUN --init {file}"):
        read_checks(file)


@pytest.mark.parametrize(
    ("check", "named"),
    [
        ({"result": "x.los", "at_least": 1}, ["'x.los'", "'x.loss'"]),
        ({"result": "x.share", "at_least": 1}, ["'x.share'", "x.loss"]),
        ({"result": "x.loss", "model": "bse", "at_least": 1}, ["'bse'", "'base'"]),
        ({"result": "x.loss", "where": {"a": 1}, "at_least": 1}, ["x.loss", "base", "a 1"]),
        ({"result": "x.loss", "where": {"a": 0}, "at_least": 1}, ["x.loss", "base", "a 0"]),
        ({"statistic": "inductoin_token", "median": True, "at_least": 1}, ["'inductoin_token'", "run.heads"]),
    ],
)
def test_a_check_that_matches_nothing_is_refused_by_name(check: dict[str, Any], named: list[str]) -> None:
    with refuses(BadInput, *named):
        outcomes([loss(0, 1)], **check)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- {statistic: x, median: true, rises_at_most: 5 %}", ["'rises_at_most'", "'5 %'", "at_most: 105 %"]),
        ("- {result: x, at_least: '90'}", ["'at_least'", "'90'", "90 %"]),
        ("- {result: x, where: base, at_least: 1}", ["'where'", "'base'", "{context_length: 512}"]),
        ("- {statistic: x, median: false, at_least: 1}", ["'median'", "False", "true"]),
        ("- {statistic: x, count_above: a, at_least: 1}", ["'count_above'", "'a'", "number"]),
        ("- {statistic: x, head: top, at_least: 1}", ["'head'", "'top'", "L18H6"]),
        ("- {statistic: x, head: [1], at_least: 1}", ["'head'", "[1]", "L18H6"]),
    ],
)
def test_a_wrong_value_is_answered_with_what_to_write(text: str, named: list[str], tmp_path: Path) -> None:
    file = tmp_path / "checks.yaml"
    file.write_text(text, encoding="utf-8")
    with refuses(BadInput, *named):
        read_checks(file)


def test_only_statistics_are_suggested() -> None:
    run = fake_run([], ["base"], heads=heads(**INDUCTION))
    check = Check.model_validate({"statistic": "layer", "median": True, "at_least": 1})
    with refuses(BadInput, "'layer'", "run.heads") as refusal:
        run_checks(run, [check])
    assert re.findall(r"'(\w+)'", str(refusal.value)) == ["layer"], "nothing similar is suggested"


def test_line_names_what_is_compared() -> None:
    (unnamed,) = outcomes([loss(0.3, 0.5)], result="x.loss", at_most=1)
    assert outcome_text(unnamed) == "x.loss: base, at most 1: 0.4 (0.3 to 0.5)"
    (named,) = outcomes([loss(0.3, 0.5)], name="x.loss is low", result="x.loss", at_most=1)
    assert outcome_text(named) == "x.loss is low: base, at most 1: 0.4 (0.3 to 0.5)"
    (share,) = outcomes([loss(2, 2.2)], [loss(1, 1)], result="x.loss", at_most="150 %")
    assert share.is_share
    assert_names(outcome_text(share), share.bound, "150 %", 0.6)
    statistic = check_heads(heads(**INDUCTION), median=True, at_least=0.4)
    assert_names(outcome_text(statistic), "base", "median induction_token", 0.4, 0.575)


def test_written_checks_count_the_heads_surely_above_the_threshold_of_a_role(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("headscope.results.check_file.results_of_all_models", lambda run: run.results)
    run = fake_run([], ["base"], heads=heads(**INDUCTION))
    assert write_checks(run, tmp_path / "checks.yaml") == 1
    (check,) = read_checks(tmp_path / "checks.yaml")
    assert (check.statistic, check.count_above, check.at_least) == ("induction_token", 0.5, 2)
    assert run_checks(run, [check])[0].outcome == "passes"


def test_junit_file_has_failures_and_undecided_checks(tmp_path: Path) -> None:
    results = [loss(0, 1), loss(4, 5, model="bad"), loss(1, 3, model="unsure")]
    write_junit(outcomes(results, result="x.loss", at_most=2), "night", tmp_path / "junit.xml")
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["3", "1", "1"]
    assert [[child.tag for child in case] for case in suite] == [[], ["failure"], ["error"]]
    with refuses(CannotWrite, tmp_path, "--junit"):
        write_junit([], "night", tmp_path)


@pytest.mark.parametrize(
    "content", ["- {result: x.loss, at_most: 2}\n", "<html></html>", '<testsuites name="pytest tests">']
)
def test_a_file_that_is_no_junit_file_is_refused_and_stays(content: str, tmp_path: Path) -> None:
    file = tmp_path / "checks.yaml"
    file.write_text(content)
    with refuses(CannotWrite, file, "not a JUnit file", "--junit"):
        remove_earlier_outcomes(file)
    assert file.read_text() == content
    with refuses(CannotWrite, tmp_path, "--junit"):
        remove_earlier_outcomes(tmp_path)
    with refuses(CannotWrite, "too long", "--junit"):
        remove_earlier_outcomes(tmp_path / ("a" * 300))


def test_an_older_junit_file_is_removed_and_names_of_any_characters_give_valid_xml(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    results = [Result(question="x.loss", value=3.0, low=2.9, high=3.1, model="a\x01\ud800b")]
    write_junit(outcomes(results, result="x.loss", at_most=2), "night\x00", junit)
    suite = ElementTree.parse(junit).getroot()[0]
    assert suite.get("name") == "night?"
    assert [path.name for path in tmp_path.iterdir()] == ["junit.xml"]
    remove_earlier_outcomes(junit)
    assert not junit.exists()
    (tmp_path / "file").write_text("")
    with refuses(CannotWrite, "file/junit.xml", "--junit"):
        write_junit([], "night", tmp_path / "file" / "junit.xml")


# Commands -----------------------------------------------------------------------------------------------------------

NIGHT = ("measure", "detectors", "positions")
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of one model on the same documents."""
    folder = tmp_path_factory.mktemp("nights")
    return [
        synthetic_run(folder / name, models=(name,), lengths=(256,), docs=5, seed=seed, probes=NIGHT).path
        for seed, name in enumerate(("monday", "tuesday"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "code", "outcome"),
    [
        ("at_most: 9", 0, "1 passed"),
        ("at_least: 9", 5, "1 failed"),
        ("at_most: {value}", 6, "1 undecided"),
        ("rises_at_most: 9", 0, "1 passed"),
    ],
)
def test_exit_code_says_whether_checks_fail_or_are_undecided(
    bound: str, code: int, outcome: str, headscope: Command, nights: list[Path], tmp_path: Path
) -> None:
    findings = Run.open(nights[1]).findings()
    value = findings.loc[findings["question"] == "loss.mean", "value"].iloc[0]
    file, junit = tmp_path / "checks.yaml", tmp_path / "junit.xml"
    file.write_text(f"- {{result: loss.mean, {bound.format(value=value)}}}", encoding="utf-8")
    exit_code, out, err = headscope("check", nights[1], file, "--against", nights[0], "--junit", junit)
    assert (exit_code, err) == (code, "")
    assert_names(out.splitlines()[-1], outcome)
    assert out.splitlines()[-1].count("0 ") == 2, "of the other outcomes"
    assert junit.is_file()
    assert headscope("check", nights[1], tmp_path / "missing.yaml", "--junit", junit)[0] == 2
    assert not junit.exists(), "an old outcome beside an error"
    exit_code, out, _ = headscope("check", nights[1], file, "--against", nights[0], "--json")
    assert exit_code == code
    assert json.loads(out)[0]["outcome"] in ("passes", "fails", "undecided")


def test_written_checks_pass_on_their_run(headscope: Command, nights: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "checks.yaml"
    code, out, _ = headscope("check", nights[0], file, "--init")
    assert code == 0
    assert_names(out, len(read_checks(file)), file)
    assert headscope("check", nights[0], file)[0] == 0
    code, _, err = headscope("check", nights[0], file, "--init")
    assert (code, len(err.splitlines())) == (2, 1)
    assert_names(err, file, "exists")


def test_checks_written_for_one_model_pass_whatever_the_label_of_the_model(
    headscope: Command, nights: list[Path], tmp_path: Path
) -> None:
    file = tmp_path / "checks.yaml"
    assert headscope("check", nights[0], file, "--init")[0] == 0
    size: Any = {"lengths": (256,), "docs": 5, "seed": 0, "probes": NIGHT}
    relabelled = synthetic_run(tmp_path, models=("night",), **size)
    assert relabelled.models != Run.open(nights[0]).models
    assert headscope("check", relabelled.path, file)[0] == 0


NIGHTLY = (Path(__file__).parents[1] / "docs" / "checks.md").read_text(encoding="utf-8").partition("## Every night")[2]
"""The part of the page about a check every night."""


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 2, 5, 6])
def test_the_documented_script_mails_all_but_passed_checks_and_keeps_only_those_runs(code: int, tmp_path: Path) -> None:
    (script,) = re.findall(r"^```text\n(#!/bin/sh.*?)^```", NIGHTLY, re.MULTILINE | re.DOTALL)
    commands = {
        "nightly.sh": script,
        "headscope": f'#!/bin/sh\n[ "$1" = run ] && echo "Run: runs/new" || exit {code}\n',
        "mail": '#!/bin/sh\necho "$@" > mailed.txt\n',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert subprocess.run(["./nightly.sh", "step-9"], cwd=tmp_path, env=path, check=False).returncode == code
    assert (tmp_path / "passed.txt").exists() == (code == 0)
    mailed = tmp_path / "mailed.txt"
    assert code == 0 or f"step-9, exit code {code}" in mailed.read_text()
    assert mailed.exists() == (code != 0)


@pytest.mark.slow
def test_the_documented_lines_measure_more_trials_and_documents_of_the_same_study(
    headscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny checkpoint, and four times as many in place of more."""
    save_checkpoint(tmp_path / "tiny")
    save_texts(tmp_path / "texts", 130)
    monkeypatch.chdir(tmp_path)
    (study,) = re.findall(r"^```yaml\n(# nightly.yaml.*?)^```", NIGHTLY, re.MULTILINE | re.DOTALL)
    blocks = yaml.safe_load(study)
    options = {"texts": {"source": "file:texts/*.txt", "docs": 1}, "detectors": {"periods": [16], "sequences": 1}}
    options |= {"measure": PROBES["measure"]["measure"], "needle": PROBES["needle"]["needle"]}
    assert blocks.keys() == {"name", *options}
    Path("nightly.yaml").write_text(yaml.safe_dump(blocks | options))
    counts = []
    lines = re.findall(r"^headscope (?:needle|run) .*nightly\.yaml.*CHECKPOINT.*", NIGHTLY, re.MULTILINE)
    for line in ("headscope run nightly.yaml --model night=CHECKPOINT", *lines):
        words = shlex.split(re.sub("CHECKPOINT", "tiny", re.sub(r"--(seeds|docs) \d+", r"--\1 4", line)), comments=True)
        code, out, err = headscope(*words[1:], "--quiet")
        assert code == 0, f"{line}: {err}"
        run = Run.open(re.findall("^Run: (.+)", out + err, re.MULTILINE)[0])
        assert {"nll", "detectors", "needles"} <= {*run.tables}
        counts.append((len(run.needles), run.nll["doc"].nunique()))
    (trials, documents), *more = counts
    assert more == [(4 * trials, documents), (trials, 4 * documents)]


@pytest.mark.slow
def test_compare_prints_what_changed(headscope: Command, nights: list[Path]) -> None:
    code, out, _ = headscope("compare", *nights, "--all")
    assert code == 0
    (line,) = [line for line in out.splitlines() if "loss.mean" in line]
    assert "paired" in line, "a row is one line in an output that is not a terminal"
    code, out, _ = headscope("compare", *nights, "--json")
    content = json.loads(out)
    (loss,) = [change for change in content["changes"] if change["after"]["question"] == "loss.mean"]
    assert loss["low"] <= loss["difference"] <= loss["high"]
    assert {"changes", "roles", "only_before", "only_after"} == {*content}
    frame = hs.compare(*nights)
    assert [*frame["question"]] == [change["after"]["question"] for change in content["changes"]]


def test_checks_in_python_take_mappings(nights: list[Path]) -> None:
    frame = hs.check(nights[0], [{"result": "loss.mean", "at_most": 9}], against=Run.open(nights[1]))
    assert [*frame["outcome"]] == ["passes"]
    with refuses(BadInput, "check 1", "'atmost'", "'at_most'"):
        hs.check(nights[0], [{"result": "loss.mean", "atmost": 9}])


@pytest.mark.slow
def test_report_of_two_runs_has_the_changes_between_them(nights: list[Path]) -> None:
    page = render_report([Run.open(path) for path in nights])
    assert "Changes between the runs" in page
    assert "Results without a clear change" in page
    assert "Changes between the runs" not in render_report([Run.open(nights[0])])


# Statistics of heads against an earlier run -------------------------------------------------------------------------


def head_bound(path: Path, earlier: Path, **check: Any) -> CheckResult:
    runs = [Run.open(path), Run.open(earlier)]
    for run in runs:
        run.manifest["models"][0]["documents_sha256"] = {f"synthetic/{index}": "same" for index in range(5)}
    (outcome,) = run_checks(runs[0], [Check.model_validate(check)], runs[1])
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("statistic", ["ess2_256", "growth"])
def test_a_named_head_is_paired_with_itself_by_document(statistic: str, nights: list[Path]) -> None:
    values = [Run.open(path).heads.query("layer == 1 and head == 2")[statistic].iloc[0] for path in nights]
    paired = head_bound(nights[1], nights[0], statistic=statistic, head="1.2", rises_at_most=0.5)
    assert paired.value == pytest.approx(values[1] - values[0], rel=1e-6)
    same = head_bound(nights[0], nights[0], statistic=statistic, head="1.2", falls_at_most=0)
    assert (same.outcome, same.low, same.high) == ("passes", 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("aggregate", [{"median": True}, {"count_above": 20.0}, {"count_below": 20.0}])
def test_counts_and_medians_of_equal_runs_have_not_changed(aggregate: dict[str, Any], nights: list[Path]) -> None:
    same = head_bound(nights[0], nights[0], statistic="ess2_256", falls_at_most=0, **aggregate)
    assert (same.outcome, same.low, same.high) == ("passes", 0, 0)


def test_paired_counts_cover_the_true_change_and_are_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 heads whose documents shift them together; a third of them falls by 0.1."""
    rng, runs_each = np.random.default_rng(0), 20
    check = Check.model_validate({"statistic": "far_weight", "count_above": 0.5, "falls_at_most": 3})
    monkeypatch.setattr(head_statistics, "head_samples", lambda run: run.samples)
    covered, widths, unpaired_widths = 0, [], []
    for _ in range(runs_each):
        true = rng.uniform(0.2, 0.8, 60)
        later = true - 0.1 * (np.arange(60) % 3 == 0)
        shift = rng.normal(0, 0.1, len(DOCUMENTS))
        runs = [sampled_run(means[:, None] + shift + rng.normal(0, 0.01, (60, 6))) for means in (true, later)]
        (paired,) = run_checks(runs[1], [check], runs[0])
        for run in runs:
            run.samples = pd.DataFrame()
        (unpaired,) = run_checks(runs[1], [check], runs[0])
        covered += paired.low <= (later > 0.5).sum() - (true > 0.5).sum() <= paired.high
        widths.append(paired.high - paired.low)
        unpaired_widths.append(unpaired.high - unpaired.low)
    assert covered >= 0.95 * runs_each
    assert np.mean(widths) < np.mean(unpaired_widths) / 2


def sampled_run(values: np.ndarray) -> Any:
    """A run whose heads have these values [heads, documents] of one statistic."""
    index = {"model": "base", "layer": 0, "head": range(len(values)), "kv_group": 0}
    samples = [Samples(pd.Index(DOCUMENTS), row) for row in values]
    low, high = confidence_interval(values)
    columns = {"far_weight": values.mean(axis=1), "far_weight_low": low, "far_weight_high": high}
    run = fake_run([], ["base"], heads=pd.DataFrame({**index, **columns}))
    run.samples = pd.DataFrame({"far_weight": samples}, pd.MultiIndex.from_frame(pd.DataFrame(index)))
    run.derived = lambda compute: compute(run)
    return run


@pytest.mark.slow
def test_checks_and_comparisons_cover_every_model_although_reports_show_few(nights: list[Path], tmp_path: Path) -> None:
    labels = tuple(f"step-{number}" for number in range(9))
    sizes: dict[str, Any] = {"layers": 2, "heads": 2, "lengths": (128,), "pairs": 2, "probes": ("measure",)}
    runs = [synthetic_run(tmp_path / str(docs), models=labels, docs=docs, **sizes).path for docs in (3, 4)]
    assert len(default_models(Run.open(runs[0]))) < len(labels)
    outcomes = hs.check(runs[0], [{"result": "loss.mean", "at_most": 100.0}])
    assert [subject.partition(",")[0] for subject in outcomes["subject"]] == [*labels]
    assert hs.check(runs[0], [{"result": "loss.mean", "model": labels[1], "at_most": 100.0}])["outcome"].tolist() == [
        "passes"
    ]
    changes = hs.compare(*runs)
    assert {*changes.loc[changes["question"] == "loss.mean", "model"]} == {*labels}
    findings = Run.open(runs[0]).findings()
    assert findings.loc[findings["question"] == "loss.mean", "model"].tolist() == [*labels]
    data = run_to_dict(Run.open(runs[0]))["results"]
    assert [row["model"] for row in data if row["question"] == "loss.mean"] == [*labels]
    report = render_report([Run.open(runs[0])])
    assert all(f"{label}: " in report for label in default_models(Run.open(runs[0])))
