"""The ablation probe: rows equal passes under `hs.ablated`, alone and together, and mistakes are refused."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import families
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import save_checkpoint, save_texts, tokenizer
from torch import Tensor

import headscope as hs
from headscope.base.ablation_names import column_part
from headscope.base.head_set import HeadSet
from headscope.base.model_identity import WeightDigests
from headscope.errors import BadInput, InputChanged, Interrupted
from headscope.interventions.ablation import REFERENCE_TOKENS
from headscope.interventions.replay import Replay
from headscope.models.loading import load_tokenizer
from headscope.rendering import assembly
from headscope.rendering.run_results import warning_lines
from headscope.results.effects.groups import random_controls
from headscope.results.words import headline, sentence, what_decides
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study import runner
from headscope.study.config import build_study
from headscope.study.progress import NoProgress
from probes.ablation import view
from probes.ablation.declaration import KINDS, POSITIONS_MARK
from probes.ablation.results import head_results, results

PROMPT, ANSWER, WRONG = "w1 w5 w9 w5", " w7", " w8"
ASKED = ("--prompt", PROMPT, "--answer", ANSWER)
ONE_PAIR = ("--pairs", "induction", "--count", "1", "--length", "40")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ablation")
    save_checkpoint(folder / "tiny")
    save_texts(folder / "texts", words=REFERENCE_TOKENS)
    return folder


def run_study(folder: Path, out: Path, seed: int = 0, **section: Any) -> Run:
    content = {
        "seed": seed,
        "models": {"base": f"{folder}/tiny@yarn:factor=4"},
        "texts": {"source": f"file:{folder}/texts/*.txt"},
        "device": "cpu",
        "ablation": section,
    }
    return runner.run_study(build_study(content), out, progress=NoProgress())


def answer_log_probability(model: Any, heads: Any, kind: Any, text: str) -> float:
    ids = torch.tensor([tokenizer()(PROMPT)["input_ids"]])
    with torch.no_grad(), hs.attached(model), hs.ablated(model, heads, kind, text=text):
        logits = model.module(ids, use_cache=False).logits[0, -1]
    return float(logits.log_softmax(-1)[tokenizer()(ANSWER)["input_ids"][0]])


def test_heads_may_be_a_head_set_or_pairs_as_in_ablated(folder: Path, tmp_path: Path) -> None:
    """`hs.ablate(heads=run.top_heads(...))` is what a notebook writes."""
    named = ["L2H3", "L0H1"]
    for heads in (HeadSet.parse(named), [(2, 3), (0, 1)], named):
        section = {"prompt": PROMPT, "answer": ANSWER, "heads": heads}
        run = run_study(folder, tmp_path, **section)
        assert run.manifest["config"]["ablation"]["heads"] == named
        shutil.rmtree(run.path)


def test_a_head_set_of_other_weights_is_refused_as_in_ablated(folder: Path, tmp_path: Path) -> None:
    own = hs.load(f"{folder}/tiny", device="cpu").weights_sha256
    for digest, weights in ((own, "same"), ("0" * 64, "any")):
        heads = HeadSet(((2, 3), (0, 1)), model_digests=WeightDigests(digest))
        run = run_study(folder, tmp_path, prompt=PROMPT, answer=ANSWER, heads=heads, weights=weights)
        assert {*zip(run.ablation["layer"], run.ablation["head"], strict=True)} == {*heads}
    with refuses(BadInput, "000000000000", own[:12], "--weights any"):
        run_study(folder, tmp_path, prompt=PROMPT, answer=ANSWER, heads=heads)


def named_or_random(draw: int) -> list[tuple[int, int]]:
    """The heads L0H1, L2H0 and L2H3, or the random control of a draw for the first prompt."""
    named, heads = [(0, 1), (2, 0), (2, 3)], [(layer, head) for layer in range(4) for head in range(4)]
    return random_controls(named, heads, [[0, 0, draw]])[0] if draw else named


def test_rows_equal_passes_with_the_heads_ablated_alone_and_together(folder: Path, tmp_path: Path) -> None:
    heads = ["L0H1", "L2H3", "L2H0"]
    section = {"prompt": PROMPT, "answer": ANSWER, "heads": heads, "kinds": ["zero", "mean", "streaming:0+1"]}
    run = run_study(folder, tmp_path, **section)
    assert validate(run) == []
    model, text = hs.load(f"{folder}/tiny@yarn:factor=4", device="cpu"), f"file:{folder}/texts/*.txt"
    rows = run.table("ablation")
    assert len(rows) == 3 * 3
    for row in rows.to_dict("records"):
        expected = answer_log_probability(model, [(row["layer"], row["head"])], row["kind"], text)
        assert row["metric_after"] == pytest.approx(expected, abs=1e-5)
        assert abs(row["metric_after"] - row["metric_before"]) > 1e-4
    sets = run.table("ablation_sets")
    assert {*sets["draw"]} == {*range(6)}
    for row in sets.to_dict("records"):
        assert row["size"] == 3
        expected = answer_log_probability(model, named_or_random(row["draw"]), row["kind"], text)
        assert row["metric_after"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("most", "batches"), [(1, [1] * 6), (4, [4, 2]), (100, [6])])
def test_named_heads_and_their_controls_are_ablated_in_batches(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, batches: list[int]
) -> None:
    """One pass of every kind for all sets, or more if the memory holds fewer runs; values are those of single passes.

    The heads are in two layers, and are ablated at the last token only.
    """
    counts: list[int] = []
    hidden_states = Replay.hidden_states

    def count_sets(self: Replay, runs: Sequence[Any]) -> Tensor:
        sets = [run for run in runs if sum(len(edit.heads) for edit in run) == 3]
        counts.extend([len(sets)] if sets else [])
        return hidden_states(self, runs)

    monkeypatch.setattr("headscope.interventions.replay.runs_per_batch", lambda *_: most)
    monkeypatch.setattr(Replay, "hidden_states", count_sets)
    section = {"heads": ["L0H1", "L2H3", "L2H0"], "positions": ["last"], "kinds": ["zero", "mean", "streaming:0+1"]}
    run = run_study(folder, tmp_path, prompt=PROMPT, answer=ANSWER, **section)
    assert counts == 3 * batches
    sets = run.table("ablation_sets").astype({"kind": "str"})
    assert len(sets) == 18
    model, text = hs.load(f"{folder}/tiny@yarn:factor=4", device="cpu"), f"file:{folder}/texts/*.txt"
    ids = torch.tensor([tokenizer()(PROMPT)["input_ids"]])
    for row in sets.to_dict("records"):
        heads, kind = named_or_random(row["draw"]), row["kind"].partition(POSITIONS_MARK)[0]
        with torch.no_grad(), hs.attached(model), hs.ablated(model, heads, kind, text=text, positions="last"):
            logits = model.module(ids, use_cache=False).logits[0, -1]
        expected = float(logits.log_softmax(-1)[tokenizer()(ANSWER)["input_ids"][0]])
        assert row["metric_after"] == pytest.approx(expected, abs=1e-5)


def write_prompts(file: Path, *prompts: str) -> str:
    pairs = [
        {"name": f"p{n}", "clean": clean, "corrupted": clean, "answer": ANSWER, "wrong": WRONG}
        for n, clean in enumerate(prompts)
    ]
    file.write_text("\n".join(map(json.dumps, pairs)))
    return str(file)


@pytest.fixture(scope="module")
def resampled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Resample ablation of two heads on three prompts of three tokens and two of four."""
    out = tmp_path_factory.mktemp("resampled")
    file = write_prompts(out / "prompts.jsonl", "w0 w5 w9", "w1 w5 w9", "w2 w6 w9", "w0 w5 w9 w3", "w4 w5 w9 w3")
    section = {"pairs": [file], "kinds": ["resample"], "heads": ["L0H1", "L2H3"], "metric": "logit_diff"}
    return run_study(folder, out / "runs", **section)


def inputs_of_o_proj(model: Any, prompt: str) -> list[Tensor]:
    """The inputs of every o_proj [1, L, H d] in a plain pass over a prompt."""
    inputs: list[Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        for layer in model.module.model.layers
    ]
    model.module(torch.tensor([tokenizer()(prompt)["input_ids"]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return inputs


def resampled_logit_difference(model: Any, prompt: str, other: str, heads: list[tuple[int, int]]) -> float:
    """The logit difference when columns of the inputs of o_proj come from another prompt, by hand."""
    inputs, hooks = inputs_of_o_proj(model, other), []
    for layer, head in heads:

        def replace(module: Any, args: Any, new: Tensor = inputs[layer], first: int = 16 * head) -> Any:
            z = args[0].clone()
            z[..., first : first + 16] = new[..., first : first + 16]
            return (z,)

        hooks.append(model.module.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(replace))
    logits = model.module(torch.tensor([tokenizer()(prompt)["input_ids"]]), use_cache=False).logits[0, -1]
    for hook in hooks:
        hook.remove()
    answer, wrong = (tokenizer()(text)["input_ids"][0] for text in (ANSWER, WRONG))
    return float(logits[answer] - logits[wrong])


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "prompt", "others"),
    [("p0", "w0 w5 w9", ["w1 w5 w9", "w2 w6 w9"]), ("p4", "w4 w5 w9 w3", ["w0 w5 w9 w3"])],
)
def test_resampled_outputs_come_from_the_other_prompts_of_the_same_length(
    resampled: Run, folder: Path, name: str, prompt: str, others: list[str]
) -> None:
    model = hs.load(f"{folder}/tiny@yarn:factor=4", device="cpu")
    single, together = (table[table["pair"] == name] for table in map(resampled.table, ("ablation", "ablation_sets")))
    with hs.attached(model):
        for heads, values in (
            ([(0, 1)], single.loc[single["head"] == 1, "metric_after"]),
            ([(2, 3)], single.loc[single["head"] == 3, "metric_after"]),
            ([(0, 1), (2, 3)], together.loc[together["draw"] == 0, "metric_after"]),
        ):
            expected = [resampled_logit_difference(model, prompt, other, heads) for other in others]
            assert values.to_list() == [pytest.approx(sum(expected) / len(expected), abs=1e-4)]


@pytest.mark.slow
def test_draws_limit_the_other_prompts_and_follow_the_seed(folder: Path, tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "own.jsonl", *(f"w{n} w5 w{n + 9}" for n in range(6)))

    def values(out: str, draws: int, seed: int = 0) -> list[float]:
        section = {"pairs": [file], "kinds": ["resample"], "heads": ["L0H1"], "draws": draws}
        return run_study(folder, tmp_path / out, seed=seed, **section).table("ablation")["metric_after"].to_list()

    assert values("a", 1) == values("b", 1)
    assert values("c", 1, seed=1) != values("d", 1)
    assert values("e", 9) == pytest.approx(values("f", 5), abs=1e-6)  # all five others


def test_every_head_is_ablated_by_default_on_every_clean_prompt_of_a_file(folder: Path, tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "prompts.jsonl", *(f"w{n} w5 w9" for n in range(3)))
    run = run_study(folder, tmp_path / "runs", pairs=[file], kinds=["resample"], metric="logit_diff", keep_failing=True)
    rows = run.table("ablation")
    assert len(rows) == 3 * 16
    assert set(rows["prompts"]) == {"prompts"}
    assert "ablation_sets" not in run.tables
    row = rows[(rows["layer"] == 1) & (rows["head"] == 2)]
    head = run.heads[(run.heads["layer"] == 1) & (run.heads["head"] == 2)].iloc[0]
    change = (row["metric_after"].astype(float) - row["metric_before"].astype(float)).mean()
    assert head["ablation_resample"] == pytest.approx(change, abs=1e-6)
    of_set = {"ablation.answered", "ablation.top", "ablation.lowest"}
    answered, top, lowest = (result for result in results(run) if result.question in of_set)
    assert (answered.question, answered.n, answered.details["unanswered"]) == ("ablation.answered", 3, 1)
    assert (top.question, lowest.question, top.model) == ("ablation.top", "ablation.lowest", "base")
    changes = run.heads["ablation_resample"]
    highest = run.heads.loc[changes.idxmax()]
    assert (top.layer, top.head) == (highest["layer"], highest["head"])
    assert (top.value, lowest.value) == pytest.approx((changes.max(), changes.min()))
    assert top.selected_from == lowest.selected_from == 16
    assert top.low < run.heads.loc[changes.idxmax(), "ablation_resample_low"]
    for sign in (1, -1):
        one_sided = Run.open(run.path)
        effect = (rows["metric_after"] - rows["metric_before"]).abs()
        one_sided._frames["ablation"] = rows.assign(metric_after=rows["metric_before"] + sign * effect)
        _, top, lowest = (result for result in results(one_sided) if result.question in of_set)
        assert sign * top.value >= 0
        assert sign * lowest.value >= 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "control", "verdict"),
    [
        ([-4.0, -5.0, -6.0, -5.0], [-0.1, 0.1, -0.2, 0.2], "supported"),
        ([4.0, 5.0, 6.0, 5.0], [-0.1, 0.1, -0.2, 0.2], "not supported"),
        ([-1.0, 1.0, -2.0, 2.0], [-0.1, 0.1, -0.2, 0.2], "inconclusive"),
    ],
)
def test_named_heads_are_judged_against_random_heads_on_the_same_prompts(
    tmp_path: Path, named: list[float], control: list[float], verdict: str
) -> None:
    run = synthetic_run(tmp_path, pairs=4, lengths=(256,))
    keys = {"model": "base", "prompts": "own", "kind": "zero", "metric": "logprob", "size": 2, "metric_before": -1.0}
    keys["is_counted"] = True
    rows = [
        {**keys, "pair": f"p{n}", "draw": draw, "metric_after": -1.0 + change + 0.01 * draw * (-1) ** draw}
        for n in range(4)
        for draw, change in enumerate([named[n], control[n], control[n]])
    ]
    run._frames["ablation_sets"] = pd.DataFrame(rows)
    (result,) = (one for one in results(run) if one.question == "ablation.control")
    assert result.verdict == verdict
    assert result.value == pytest.approx(np.mean(named) - np.mean(control) - 0.005)
    assert result.details["named_low"] < np.mean(named) < result.details["named_high"]
    assert_names(headline(result), verdict)
    assert (verdict == "inconclusive") == bool(what_decides(result))


def test_all_heads_of_a_layer_have_no_control(folder: Path, tmp_path: Path) -> None:
    run = run_study(folder, tmp_path, prompt=PROMPT, answer=ANSWER, heads=[f"L1H{head}" for head in range(4)])
    assert run.table("ablation_sets")["draw"].to_list() == [0]
    assert not [result for result in results(run) if result.question == "ablation.control"]


def test_progress_is_reported_within_one_prompt(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscope.interventions.replay.runs_per_batch", lambda *_: 4)

    class Counts(NoProgress):
        steps = 0

        def advance(self, cost: float) -> None:
            self.steps += 1

    progress, content = Counts(), {"models": {"base": f"{folder}/tiny"}, "device": "cpu"}
    content["ablation"] = {"prompt": PROMPT, "answer": ANSWER}
    runner.run_study(build_study(content), tmp_path, progress=progress)
    assert progress.steps >= 4, "one step per batch of 4 of 16 heads"


def test_heads_come_from_a_saved_set_and_from_the_top_heads_of_a_run(folder: Path, tmp_path: Path) -> None:
    run = run_study(folder, tmp_path / "first", prompt=PROMPT, answer=ANSWER)
    run.top_heads("ablation_zero", 2).write(tmp_path / "top.yaml")
    expected = [*run.top_heads("ablation_zero", 2)]
    for number, name in enumerate((f"file:{tmp_path}/top.yaml", f"run:{run.path}:ablation_zero:2")):
        heads = [name, "L1H1"]
        again = run_study(folder, tmp_path / f"again{number}", prompt=PROMPT, answer=ANSWER, heads=heads)
        rows = again.table("ablation")
        assert {*zip(rows["layer"], rows["head"], strict=True)} == {*expected, (1, 1)}
        assert {*again.table("ablation_sets")["size"]} == {len({*expected, (1, 1)})}


@pytest.mark.slow
def test_the_set_needle_ablates_heads_while_the_model_answers_about_a_hidden_fact(folder: Path, tmp_path: Path) -> None:
    words = load_tokenizer("smollm2-135m")
    module = families.build("llama", {"vocab_size": len(words)})
    run = hs.ablate(
        hs.load(module, tokenizer=words),
        pairs=["needle"],
        count=3,
        length=96,
        heads=["L1H0"],
        kinds=["zero", "resample"],
        text=f"file:{folder}/texts/*.txt",
        docs=1,
        out=str(tmp_path),
        quiet=True,
    )
    rows = run.table("ablation")
    assert rows.groupby(["pair", "kind"], observed=True).size().to_dict() == {
        (f"needle {n}", kind): 1 for n in range(3) for kind in ("zero", "resample")
    }
    assert (rows["metric_after"] - rows["metric_before"]).abs().min() > 1e-6


class StopsAfterOneCell(NoProgress):
    """Interrupts the study when its second cell starts."""

    def __init__(self) -> None:
        self.cells = 0

    def set_activity(self, activity: str, worker: str = "") -> None:
        self.cells += 1
        if self.cells > 2:  # the first activity is the position parameters
            raise KeyboardInterrupt


def test_a_run_whose_reference_text_changed_is_not_resumed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for file in (folder / "texts").iterdir():
        (tmp_path / "texts" / file.name).write_bytes(file.read_bytes())
    content = {
        "models": {"base": f"{folder}/tiny", "yarn": f"{folder}/tiny@yarn:factor=4"},
        "texts": {"source": f"file:{tmp_path}/texts/*.txt"},
        "device": "cpu",
        "ablation": {"prompt": PROMPT, "answer": ANSWER, "kinds": ["mean"]},
    }
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        runner.run_study(build_study(content), tmp_path / "runs", progress=StopsAfterOneCell())
    for file in (tmp_path / "texts").iterdir():
        file.write_text(" ".join(reversed(file.read_text().split())))
    with refuses(InputChanged, "reference", "'base'"):
        runner.run_study(build_study(content), tmp_path / "runs", progress=NoProgress(), resume=True)


@pytest.mark.parametrize(
    ("named", "flags"),
    [
        (("--prompt", "--answer", "--pairs"), ()),
        (("'prompt'", "--answer", "' w7 w8'", "2 tokens"), ("--prompt", PROMPT, "--answer", " w7 w8")),
        (("L9H0",), (*ASKED, "--heads", "L9H0")),
        (("'first'", "all, file:FILE"), (*ASKED, "--heads", "first")),
        (("'wrong'", "--metric logprob"), (*ASKED, "--metric", "logit_diff")),
        (("--kinds", "'noise'"), (*ASKED, "--kinds", "noise")),
        (("--prompt", "empty"), ("--prompt", "", "--answer", ANSWER)),
        (("--kinds", "streaming:4+0"), (*ASKED, "--kinds", "streaming:4+0")),
        (("--kinds", "'streaming'", "streaming:S+R"), (*ASKED, "--kinds", "streaming")),
        (("resample", 40, "'induction'"), (*ONE_PAIR, "--kinds", "resample")),
        (("'run:folder'", "run:FOLDER:STATISTIC:COUNT[:MODEL]"), (*ASKED, "--heads", "run:folder")),
        (("'heads.yaml'", "file:FILE", "run:FOLDER:STATISTIC:COUNT[:MODEL]"), (*ASKED, "--heads", "heads.yaml")),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    refused: Callable[..., str], folder: Path, named: tuple[object, ...], flags: tuple[str, ...]
) -> None:
    assert_names(refused(2, "ablate", "--model", f"{folder}/tiny", "--device", "cpu", "--quiet", *flags), *named)


def test_two_files_of_one_name_are_refused(refused: Callable[..., str], folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pair = {"name": name, "clean": PROMPT, "corrupted": PROMPT, "answer": ANSWER}
        (tmp_path / name / "own.jsonl").write_text(json.dumps(pair))
    files = ("--pairs", f"{tmp_path}/a/own.jsonl", "--pairs", f"{tmp_path}/b/own.jsonl")
    line = refused(2, "ablate", "--model", f"{folder}/tiny", "--device", "cpu", "--quiet", *files)
    assert_names(line, "two", "'own'")


@pytest.mark.slow
def test_report_and_head_page_have_the_changes_of_every_head(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, pairs=4, lengths=(256,))
    (group,) = view.charts(assembly.render_context(run))
    assert len([*group.charts]) == len(KINDS)
    of_head = [*head_results(run, "base", 1, 2)]
    row = run.heads[(run.heads["model"] == "base") & (run.heads["layer"] == 1) & (run.heads["head"] == 2)].iloc[0]
    kinds = [result.where["intervention"] for result in of_head]
    columns = [column_part("streaming" if kind.startswith("streaming:") else kind) for kind in kinds]
    assert [result.value for result in of_head] == pytest.approx([row[f"ablation_{column}"] for column in columns])
    assert len(of_head) == len(KINDS)
    every_result = [*results(run)]
    assert len({result.key for result in every_result}) == len(every_result)
    assert sum(result.question in {"ablation.top", "ablation.lowest"} for result in every_result) == 2 * 2 * len(KINDS)
    assert all(sentence(result) for result in every_result)


@pytest.mark.parametrize("keeps", [False, True])
def test_prompts_that_the_model_does_not_answer_are_named_and_count_only_if_kept(
    folder: Path, tmp_path: Path, keeps: bool
) -> None:
    """The second file exchanges answer and wrong answer, so every logit difference has the other sign."""
    shares = []
    for name, answer, wrong in (("plain", ANSWER, WRONG), ("exchanged", WRONG, ANSWER)):
        lines = [
            {"name": f"p{n}", "clean": f"w{n} w5 w9", "corrupted": "w8 w5 w9", "answer": answer, "wrong": wrong}
            for n in range(4)
        ]
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, lines)))
        options = {"pairs": [str(file)], "heads": ["L0H1"], "metric": "logit_diff", "keep_failing": keeps}
        run = run_study(folder, tmp_path / name, **options)
        values = run.table("ablation").query("model == 'base'").set_index("pair")["metric_before"]
        by_question = {one.question: one for one in results(run) if one.model == "base"}
        failing = {str(pair): float(value) for pair, value in values.items() if value <= 0}
        shares.append(len(failing) / 4)
        answered = by_question["ablation.answered"]
        assert (answered.value, answered.n) == (1 - len(failing) / 4, 4)
        assert (answered.details["unanswered"] or 0) == (len(failing) if keeps else 0)
        assert ("ablation.wrong" in by_question) == (bool(failing) and not keeps)
        if "ablation.wrong" in by_question:
            assert by_question["ablation.wrong"].details["names"] == pytest.approx(failing)
            warning = sentence(by_question["ablation.wrong"])
            assert warning in warning_lines(run)
            assert ("may be exchanged" in warning) == (len(failing) > 2)
        counted = 4 if keeps else 4 - len(failing)
        assert {one.n for one in results(run) if one.question == "ablation.only"} <= {counted}
        assert (counted > 0) == ("ablation_zero" in run.heads)
    assert sum(shares) == 1


def test_prompts_that_differ_in_what_is_not_run_give_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three corruptions of one clean prompt are three pairs to patch, but one prompt to ablate."""
    lines = [
        {"name": f"p{n}", "clean": "w3 w5 w9", "corrupted": f"w{n} w5 w9", "answer": ANSWER, "wrong": WRONG}
        for n in (10, 11, 12)
    ]
    file = tmp_path / "equal.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    run_study(folder, tmp_path / "runs", pairs=[str(file)], heads=["L0H1"], keep_failing=True)
    messages = [record.getMessage() for record in caplog.records if "repeat the clean prompt" in record.getMessage()]
    assert_names(messages[0], "2 of 3", "'equal'", "'p11' is 'p10'", "independent")


def test_a_head_set_that_changed_is_refused_on_resume_whichever_probe_reads_it(folder: Path, tmp_path: Path) -> None:
    """Two probes of one study read a file of heads each; the first one changes."""
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps({"name": "p", "clean": "w1 w5 w9", "corrupted": "w8 w5 w9", "answer": ANSWER, "wrong": WRONG})
    )
    for name, head in (("ablated", "L0H1"), ("patched", "L1H1")):
        (tmp_path / f"{name}.yaml").write_text(f"[{head}]")
    pairs = [str(tmp_path / "pairs.jsonl")]
    content = {
        "models": {"base": f"{folder}/tiny"},
        "device": "cpu",
        "ablation": {"pairs": pairs, "heads": [f"file:{tmp_path}/ablated.yaml"], "random_sets": 0},
        "patching": {"pairs": pairs, "heads": [f"file:{tmp_path}/patched.yaml"], "keep_failing": True},
    }
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        runner.run_study(build_study(content), tmp_path / "runs", progress=StopsAfterOneCell())
    for name in ("ablated", "patched"):
        file = tmp_path / f"{name}.yaml"
        before = file.read_text()
        file.write_text("[L0H0]")
        with refuses(InputChanged, "heads", f"{name}.yaml"):
            runner.run_study(build_study(content), tmp_path / "runs", progress=NoProgress(), resume=True)
        file.write_text(before)
