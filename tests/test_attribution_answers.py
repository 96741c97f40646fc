"""Direct logit attribution of an answer: every term equals a reference by hooks, and all terms add up to the logit
difference of the model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import families
from support.naive_answers import AnswerReference
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import PAIRS, save_checkpoint, tokenizer
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis import direct_logit_attribution
from transformers import AutoModelForCausalLM

import headscope as hs
from headscope.decomposition.logit_attribution import LogitAttribution, attribute_logits
from headscope.errors import BadInput, BadOption
from headscope.models.loading import locate
from headscope.positions.model import Model
from headscope.prompts import pair_sets
from headscope.rendering import assembly
from headscope.results.result import Result
from headscope.results.words import headline, sentence
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from probes.attribution import PROBE, view
from probes.attribution.answers.run import answer_parts

FAMILIES = ("llama-gqa", "mistral-sliding", "phi", "gemma3", "smollm3", "olmo2", "gpt_neox", "qwen2")
IDS = torch.randint(3, families.VOCAB, (21,), generator=torch.Generator().manual_seed(3))
ANSWER, WRONG = 17, 90
TOLERANCE = 1e-5
"""Of the largest term or logit difference."""


def assert_close(actual: Tensor, expected: Tensor, scale: float) -> None:
    assert actual.shape == expected.shape
    assert float((actual.double() - expected.double()).abs().max()) <= TOLERANCE * scale


def largest(terms: LogitAttribution) -> float:
    return max(float(part.abs().max()) for part in terms.part_terms.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_term_in_every_row_equals_a_reference_by_hooks(family: str) -> None:
    module = families.MEASURABLE[family]()
    expected = AnswerReference(module, IDS, families.HEADS, ANSWER, WRONG)
    terms = attribute_logits(hs.load(module, device="cpu"), IDS, ANSWER, WRONG)
    parts, scale = answer_parts(terms), largest(terms)
    assert_close(parts["logit", 0], expected.difference, scale)
    for name in (("embedding", 0), ("bias", 0), *(("other", layer) for layer in range(families.LAYERS))):
        assert_close(parts[name], expected.terms[name], scale)
    for layer in range(families.LAYERS):
        attention = parts["heads", layer] + parts.get(("attention_bias", layer), 0)
        assert_close(attention, expected.terms["attention", layer], scale)
        for head in range(families.HEADS):
            assert_close(terms.head_terms[layer, head], expected.heads[layer, head], scale)
    total = torch.stack([part for (name, _), part in parts.items() if name != "logit"]).double().sum(0)
    assert_close(total, expected.difference, scale)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(3, families.VOCAB - 1), st.integers(3, families.VOCAB - 1), st.integers(1, 12))
def test_terms_add_up_and_exchanged_answers_change_the_sign(answer: int, wrong: int, length: int) -> None:
    assume(answer != wrong)
    model = LLAMA
    terms, exchanged = (attribute_logits(model, IDS[:length], *pair) for pair in ((answer, wrong), (wrong, answer)))
    parts, scale = answer_parts(terms), max(largest(terms), 1e-3)
    assert terms.rows == length
    with torch.no_grad():
        logits = model.module(IDS[None, :length]).logits[0]
    total = torch.stack([part for (name, _), part in parts.items() if name != "logit"]).sum(0)
    assert_close(total, logits[:, answer] - logits[:, wrong], scale)
    assert_close(exchanged.head_terms, -terms.head_terms, scale)


LLAMA = hs.load(families.MEASURABLE["llama-gqa"](), device="cpu")


def test_without_a_wrong_answer_the_mean_over_the_vocabulary_is_subtracted() -> None:
    terms = attribute_logits(LLAMA, IDS, ANSWER)
    with torch.no_grad():
        logits = LLAMA.module(IDS[None]).logits[0]
    assert_close(terms.part_terms["logit", 0], logits[:, ANSWER] - logits.mean(-1), largest(terms))
    last = attribute_logits(LLAMA, torch.cat([IDS, torch.tensor([ANSWER])]))
    torch.testing.assert_close(terms.head_terms[..., -1], last.head_terms[..., -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [None, WRONG])
def test_a_soft_cap_is_linearised_in_every_row(wrong: int | None) -> None:
    module = families.build("gemma3_text", {"head_dim": 16, "layer_types": families.ALTERNATING})
    module.config.final_logit_softcapping = 3.0
    terms = attribute_logits(hs.load(module, device="cpu"), IDS, ANSWER, wrong)
    with torch.no_grad():
        logits = module(IDS[None]).logits[0]
    other = logits.mean(-1) if wrong is None else logits[:, wrong]
    total = torch.stack([part for (name, _), part in answer_parts(terms).items() if name != "logit"]).sum(0)
    assert_close(total, logits[:, ANSWER] - other, largest(terms))


# Against transformer-lens ------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
def test_all_heads_layers_and_rows_of_smollm2_equal_those_of_transformer_lens(smollm2: Model) -> None:
    ids = torch.tensor(smollm2.tokenizer("When Mary and John went to the store, John gave a drink to")["input_ids"])
    answer, wrong = (smollm2.tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))
    fresh = AutoModelForCausalLM.from_pretrained(locate("smollm2-135m")[0], dtype=torch.float32)
    lens = TransformerBridge.boot_transformers("any", hf_model=fresh, tokenizer=smollm2.tokenizer)
    lens.enable_compatibility_mode()
    terms = attribute_logits(smollm2, ids, answer, wrong)
    parts, theirs = answer_parts(terms), {}
    with torch.no_grad():
        cache = lens.run_with_cache(ids[None])[1]
        for unit in ("head", "component", "layer"):
            tokens = {"answer_tokens": answer, "incorrect_tokens": wrong}
            of_unit: Any = direct_logit_attribution(lens, cache=cache, unit=unit, pos=None, **tokens)
            theirs[unit] = dict(zip(of_unit.labels, of_unit.attribution.reshape(len(of_unit.labels), -1), strict=True))
    scale, layers = largest(terms), range(30)
    stream = parts["embedding", 0]
    assert_close(stream, theirs["component"]["embed"], scale)
    for layer in layers:
        for head in range(9):
            assert_close(terms.head_terms[layer, head], theirs["head"][f"L{layer}H{head}"], scale)
        assert_close(parts["heads", layer], theirs["component"][f"{layer}_attn_out"], scale)
        assert_close(parts["other", layer], theirs["component"][f"{layer}_mlp_out"], scale)
        assert_close(stream, theirs["layer"][f"{layer}_pre"], scale)
        stream = stream + parts["heads", layer]
        assert_close(stream, theirs["layer"][f"{layer}_mid"], scale)
        stream = stream + parts["other", layer]
    assert_close(stream, theirs["layer"]["final_post"], scale)


# Runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="module")
def pair_run(tiny: Path) -> Run:
    file = tiny.parent / "own.jsonl"
    file.write_text("\n".join(map(json.dumps, PAIRS)))
    return hs.attribution(str(tiny), pairs=[str(file)], out=tiny.parent / "runs", quiet=True)


def test_a_prompt_has_every_row_head_and_part(tiny: Path) -> None:
    run = hs.attribution(
        str(tiny), prompt="w1 w2 w3 w4 w5", answer=" w9", wrong=" w8", out=tiny.parent / "runs", quiet=True
    )
    assert validate(run) == []
    heads, parts, tokens = (run.table(f"attribution_answer_{name}") for name in ("heads", "parts", "tokens"))
    assert tokens["token"].str.strip().tolist() == ["w1", "w2", "w3", "w4", "w5"]
    assert (tokens["answer"].str.strip() == "w9").all()
    assert (tokens["wrong"].str.strip() == "w8").all()
    assert len(heads) == families.LAYERS * families.HEADS * 5
    values = parts.astype({"contribution": "float64"}).set_index(["part", "position"])["contribution"]
    total = values.drop("logit").groupby("position").sum()
    np.testing.assert_allclose(total, values["logit"], atol=1e-5)
    last = heads[heads["position"] == 4].set_index(["layer", "head"])["contribution"]
    stored = run.heads.set_index(["layer", "head"])["answer_attribution"]
    np.testing.assert_allclose(stored.sort_index(), last.sort_index(), rtol=1e-6)
    model = hs.load(str(tiny), device="cpu")
    ids, answers = (torch.tensor(model.tokenizer(text)["input_ids"]) for text in ("w1 w2 w3 w4 w5", "w9 w8"))
    with torch.no_grad():
        logits = model.module(ids[None]).logits[0]
    np.testing.assert_allclose(values["logit"], logits[:, answers[0]] - logits[:, answers[1]], atol=1e-5)


def test_means_over_pairs_have_intervals(pair_run: Run) -> None:
    assert validate(pair_run) == []
    heads = pair_run.table("attribution_answer_heads").astype({"contribution": "float64"})
    one = heads[(heads["layer"] == 2) & (heads["head"] == 1) & (heads["position"] == heads["position"].max())]
    assert one["pair"].nunique() == len(PAIRS)
    row = pair_run.heads.set_index(["layer", "head"]).loc[(2, 1)]
    assert row["answer_attribution"] == pytest.approx(one["contribution"].mean(), rel=1e-5)
    assert row["answer_attribution_low"] < row["answer_attribution"] < row["answer_attribution_high"]
    by_question = {(r.question, r.where.get("which")): r for r in PROBE.results(pair_run)}
    answer = by_question["attribution.answer", None]
    terms = [answer.details[name] for name in ("heads", "mlps", "embedding", "biases")]
    assert answer.value == pytest.approx(sum(terms), abs=1e-5)
    assert answer.n == len(PAIRS)
    assert answer.low < answer.value < answer.high
    answered = by_question["attribution.answered", None]
    assert answered.value == pytest.approx(np.mean([value > 0 for value in answer.by_sample.values()]))
    highest = by_question["attribution.answer_extreme", "highest"]
    assert highest.value == pytest.approx(pair_run.heads["answer_attribution"].max())
    assert highest.selected_from == families.LAYERS * families.HEADS


def test_generated_sets_are_attributed(tiny: Path) -> None:
    run = hs.attribution(str(tiny), pairs=["induction"], count=3, lengths=[12], out=tiny.parent / "runs", quiet=True)
    tokens = run.table("attribution_answer_tokens")
    assert tokens.groupby("pair", observed=True).size().tolist() == [12, 12, 12]


def test_a_prompt_without_an_answer_has_a_row_for_every_token(tiny: Path) -> None:
    text = " ".join(f"w{number}" for number in range(40))
    run = hs.attribution(str(tiny), prompt=text, out=tiny.parent / "runs", quiet=True)
    one = run.attribution[(run.attribution["layer"] == 0) & (run.attribution["head"] == 0)]
    assert one["position"].tolist() == [*range(1, 40)]
    assert (one["tokens"] == 1).all()


def test_charts_show_the_sum_at_the_end(pair_run: Run) -> None:
    groups = {group.heading: [*group.charts] for group in PROBE.charts(assembly.render_context(pair_run))}
    stream, components, rows = (chart.figure for chart in groups["What each layer adds to the answer"])
    answer = next(r for r in PROBE.results(pair_run) if r.question == "attribution.answer")
    line = next(trace for trace in stream.data if trace.name == "base")
    assert line.y[-1] == pytest.approx(answer.value, abs=1e-5)
    assert len(line.y) == 2 * families.LAYERS + 1
    assert sum(float(np.sum(trace.y)) for trace in components.data) == pytest.approx(answer.value, abs=1e-5)
    first = next(iter(answer.by_sample.values()))
    assert np.asarray(rows.data[0].z)[-1, -1] == pytest.approx(first, abs=1e-5)
    assert [button.label for button in rows.layout.updatemenus[0].buttons] == [pair["name"] for pair in PAIRS]
    for heatmap, value in zip(rows.data, answer.by_sample.values(), strict=True):
        assert np.asarray(heatmap.z)[-1, -1] == pytest.approx(value, abs=1e-5)
    assert [*rows.layout.xaxis.ticktext] == ["0: w1", "1: w10", "2: w3", "3: w20", "4: w4"]
    (head_chart,) = view.head_charts(pair_run, "base", 2, 1)
    heads = pair_run.table("attribution_answer_heads")
    one = heads[(heads["layer"] == 2) & (heads["head"] == 1) & (heads["pair"] == PAIRS[0]["name"])]
    np.testing.assert_allclose(head_chart.figure.data[0].y, one.sort_values("position")["contribution"])


@pytest.mark.slow
def test_synthetic_answers_are_complete(tmp_path: Path) -> None:
    run: Run = synthetic_run(tmp_path, layers=3)
    assert validate(run) == []
    parts = run.table("attribution_answer_parts").astype({"contribution": "float64"})
    keys = ["model", "pair", "position"]
    sums = parts.assign(is_sum=parts["part"] == "logit").groupby([*keys, "is_sum"], observed=True)["contribution"].sum()
    np.testing.assert_allclose(sums.xs(True, level="is_sum"), sums.xs(False, level="is_sum"), atol=1e-4)


# Prompts that count ------------------------------------------------------------------------------------------------

COUNTED = ["pair 0", "pair 2", "pair 3"]
Results = dict[tuple[str, Any], list[Result]]


def exchanged(pair: dict[str, Any]) -> dict[str, Any]:
    """The pair with its answers exchanged: the tiny model prefers the other one."""
    return pair | {"answer": pair["wrong"], "wrong": pair["answer"]}


def pairs_measured(folder: Path, pairs: list[dict[str, Any]], *models: Path, **options: Any) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "own.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    names = {model.name: str(model) for model in models}
    return hs.attribution(names, pairs=[f"{folder}/own.jsonl"], out=folder / "runs", quiet=True, **options)


def results_of(run: Run) -> Results:
    by_question: Results = {}
    for result in PROBE.results(run):
        assert sentence(result)
        assert headline(result)
        place = result.question.removeprefix("attribution."), result.where.get("which")
        by_question.setdefault(place, []).append(result)
    return by_question


@pytest.fixture(scope="module")
def failing_run(tiny: Path) -> Run:
    """A run in which the model does not answer pair 1."""
    pairs = [exchanged(pair) if number == 1 else pair for number, pair in enumerate(PAIRS)]
    return pairs_measured(tiny.parent / "failing", pairs, tiny)


def test_a_prompt_that_the_model_does_not_answer_is_stored_and_left_out_of_all_means(failing_run: Run) -> None:
    assert validate(failing_run) == []
    for name in ("heads", "parts"):
        rows = failing_run.table(f"attribution_answer_{name}").astype({"pair": str})
        assert sorted({*rows.loc[rows["is_counted"], "pair"]}) == COUNTED
        assert rows["pair"].nunique() == len(PAIRS)
    found = results_of(failing_run)
    for question in ("answer", "answer_layer"):
        (result,) = found[question, None]
        assert sorted(result.by_sample) == COUNTED
    heads = failing_run.table("attribution_answer_heads").astype({"contribution": "float64", "pair": str})
    last = heads[(heads["position"] == heads["position"].max()) & heads["pair"].isin(COUNTED)]
    means = last.groupby(["layer", "head"])["contribution"].mean()
    column = failing_run.heads.set_index(["layer", "head"])["answer_attribution"]
    np.testing.assert_allclose(column.sort_index(), means.sort_index(), rtol=1e-5, atol=1e-7)
    for which, value in (("highest", means.max()), ("lowest", means.min())):
        (result,) = found["answer_extreme", which]
        assert (result.value, result.n) == (pytest.approx(value, rel=1e-5), len(COUNTED))
    groups = {group.heading: [*group.charts] for group in PROBE.charts(assembly.render_context(failing_run))}
    stream = groups["What each layer adds to the answer"][0].figure
    line = next(trace for trace in stream.data if trace.name == "tiny")
    assert line.y[-1] == pytest.approx(found["answer", None][0].value, abs=1e-5)


def test_prompts_that_are_left_out_are_named_in_a_warning_and_the_others_have_a_row_each(failing_run: Run) -> None:
    found = results_of(failing_run)
    (warning,) = found["wrong", None]
    assert_names(sentence(warning), 1, 4, "pair 1", "--keep-failing")
    assert found["answered", None][0].value == 0.75
    assert found["metric", None][0].n == len(PAIRS)
    assert [result.where["pair"] for result in found["prompt", None]] == COUNTED
    heads = failing_run.table("attribution_answer_heads").astype({"pair": str})
    for result in found["prompt", None]:
        assert result.value == pytest.approx(found["answer", None][0].by_sample[str(result.where["pair"])])
        rows = heads[(heads["pair"] == result.where["pair"]) & (heads["position"] == heads["position"].max())]
        for name, at in (("most", rows["contribution"].idxmax()), ("least", rows["contribution"].idxmin())):
            row = rows.loc[at]
            unit = f"L{row['layer']}H{row['head']}"
            assert result.details[name] == {unit: pytest.approx(row["contribution"])}
            assert_names(headline(result), unit)


def test_keep_failing_keeps_every_prompt_in_means(tiny: Path) -> None:
    pairs = [exchanged(PAIRS[0]), *PAIRS[1:]]
    found = results_of(pairs_measured(tiny.parent / "kept", pairs, tiny, keep_failing=True))
    assert ("wrong", None) not in found
    assert found["answer", None][0].n == len(PAIRS)
    assert found["answered", None][0].details["unanswered"] == 1


def test_if_no_prompt_counts_there_are_no_effects(tiny: Path) -> None:
    run = pairs_measured(tiny.parent / "none", [exchanged(pair) for pair in PAIRS], tiny)
    assert validate(run) == []
    found = results_of(run)
    assert len(found["no_effects", None]) == 1
    assert ("answer", None) not in found
    assert "answer_attribution" not in run.heads or run.heads["answer_attribution"].isna().all()
    assert all(not [*group.charts] for group in PROBE.charts(assembly.render_context(run)))


def test_means_are_over_the_prompts_that_count_in_every_model(tiny: Path) -> None:
    pairs = [pair | {"answer": f" w{number + 90}"} for number, pair in enumerate(PAIRS)] + [
        exchanged(pair) | {"name": f"{pair['name']}b"} for pair in PAIRS
    ]
    run = pairs_measured(tiny.parent / "two", pairs, tiny, save_checkpoint(tiny.parent / "other", seed=1))
    parts = run.table("attribution_answer_parts").astype({"pair": str, "model": str})
    last = parts[(parts["part"] == "logit") & (parts["position"] == parts["position"].max())]
    counted = [{*rows.loc[rows["contribution"] > 0, "pair"]} for _, rows in last.groupby("model")]
    shared = counted[0] & counted[1]
    assert 1 < len(shared) < min(map(len, counted))
    found = results_of(run)
    for result in found["answer", None]:
        assert {*result.by_sample} == shared
    assert [result.details["shared"] for result in found["metric", None]] == [len(shared)] * 2


def test_a_single_prompt_counts_whatever_its_answer(tiny: Path) -> None:
    texts = {name: str(PAIRS[0][name]) for name in ("answer", "wrong")}
    for answer, wrong in (texts.values(), reversed(texts.values())):
        run = hs.attribution(
            str(tiny), prompt=str(PAIRS[0]["clean"]), answer=answer, wrong=wrong, out=tiny.parent / "runs", quiet=True
        )
        found = results_of(run)
        assert {*found} == {
            *((name, None) for name in ("answer", "answer_layer")),
            *(("answer_extreme", which) for which in ("highest", "lowest")),
        }
        assert run.heads["answer_attribution"].notna().all()


def test_pairs_of_prompts_of_unequal_length_are_attributed(tiny: Path) -> None:
    pairs = [pair | {"corrupted": f"w5 {pair['corrupted']}"} for pair in PAIRS]
    assert results_of(pairs_measured(tiny.parent / "unequal", pairs, tiny))["answer", None][0].n == len(PAIRS)


# Bad input ---------------------------------------------------------------------------------------------------------

PROMPT: dict[str, Any] = {"prompt": "w1 w2"}


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({**PROMPT, "answer": " w5 w6"}, BadInput, ("--answer", "' w5 w6'", 2, "'w5' + 'w6'")),
        ({**PROMPT, "answer": " w5", "wrong": " w6 w7"}, BadInput, ("--wrong", "' w6 w7'", 2)),
        ({**PROMPT, "answer": " w5", "wrong": " w5"}, BadOption, ("'answer'", "'wrong'", "' w5'")),
        ({**PROMPT, "answer": " w777", "wrong": " w888"}, BadInput, ("answer", "wrong", "'<unk>'")),
        ({**PROMPT, "answer": " w5", "docs": 3}, BadOption, ("'docs'", "prompt")),
        ({"pairs": ["ioi"], "text": "pkg:britannica"}, BadOption, ("'text'", "pairs")),
        ({"pairs": ["ioi"], "lengths": [64]}, BadOption, ("'lengths'", "induction")),
        ({"pairs": ["induction"], "lengths": [64, 128]}, BadOption, ("'lengths'", 1024, "64,128")),
    ],
)
def test_bad_options_are_refused_in_one_line(
    tiny: Path, options: dict[str, Any], error: type[BadInput], named: tuple[object, ...]
) -> None:
    with refuses(error, *named) as caught:
        hs.attribution(str(tiny), out=tiny.parent / "runs", quiet=True, **options)
    assert "\n" not in str(caught.value)


def test_an_answer_of_several_tokens_is_not_told_of_a_metric(tiny: Path) -> None:
    with pytest.raises(BadInput) as caught:
        hs.attribution(str(tiny), out=tiny.parent / "runs", quiet=True, **PROMPT, answer=" w5", wrong=" w6 w7")
    assert "metric" not in str(caught.value)
    assert "nll" not in str(caught.value)


@pytest.mark.parametrize(("wrong", "warns"), [("w8", True), (" w8", False)])
def test_answers_that_differ_in_a_leading_space_are_warned_about(
    tiny: Path, wrong: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pair_sets.single_pair_set(
        tokenizer(), "w1 w2 ", " w9", wrong, template=False, needs_one_token=False, needs_wrong=True
    )
    assert len(caplog.messages) == warns
    for warning in caplog.messages:
        assert_names(warning, repr(" w9"), repr(wrong))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"wrong": ""}, ("'wrong'",)),
        ({"clean": " ".join(["w1"] * 1024) + " w4"}, ("1,025",)),
        ({"answer": " w5 w6"}, ("'answer'", 2)),
    ],
)
def test_pairs_of_a_file_that_cannot_be_attributed_are_refused(
    tiny: Path, change: dict[str, str], named: tuple[object, ...]
) -> None:
    file = tiny.parent / "bad.jsonl"
    file.write_text(json.dumps({**PAIRS[0], **change}))
    with refuses(BadInput, "line 1", *named):
        hs.attribution(str(tiny), pairs=[str(file)], out=tiny.parent / "runs", quiet=True)
