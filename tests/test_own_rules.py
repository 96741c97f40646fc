"""Whole models whose heads each attend by their own best rule, and answers under rules that later queries choose."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import eager_reference, families
from support.dense_sparse_sets import dense_sets
from support.eager_reference import Layer
from support.tiny_studies import StopsAfter, contents, save_checkpoint, save_texts, tokenizer
from torch import Tensor

import headscope as hs
from headscope.errors import Interrupted
from headscope.interventions.sparse_attention import attending_by
from headscope.measures.sparse_rules import parse_rule
from headscope.prompts.texts import load_token_documents
from headscope.rendering import assembly
from headscope.results.words import headline, sentence
from headscope.runs.aggregation import mean_losses, plain_types
from headscope.runs.run import Run
from headscope.runs.writer import RunWriter
from headscope.study.config import Study, build_study
from headscope.study.context import StudyContext
from headscope.study.executor import JobExecutor
from headscope.study.ray_worker import RayWorker
from headscope.study.runner import run_study
from probes.sparsity import results as sparsity_results
from probes.sparsity.analysis import choose_rules, recall_by_depth, rule_at_cost, rule_family
from probes.sparsity.patterns import PromptRule, own_rules
from probes.sparsity.view import charts

LENGTH, DOCS, MAX_ERROR = 40, 3, 1e-5
FAMILIES = {"block-mean:4": (1, 4), "streaming:1": (3, 15), "vertical-slash": (2, 12)}
RULES = ["top:4", "top:8", "top:12", *(f"{name}:{size}" for name in ("block-mean:4", "streaming:1") for size in
         FAMILIES[name]), *(f"vertical-slash:{size}:{size}" for size in FAMILIES["vertical-slash"])]  # fmt: skip
BEST = ["best:top:4", "best:top:8", "best:top:12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own_rules")
    save_checkpoint(folder / "tiny")
    save_texts(folder / "texts")
    return folder


def study(
    folder: Path, measure: bool = True, docs: int = DOCS, budget: dict[str, Any] | None = None, **changes: Any
) -> Study:
    """Passes over the texts are shared with another probe."""
    options = {"lengths": [LENGTH], "rows": 8, "rules": RULES, "loss": True, **changes}
    return build_study(
        {
            "models": {"base": str(folder / "tiny")},
            "texts": {"source": f"file:{folder}/texts/*.txt", "docs": docs},
            "device": "cpu",
            "sparsity": options,
            **({"measure": {"lengths": [LENGTH], "rows": 8, "tables": ["nll"]}} if measure else {}),
            **({"budget": budget} if budget else {}),
        }
    )


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return run_study(study(folder), folder / "runs")


def chosen(run: Run, rule: str, left_out: str) -> dict[tuple[int, int], str]:
    rows = plain_types(run.rows("sparse_choice", rule=rule, left_out=left_out))
    return {(row.layer, row.head): str(row.own_rule) for row in rows.itertuples()}


def family_recall(rows: pd.DataFrame, family: str, cost: float) -> float:
    """Recall of a family at a cost between two measured sizes; none beyond them."""
    points = rows[rows["rule"].map(rule_family) == family].groupby("rule")[["kept", "recall"]].mean()
    (less, low), (more, high) = sorted(points.itertuples(index=False, name=None))
    if not less <= cost <= more:
        return -1.0
    share = np.log(cost / less) / np.log(more / less)
    return float((1 - share) * low + share * high)


@pytest.mark.slow
def test_each_head_has_the_rule_of_largest_recall_at_equal_cost_in_the_other_documents(run: Run) -> None:
    stored = plain_types(run.rows("sparse_rows"))
    for judged in stored["doc"].unique():
        rows, rules = stored[stored["doc"] != judged], chosen(run, "best:top:8", judged)
        assert len(rules) == families.LAYERS * families.HEADS
        for (layer, head), rule in rules.items():
            of_head = rows[(rows["layer"] == layer) & (rows["head"] == head)]
            cost = of_head[of_head["rule"] == "top:8"]["kept"].mean()
            recall = {family: family_recall(of_head, family, cost) for family in FAMILIES}
            assert rule_family(rule) == max(recall, key=recall.__getitem__)
        assert len({*map(rule_family, rules.values())}) > 1
    assert {*run.rows("sparse_choice")["rule"]} == {*BEST}


def test_the_size_of_a_rule_lies_between_the_measured_ones_by_the_log_of_the_kept_keys() -> None:
    kept = pd.Series({"streaming:4:60": 64.0, "streaming:4:252": 256.0})
    assert rule_at_cost(kept, 256) == "streaming:4:252"
    assert rule_at_cost(kept, 128) == f"streaming:4:{round((60 * 252) ** 0.5)}"
    assert rule_at_cost(kept, 1000) == "streaming:4:252"
    assert rule_at_cost(pd.Series({"vertical-slash:30:800": 500.0}), 256) == "vertical-slash:30:800"


def test_heads_whose_cost_no_rule_reaches_have_the_nearest_size() -> None:
    recall = {"top:8": 0.9, "streaming:1:3": 0.4, "block-mean:4:1": 0.5}
    kept = {"top:8": 8.0, "streaming:1:3": 4.0, "block-mean:4:1": 3.0}
    rows = pd.DataFrame([
        {"layer": 0, "head": head, "rule": rule, "recall": recall[rule], "kept": kept[rule],
         "needs_dense": rule == "top:8"} for head in (0, 1) for rule in recall
    ])  # fmt: skip
    assert choose_rules(rows, "top:8").to_dict() == {(0, 0): "block-mean:4:1", (0, 1): "block-mean:4:1"}


@pytest.mark.slow
def test_the_stored_loss_is_that_of_eager_attention_with_each_heads_own_mask(folder: Path, run: Run) -> None:
    model = hs.load(str(folder / "tiny"), device="cpu")
    documents = load_token_documents(f"file:{folder}/texts/*.txt", tokenizer(), DOCS, LENGTH)
    losses = mean_losses(plain_types(run.rows("sparse_loss")).astype({"nll": float}), ["rule", "doc"])
    for document in documents:
        ids = torch.tensor(document.ids[:LENGTH])[None]
        for name in BEST:
            logits = own_logits(model.module, ids, chosen(run, name, document.name))
            expected = torch.nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:])
            assert losses[name, document.name] == pytest.approx(float(expected), abs=MAX_ERROR)


def own_logits(module: Any, ids: Tensor, rules: dict[tuple[int, int], str]) -> Tensor:
    """Logits of eager attention in which each head sees the keys of its own rule."""
    layers = iter(range(families.LAYERS))

    def choose(layer: Layer) -> Tensor:
        number, weights = next(layers), eager_reference.layer_weights(layer)
        sets = {
            head: dense_sets(rules[number, head], weights, layer.q.double(), layer.k.double())[head]
            for head in range(len(layer.q))
        }
        return torch.stack([*sets.values()])

    return eager_reference.eager_qk(module, ids, choose)[0]


@pytest.mark.slow
def test_the_result_compares_own_rules_with_the_best_rule_for_all_at_their_cost(run: Run) -> None:
    (result,) = (r for r in sparsity_results.results(run) if r.question == "sparsity.own_rules")
    stored = plain_types(run.rows("sparse_loss")).astype({"nll": float})
    losses, kept = mean_losses(stored, ["rule", "doc"]), stored.groupby(["rule", "doc"])["kept"].first()
    differences = {}
    for family, sizes in FAMILIES.items():
        less, more = [f"{family}:{size}" if family != "vertical-slash" else f"{family}:{size}:{size}" for size in sizes]
        differences[family] = {}
        for doc in losses.index.unique("doc"):
            share = np.log(kept["best:top:8", doc] / kept[less, doc]) / np.log(kept[more, doc] / kept[less, doc])
            one = (1 - share) * losses[less, doc] + share * losses[more, doc]
            assert 0 < share < 1
            differences[family][doc] = losses["best:top:8", doc] - one
    best = max(differences, key=lambda family: np.mean([*differences[family].values()]))
    assert result.details["family"] == best
    assert result.by_sample == pytest.approx(differences[best])
    assert (result.details["others"], result.selected_from) == (2, 3)
    assert "{" not in sentence(result) + headline(result)


def test_own_rules_are_a_line_of_the_chart_and_no_bound(run: Run) -> None:
    (group,) = (g for g in charts(assembly.render_context(run)) if g.heading == "Rules in the whole model")
    chart: Any = next(iter(group.charts))
    figure = chart.figure
    (line,) = (trace for trace in figure.data if trace.name == "best")
    assert [*line.customdata] == BEST
    answers = [*sparsity_results.results(run)]
    (lowest,) = (r for r in answers if r.question == "sparsity.lowest_loss")
    assert (lowest.details["family"] in FAMILIES, lowest.details["bound"]) == (True, "top")
    by_rule = [r.where["rule"] for r in answers if r.question == "sparsity.loss"]
    assert by_rule == [*RULES, *BEST]


def test_orders_of_budget_are_lines_of_the_chart_at_the_keys_that_their_rows_keep(folder: Path, tmp_path: Path) -> None:
    """A third of the KV groups with 4 keys (of early rows fewer), the others with all."""
    budget = {
        "lengths": [LENGTH],
        "shares": [0.5],
        "orders": ["far-mass", "random"],
        "draws": 2,
        "sink": 1,
        "recent": 3,
    }
    both = run_study(study(folder, budget=budget, rules=["top:4", "top:8"]), tmp_path)
    (group,) = (g for g in charts(assembly.render_context(both)) if g.heading == "Rules in the whole model")
    chart: Any = next(iter(group.charts))
    lines = {trace.name: trace for trace in chart.figure.data}
    assert {*lines} == {"top", "budget far-mass", "budget random"}
    rows = plain_types(both.table("budget"))
    losses = mean_losses(rows, ["order", "share", "doc"])
    for order in ("far-mass", "random"):
        change = (losses[order, 0.5] - losses["every", 0.0]).mean()
        assert lines[f"budget {order}"].y == pytest.approx([change])
        mean_streaming, mean_all = (1 + 2 + 3 + 4 * (LENGTH - 3)) / LENGTH, (LENGTH + 1) / 2
        assert lines[f"budget {order}"].x == pytest.approx([(mean_streaming + mean_all) / 2])


def test_bands_of_layers_are_quantiles_over_their_heads(run: Run) -> None:
    curves = recall_by_depth(run, "base")
    rows = run.rows("sparse_rows", model="base", rule="top:8")
    means = rows.groupby(["layer", "head"])["recall"].mean()
    assert [*curves] == ["layers 0 to 1", "layer 2", "layer 3"]
    for curve, layers in zip(curves.values(), ([0, 1], [2], [3]), strict=True):
        found = curve.loc[8]
        expected = means[means.index.get_level_values("layer").isin(layers)].quantile([0.1, 0.5, 0.9])
        assert [found["low"], found["mean"], found["high"]] == pytest.approx(expected.to_list())


def test_a_single_document_chooses_and_judges_which_the_sentence_says(folder: Path, tmp_path: Path) -> None:
    single = run_study(study(folder, docs=1), tmp_path)
    assert {*single.rows("sparse_choice")["left_out"]} == {"all"}
    (result,) = (r for r in sparsity_results.results(single) if r.question == "sparsity.own_rules")
    assert (result.details["same"], result.details.get("others")) == (1, None)


def test_rules_of_one_family_leave_nothing_to_choose(folder: Path, tmp_path: Path) -> None:
    plain = run_study(study(folder, rules=["top:8", "streaming:1:3", "streaming:1:15"]), tmp_path)
    assert "sparse_choice" not in plain.tables
    assert not [rule for rule in plain.rows("sparse_loss")["rule"].unique() if rule.startswith("best")]


@pytest.mark.slow
@pytest.mark.parametrize("cells", [4, 12])
def test_an_interrupted_run_resumes_to_the_same_tables(folder: Path, run: Run, cells: int, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run_study(study(folder), tmp_path, progress=StopsAfter(cells))
    assert contents(run_study(study(folder), tmp_path, resume=True)) == contents(run)


@pytest.mark.slow
def test_a_worker_chooses_from_passes_that_another_probe_shares(folder: Path, run: Run, tmp_path: Path) -> None:
    shared = study(folder)
    jobs = JobExecutor(StudyContext(shared)).plan()
    worker = RayWorker(shared.model_dump(mode="json", exclude_none=True), ["base"], 1, Path.cwd(), tmp_path / "files")
    assert {job.probe for job in jobs} >= {"measure+sparsity", "sparsity"}
    with RunWriter.open(tmp_path / "remote", "remote", {}) as writer:
        for job in jobs:
            stored = {
                (need, name): writer.read_stored(need, name)
                for need in job.prerequisites
                for name in writer.stored_tables(need)
            }
            writer.add(job.id, worker.execute(job, stored)[0].rows)
        remote = writer.commit([job.id for job in jobs], {"models": run.manifest["models"]})
    assert contents(remote) == contents(run)


@pytest.mark.slow
def test_another_probe_on_the_same_pass_changes_no_choice(folder: Path, run: Run, tmp_path: Path) -> None:
    alone = contents(run_study(study(folder, measure=False), tmp_path))
    for name in ("sparse_choice.parquet", "sparse_loss.parquet"):
        assert alone[name] == contents(run)[name]


def test_keys_of_a_prompt_are_chosen_from_the_prompt_alone(folder: Path) -> None:
    model = hs.load(str(folder / "tiny"), device="cpu")
    ids = torch.randint(3, families.VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    own = own_rules(
        pd.DataFrame([
            {"layer": layer, "head": head, "own_rule": ("vertical-slash:3:3", "streaming:1:4")[head % 2]}
            for layer in range(families.LAYERS) for head in range(families.HEADS)
        ]), model.geometry,
    )  # fmt: skip
    for rule in (parse_rule("vertical-slash:4:4"), own):
        for prompt in (20, LENGTH - 1):
            with attending_by(model, rule), torch.no_grad():
                expected = model.module(ids[:, :prompt], use_cache=False).logits
            with attending_by(model, PromptRule(rule, prompt)), torch.no_grad():
                actual = model.module(ids, use_cache=False).logits
            torch.testing.assert_close(actual[:, :prompt], expected, rtol=0, atol=MAX_ERROR)


def test_tokens_after_a_prompt_attend_to_all_keys(folder: Path) -> None:
    model, prompt = hs.load(str(folder / "tiny"), device="cpu"), 20
    ids = torch.randint(3, families.VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))

    def choose(layer: Layer) -> Tensor:
        weights = eager_reference.layer_weights(layer)
        sets = torch.ones_like(weights, dtype=torch.bool)
        of_prompt = weights[:, :prompt, :prompt], layer.q[:, :prompt].double(), layer.k[:, :prompt].double()
        sets[:, :prompt, :prompt] = dense_sets("vertical-slash:3:3", *of_prompt)
        return sets

    with attending_by(model, PromptRule(parse_rule("vertical-slash:3:3"), prompt)), torch.no_grad():
        actual = model.module(ids, use_cache=False).logits
    expected = eager_reference.eager_qk(model.module, ids, choose)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=MAX_ERROR * float(expected.abs().max()))


@pytest.mark.parametrize("rows_per_tile", [1, 2**19])
def test_the_prompts_rows_do_not_depend_on_tiles(
    folder: Path, rows_per_tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hs.load(str(folder / "tiny"), device="cpu")
    ids = torch.randint(3, families.VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr("headscope.attention.edited_attention.LOGITS_PER_BLOCK", rows_per_tile)
    with attending_by(model, PromptRule(parse_rule("vertical-slash:4:4"), 21)) as sparse, torch.no_grad():
        model.module(ids, use_cache=False)
    with attending_by(model, parse_rule("vertical-slash:4:4")) as alone, torch.no_grad():
        model.module(ids[:, :21], use_cache=False)
    later = sum(range(22, LENGTH + 1))
    assert sparse.mean * LENGTH == pytest.approx(alone.mean * 21 + later)
