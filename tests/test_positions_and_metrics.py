"""Positions by number and metrics of the user in `hs.patch`, `hs.ablate` and `hs.ablated`, against hooks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support import families
from support.refusals import assert_names, refuses
from support.tiny_studies import tokenizer
from torch import Tensor

import headscope as hs
from headscope.errors import BadInput, BadOption
from headscope.interventions.metrics import PairTokens
from headscope.positions.model import Model
from headscope.run import Run

PAIR = {"name": "p", "clean": "w1 w2 w3 w4 w5 w6", "corrupted": "w1 w9 w3 w8 w5 w6", "answer": " w7", "wrong": " w10"}
IDS = torch.randint(3, families.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> Model:
    return hs.load(families.MEASURABLE["llama-gqa"](), tokenizer=tokenizer())


@pytest.fixture(scope="module")
def pair_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    file.write_text(json.dumps(PAIR))
    return str(file)


@pytest.fixture
def patch(model: Model, pair_file: str, tmp_path: Path) -> Callable[..., Run]:
    def run(**options: Any) -> Run:
        settings = {"method": "exact", "keep_failing": True, "quiet": True, "out": tmp_path}
        return hs.patch(model, pairs=[pair_file], **(settings | options))

    return run


def answer_logit(logits: Tensor, pair: PairTokens) -> Tensor:
    return logits[0, pair.answer[0]]


def effects(rows: pd.DataFrame) -> pd.Series:
    return rows.sort_values(["layer", "head"])["metric_patched"].reset_index(drop=True)


# Positions ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("positions", "expected"), [(3, [3]), (-1, [11]), ("last", [11]), (range(2, 5), [2, 3, 4]), ("-4:", [8, 9, 10, 11])]
)
def test_ablated_changes_head_outputs_of_these_tokens_only(model: Model, positions: Any, expected: list[int]) -> None:
    with hs.ablated(model, "L1H2", positions=positions):
        actual = model.module(IDS, use_cache=False).logits

    def zero(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        z = args[0].clone()
        z[:, expected, 32:48] = 0
        return (z,)

    remove = model.module.model.layers[1].self_attn.o_proj.register_forward_pre_hook(zero).remove
    torch.testing.assert_close(actual, model.module(IDS, use_cache=False).logits, atol=1e-5, rtol=1e-5)
    remove()


@torch.no_grad()
def test_ablated_counts_tokens_from_the_start_in_passes_with_a_cache(model: Model) -> None:
    with hs.ablated(model, "L1H2", positions=range(3, 11)):
        whole = model.module(IDS, use_cache=False).logits[:, -1]
        first = model.module(IDS[:, :9], use_cache=True)
        cached = model.module(IDS[:, 9:], past_key_values=first.past_key_values).logits[:, -1]
    torch.testing.assert_close(cached, whole, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("positions", [3, range(2, 5), "last", -2])
def test_ablated_does_not_count_padding(model: Model, positions: Any) -> None:
    ids = torch.cat([torch.zeros(2, 4, dtype=IDS.dtype), IDS[:, :8]], 1)
    ids[1] = IDS[1]
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with hs.ablated(model, "L1H2", positions=positions):
        padded = model.module(ids, attention_mask=mask, use_cache=False).logits
        alone = [model.module(row[None], use_cache=False).logits[0] for row in (ids[0, 4:], ids[1])]
    torch.testing.assert_close(padded[0, 4:], alone[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded[1], alone[1], atol=1e-5, rtol=1e-5)


def test_the_last_token_around_a_probe_is_that_of_the_prompt(model: Model, pair_file: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"pairs": [pair_file], "heads": ["L2H1"], "quiet": True, "out": tmp_path}
    with hs.ablated(model, "L1H2", positions="last"):
        run = hs.ablate(model, **options)
    with hs.ablated(model, "L1H2", positions=5):
        by_number = hs.ablate(model, **options)
        patched = hs.patch(model, method="exact", keep_failing=True, **options)
    with hs.ablated(model, "L1H2", positions=-1):
        patched_last = hs.patch(model, method="exact", keep_failing=True, **options)
    unchanged = hs.ablate(model, **options).ablation
    for column in ("metric_before", "metric_after"):
        assert run.ablation[column].tolist() == pytest.approx(by_number.ablation[column].tolist(), abs=1e-5)
        assert abs(run.ablation[column] - unchanged[column]).min() > 1e-4
    for column in ("metric_clean", "metric_corrupted", "metric_patched"):
        assert patched_last.patching[column].tolist() == pytest.approx(patched.patching[column].tolist(), abs=1e-5)


def test_the_last_token_around_a_patch_is_that_of_each_prompt(model: Model, tmp_path: Path) -> None:
    """Also where one prompt of a pair is longer."""
    file, longer = tmp_path / "pairs.jsonl", PAIR | {"clean": f"w11 {PAIR['clean']}"}
    file.write_text(json.dumps(longer))
    options: dict[str, Any] = {"align": "end", "method": "exact", "keep_failing": True, "quiet": True, "out": tmp_path}
    with hs.ablated(model, "L1H2", positions="last"):
        run = hs.patch(model, pairs=[str(file)], heads=["L2H1"], activations=["z"], **options)
        texts = (longer["clean"], longer["corrupted"])
        with torch.no_grad():
            clean, corrupted = (model.module(torch.tensor([tokenizer()(text)["input_ids"]])).logits for text in texts)
    tokens = [tokenizer()(PAIR[name])["input_ids"][-1] for name in ("answer", "wrong")]
    expected = {
        column: float(logits[0, -1, tokens[0]] - logits[0, -1, tokens[1]])
        for column, logits in (("metric_clean", clean), ("metric_corrupted", corrupted))
    }
    assert run.patching[[*expected]].iloc[0].to_dict() == pytest.approx(expected, abs=1e-5)


def test_patches_of_numbered_positions_equal_those_of_each_position(patch: Callable[..., Run]) -> None:
    run = patch(positions=["each", 1, "3:4", -1, "last"])
    by_position = run.patching.groupby("position")
    for name, position in {"1": 1, "3:4": 3, "-1": 5, "last": 5}.items():
        spans = run.patching_spans[run.patching_spans["span"] == name]
        assert (spans["first"] == position).all()
        pd.testing.assert_series_equal(effects(spans), effects(by_position.get_group(position)))


def test_ablation_at_positions_equals_ablated_there(model: Model, pair_file: str, tmp_path: Path) -> None:
    run = hs.ablate(model, pairs=[pair_file], heads=["L1H2"], positions=["1:3", "last"], quiet=True, out=tmp_path)
    assert set(run.ablation["kind"]) == {"zero at 1:3,last"}
    assert "ablation_zero" not in run.heads, "the column is of ablations at all positions"
    ids = torch.tensor(tokenizer()(PAIR["clean"])["input_ids"])[None]
    with torch.no_grad(), hs.ablated(model, "L1H2", positions="1:3"), hs.ablated(model, "L1H2", positions=5):
        log_p = model.module(ids).logits[0, -1].log_softmax(-1)
    answer = tokenizer()(PAIR["answer"])["input_ids"][-1]
    assert run.ablation["metric_after"].tolist() == pytest.approx([float(log_p[answer])], abs=1e-5)


@pytest.mark.parametrize("name", ["6", "-7", "2:9", "4:4", "nowhere"])
def test_positions_beyond_the_prompt_are_refused_with_the_pair(patch: Callable[..., Run], name: str) -> None:
    with refuses(BadInput, "line 1", f"'{name}'"):
        patch(positions=[name])


def test_a_slice_without_ends_is_all_positions(patch: Callable[..., Run], model: Model, pair_file: str) -> None:
    for positions in (":", "0:", slice(None)):
        with refuses(BadOption, "'resid_pre'", "'each'", "'last'"):
            patch(activations=["resid_pre"], positions=[positions])
        with refuses(BadOption, "'positions'", "all", "'last'"):
            hs.ablate(model, pairs=[pair_file], positions=[positions, "last"])


def test_ablate_does_not_advise_each_position(model: Model, pair_file: str, tmp_path: Path) -> None:
    with refuses(BadInput, "'each'", "last", "3:7", "all") as raised:
        hs.ablate(model, pairs=[pair_file], heads=["L1H2"], positions=["each"], quiet=True, out=tmp_path)
    assert str(raised.value).count("each") == 1


def test_ablated_refuses_positions_that_no_pass_had(model: Model) -> None:
    with refuses(BadInput, "'40:50'"), hs.ablated(model, "L1H2", positions=range(40, 50)):
        model.module(IDS)
    with refuses(BadInput, "'subject'"), hs.ablated(model, "L1H2", positions="subject"):
        pass


def test_an_ablation_checked_against_itself_is_paired_by_prompt(model: Model, tmp_path: Path) -> None:
    prompts = [PAIR | {"name": f"p{number}", "clean": f"w{number} w2 w3 w4 w5 w6"} for number in range(10, 14)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    options = {"pairs": [str(tmp_path / "prompts.jsonl")], "heads": ["L1H2"], "quiet": True, "out": tmp_path}
    run = hs.ablate(model, **options, keep_failing=True)
    check = {"statistic": "ablation_zero", "head": "L1H2", "rises_at_most": 0}
    (outcome,) = hs.check(run, [check], run).to_dict("records")
    assert (outcome["outcome"], outcome["value"], outcome["low"], outcome["high"]) == ("passes", 0, 0, 0)


# Metrics -----------------------------------------------------------------------------------------------------------


def test_a_metric_of_the_user_has_the_effects_of_its_definition(patch: Callable[..., Run]) -> None:
    def answer_gap(logits: Tensor, pair: PairTokens) -> Tensor:
        return answer_logit(logits, pair) - logits[0, pair.wrong[0]]

    for method in ("exact", "estimate"):
        own, named = patch(metric=answer_gap, method=method), patch(metric="logit_diff", method=method)
        assert set(own.patching["metric"]) == {"own:answer_gap"}
        pd.testing.assert_series_equal(effects(own.patching), effects(named.patching))
        findings = " ".join(own.findings()["text"])
        assert_names(findings, "answer_gap")
        assert "own:" not in findings


@pytest.mark.parametrize(("option", "named"), [({"resume": True}, "resume"), ({"engine": "ray"}, 'engine="plain"')])
def test_a_metric_of_the_user_is_neither_resumed_nor_sent_to_workers(
    patch: Callable[..., Run], tmp_path: Path, option: dict[str, Any], named: str
) -> None:
    with refuses(BadInput, "metric", named):
        patch(metric=answer_logit, **option)
    assert not [*tmp_path.iterdir()]


def test_a_metric_without_a_gradient_has_exact_effects_only(patch: Callable[..., Run]) -> None:
    def rank(logits: Tensor, pair: PairTokens) -> float:
        return float((logits[0] > answer_logit(logits, pair)).sum())

    pd.testing.assert_series_equal(effects(patch(metric=rank).patching), effects(patch(metric="rank").patching))
    with refuses(BadInput, "'own:rank'", "exact"):
        patch(metric=rank, method="estimate")


@pytest.mark.parametrize(
    ("metric", "named"),
    [
        (lambda logits, pair: logits[0, 0] * float("nan"), "nan"),
        (lambda logits, pair: logits[0], f"[{families.VOCAB}]"),
        (lambda logits, pair: "high", "str"),
    ],
)
def test_a_metric_that_is_no_finite_number_is_refused_by_name(
    patch: Callable[..., Run], metric: Any, named: str
) -> None:
    metric.__name__ = "mine"
    with refuses(BadInput, "'own:mine'", named):
        patch(metric=metric)


def test_an_unknown_metric_is_refused(patch: Callable[..., Run]) -> None:
    with refuses(BadOption, "patching.metric", "'probdiff'", "'prob_diff'"):
        patch(metric="probdiff")
