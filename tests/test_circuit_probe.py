"""The probe of circuits of heads: equal to eager attention with the other heads replaced, laws, refused inputs."""

import copy
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import eager_patching
from support.refusals import assert_names, refuses
from support.tiny_studies import PAIRS, save_checkpoint, tokenizer
from torch import Tensor

import headscope as hs
from headscope.errors import BadInput
from headscope.interventions.circuit import token_classes
from headscope.positions.model import Model
from headscope.prompts.pair_sets import file_pairs
from headscope.rendering import assembly
from headscope.results.result import Result
from headscope.results.words import headline, sentence
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study import runner
from headscope.study.config import build_study
from headscope.study.progress import NoProgress
from probes.circuit import view
from probes.circuit.results import faithfulness, head_results, results

LAYERS = HEADS = 4
CIRCUIT = [(0, 1), (1, 2), (3, 0)]
NAMES = ["L0H1", "L1H2", "L3H0"]
ALL = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
Outputs = list[Tensor]


def write_pairs(file: Path, pairs: Sequence[dict[str, Any]]) -> str:
    file.write_text("\n".join(map(json.dumps, pairs)))
    return str(file)


def spanned_pairs() -> list[dict[str, Any]]:
    return [pair | {"spans": {"first": [1, 2], "second": [3, 4]}} for pair in PAIRS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("circuit")
    save_checkpoint(folder / "tiny")
    write_pairs(folder / "pairs.jsonl", spanned_pairs())
    longer = [pair | {side: f"w9 {pair[side]}" for side in ("clean", "corrupted")} for pair in PAIRS]
    write_pairs(folder / "longer.jsonl", [pair | {"spans": {"first": [2, 3], "second": [4, 5]}} for pair in longer])
    write_pairs(folder / "no-spans.jsonl", PAIRS)
    return folder


def measured(folder: Path, out: Path, **section: Any) -> Run:
    content = {
        "models": {"base": f"{folder}/tiny"},
        "device": "cpu",
        "circuit": {"pairs": [f"{folder}/pairs.jsonl"], "heads": NAMES, **section},
    }
    return runner.run_study(build_study(content), out, progress=NoProgress())


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return measured(folder, tmp_path_factory.mktemp("mean"), random_subsets=4)


# Independent reference ---------------------------------------------------------------------------------------------


class EagerCircuit:
    """Circuits by hand: eager attention in which the outputs of all other heads are replaced."""

    def __init__(self, folder: Path, pairs: str = "pairs", reference: str = "pairs"):
        self.model: Model = hs.load(f"{folder}/tiny", device="cpu")
        self.pairs, self.reference = (
            [tokens.build(index) for index in range(4)]
            for tokens in (
                file_pairs(f"{folder}/{name}.jsonl", tokenizer(), "equal", needs_one_token=True, needs_wrong=True)
                for name in (pairs, reference)
            )
        )

    @torch.no_grad()
    def outputs(self, ids: np.ndarray) -> Outputs:
        return [record["z"] for record in eager_patching.run(self.model, torch.tensor([ids.tolist()]))[1]]

    def others(self, number: int) -> list[Any]:
        """The reference prompts without a prompt itself."""
        own = self.pairs[number].corrupted.tolist()
        return [pair for pair in self.reference if pair.corrupted.tolist() != own]

    def mean(self, number: int) -> Outputs:
        by_prompt = [self.outputs(pair.corrupted) for pair in self.others(number)]
        return [torch.stack([z[layer] for z in by_prompt]).mean(0) for layer in range(LAYERS)]

    def mean_of_spans(self, number: int) -> Outputs:
        means = []
        for layer in range(LAYERS):
            by_class: dict[str, list[Tensor]] = {}
            for pair in self.others(number):
                z = self.outputs(pair.corrupted)[layer]
                for at, name in enumerate(self.names(pair)):
                    by_class.setdefault(name, []).append(z[:, at])
            columns = [torch.stack(by_class[name]).mean(0) for name in self.names(self.pairs[number])]
            means.append(torch.stack(columns, 1))
        return means

    @staticmethod
    def names(pair: Any) -> list[str]:
        """By hand: w1 [first] w3 [second] w4, after further tokens."""
        return [*["rest"] * (len(pair.clean) - 4), "first", "rest", "second", "last"]

    @torch.no_grad()
    def value(self, number: int, kept: Collection[tuple[int, int]], outputs: Outputs) -> float:
        pair = self.pairs[number]
        replaced = {
            layer: {"z": ([head for head in range(HEADS) if (layer, head) not in kept], slice(None), z)}
            for layer, z in enumerate(outputs)
        }
        logits: Any = eager_patching.run(self.model, torch.tensor([pair.clean.tolist()]), replaced)[0][-1]
        return (logits[int(pair.answer[0])] - logits[int(pair.wrong[0])]).item()


def check_tables(run: Run, eager: EagerCircuit, outputs_of: Callable[[int], list[Outputs]]) -> None:
    """Every stored metric equals that of eager attention."""
    assert validate(run) == []
    assert len(run.table("circuit")["subset"].unique()) > 5

    def value(number: int, kept: Collection[tuple[int, int]]) -> float:
        return float(np.mean([eager.value(number, kept, outputs) for outputs in outputs_of(number)]))

    for _, row in run.table("circuit").iterrows():
        number = int(row["pair"][-1])
        removed = [(int(name[1]), int(name[3])) for name in row["heads"].split(",") if name]
        for column, heads in (("circuit", CIRCUIT), ("model", ALL), ("empty", [])):
            kept = heads if column == "empty" else [head for head in heads if head not in removed]
            assert row[f"metric_{column}"] == pytest.approx(value(number, kept), rel=1e-5, abs=1e-5)
    for _, row in run.table("circuit_members").iterrows():
        number, member = int(row["pair"][-1]), (row["layer"], row["head"])
        assert row["metric_circuit"] == pytest.approx(value(number, CIRCUIT), rel=1e-5, abs=1e-5)
        without = [head for head in CIRCUIT if head != member]
        assert row["metric_without"] == pytest.approx(value(number, without), rel=1e-5, abs=1e-5)


def test_mean_ablation_by_position_equals_eager_attention(run: Run, folder: Path) -> None:
    eager = EagerCircuit(folder)
    means = [eager.mean(number) for number in range(4)]
    check_tables(run, eager, lambda number: [means[number]])


def test_mean_ablation_by_span_equals_eager_attention_for_a_reference_of_other_lengths(
    folder: Path, tmp_path: Path
) -> None:
    section = {"reference": f"{folder}/longer.jsonl", "by": "span", "random_subsets": 4}
    eager = EagerCircuit(folder, reference="longer")
    means = [eager.mean_of_spans(number) for number in range(4)]
    check_tables(measured(folder, tmp_path, **section), eager, lambda number: [means[number]])


def test_zero_ablation_equals_eager_attention(folder: Path, tmp_path: Path) -> None:
    eager = EagerCircuit(folder)
    zeros = [torch.zeros_like(z) for z in eager.mean(0)]
    check_tables(measured(folder, tmp_path, complement="zero", random_subsets=4), eager, lambda number: [zeros])


@pytest.mark.slow
def test_resample_ablation_by_all_other_reference_prompts_equals_eager_attention(folder: Path, tmp_path: Path) -> None:
    eager = EagerCircuit(folder)
    outputs = [eager.outputs(pair.corrupted) for pair in eager.reference]
    run = measured(folder, tmp_path, complement="resample", draws=3, random_subsets=4)
    check_tables(run, eager, lambda number: [z for other, z in enumerate(outputs) if other != number])
    assert (run.table("circuit")["reference_prompts"] == 3).all()


PLACED = {"L0H1@first": (0, 1, [1]), "L1H2@-2:": (1, 2, [3, 4]), "L3H0": (3, 0, [0, 1, 2, 3, 4])}
"""A circuit of heads at a span, at the last two tokens and at all positions, with their tokens by hand."""


def test_members_at_positions_equal_eager_attention_with_their_other_positions_replaced(
    folder: Path, tmp_path: Path
) -> None:
    eager = EagerCircuit(folder)
    run = measured(folder, tmp_path, heads=[*PLACED], random_subsets=2, greedy=1)
    assert validate(run) == []

    def value(number: int, kept: Collection[str], others_are_kept: bool = False) -> float:
        """The metric with the members `kept` intact, and the outputs of no member if `others_are_kept`."""
        pair, mean = eager.pairs[number], eager.mean(number)
        intact = eager.outputs(pair.clean)
        is_kept = {(*PLACED[name][:2], token) for name in kept for token in PLACED[name][2]}
        member_tokens = {(layer, head, token) for layer, head, tokens in PLACED.values() for token in tokens}
        assert len(intact) == LAYERS

        def edits(record: Any, layer: int) -> Tensor:
            z = record.clone()
            for head in range(HEADS):
                for token in range(len(pair.clean)):
                    place = (layer, head, token)
                    is_intact = place in is_kept or (others_are_kept and place not in member_tokens)
                    if not is_intact:
                        z[0, head, token] = mean[layer][head, token]
            return z

        logits = eager_logits(eager.model, pair.clean.tolist(), edits)
        return float(logits[int(pair.answer[0])] - logits[int(pair.wrong[0])])

    for _, row in run.table("circuit").iterrows():
        number, removed = int(row["pair"][-1]), row["heads"].split(",")
        rest = [name for name in PLACED if name not in removed]
        assert row["metric_circuit"] == pytest.approx(value(number, rest), abs=1e-5)
        assert row["metric_model"] == pytest.approx(value(number, rest, others_are_kept=True), abs=1e-5)
    for _, row in run.table("circuit_members").iterrows():
        place = "" if row["positions"] == "all" else f"@{row['positions']}"
        rest = [name for name in PLACED if name != f"L{row['layer']}H{row['head']}{place}"]
        assert len(rest) == 2
        assert row["metric_without"] == pytest.approx(value(int(row["pair"][-1]), rest), abs=1e-5)


@torch.no_grad()
def eager_logits(model: Model, ids: list[int], edit: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The last logits of the module with its heads' outputs edited by hooks before the output projections."""
    handles = []
    for number, layer in enumerate(model.module.model.layers):

        def replace(module: Any, args: Any, number: int = number) -> Any:
            z = args[0].view(1, len(ids), HEADS, -1).transpose(1, 2)
            return (edit(z, number).transpose(1, 2).reshape(args[0].shape), *args[1:])

        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(replace))
    try:
        return model.module(torch.tensor([ids])).logits[0, -1]  # type: ignore[no-any-return]
    finally:
        for handle in handles:
            handle.remove()


def test_every_member_and_no_other_head_has_its_minimality_in_the_table_of_heads(run: Run) -> None:
    heads = run.heads.set_index(["layer", "head"])["circuit_mean_prompts"].dropna()
    assert sorted(heads.index) == CIRCUIT
    rows = run.table("circuit_members")
    falls = (rows["metric_circuit"] - rows["metric_without"]).groupby([rows["layer"], rows["head"]]).mean()
    np.testing.assert_allclose(heads.sort_index(), falls.sort_index(), atol=1e-6)


# Laws and statistics -----------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_tables(run: Run, folder: Path, tmp_path: Path) -> None:
    again = measured(folder, tmp_path, random_subsets=4)
    for name in ("circuit", "circuit_members"):
        pd.testing.assert_frame_equal(run.table(name), again.table(name))


def test_greedy_subsets_are_the_largest_differences_on_the_prompts_that_choose(run: Run) -> None:
    rows = run.table("circuit").astype({"subset": str})
    greedy = rows[rows["subset"] == "greedy 1"]
    assert greedy["is_selecting"].tolist() == [True, False, True, False]
    chosen = greedy[greedy["is_selecting"]]
    best = abs((chosen["metric_model"] - chosen["metric_circuit"]).mean())
    for _, subset in rows[rows["heads"].isin(NAMES)].groupby("subset"):
        others = subset[subset["pair"].isin(chosen["pair"])]
        assert abs((others["metric_model"] - others["metric_circuit"]).mean()) <= best + 1e-6
    second = rows.loc[rows["subset"] == "greedy 2", "heads"].iloc[0]
    assert second.startswith(greedy["heads"].iloc[0] + ",")


def test_faithfulness_is_the_ratio_of_mean_changes(run: Run) -> None:
    by_name = {result.question: result for result in results(run)}
    rows = run.table("circuit").astype({"subset": str}).query("subset == 'none'")
    empty, circuit, model = (rows[f"metric_{name}"].mean() for name in ("empty", "circuit", "model"))
    if "circuit.faithfulness" in by_name:
        assert by_name["circuit.faithfulness"].value == pytest.approx((circuit - empty) / (model - empty), abs=1e-5)
    else:
        assert by_name["circuit.undefined"].value == pytest.approx(empty - model, abs=1e-5)


def test_intervals_of_faithfulness_cover_the_ratio_of_the_means() -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        model = rng.gamma(4, 1, 8)
        circuit = model * rng.normal(0.7, 0.2, 8)
        rows = pd.DataFrame({"metric_empty": 0.0, "metric_circuit": circuit, "metric_model": model})
        score = faithfulness(rows)
        assert score is not None
        covered += score.low <= 0.7 <= score.high
        assert score.low < score.value < score.high
        assert score.value == pytest.approx(circuit.mean() / model.mean())
        assert score.by_prompt.mean() == pytest.approx(score.value)
        for end in (score.low, score.high):  # Student's t test of circuit - end x model is at its limit
            differences = circuit - end * model
            t = abs(differences.mean()) / (differences.std(ddof=1) / np.sqrt(8))
            assert t == pytest.approx(2.3646, abs=1e-3)
    assert covered / 400 >= 0.92


def test_faithfulness_is_undefined_if_the_ablation_of_all_heads_changes_nothing() -> None:
    changes = np.array([1.0, -1.2, 0.9, -0.8])
    rows = pd.DataFrame({"metric_empty": 0.0, "metric_circuit": changes, "metric_model": changes})
    assert faithfulness(rows) is None


def test_classes_are_spans_the_last_token_and_the_rest(folder: Path) -> None:
    assert token_classes(EagerCircuit(folder).pairs[0]).tolist() == ["rest", "first", "rest", "second", "last"]


def test_results_charts_and_the_head_page_name_every_member(run: Run) -> None:
    all_results = [*results(run)]
    names = [result.question for result in all_results]
    assert names.count("circuit.member") == 3
    assert {"circuit.answered", "circuit.minimal", "circuit.random", "circuit.greedy"} <= {*names}
    assert all(sentence(result) for result in all_results)
    (member,) = head_results(run, "base", 1, 2)
    assert (member.layer, member.head, member.n) == (1, 2, 4)
    assert [*head_results(run, "base", 1, 3)] == []
    (group,) = view.charts(assembly.render_context(run))
    assert len([*group.charts]) == 2


def greedy_result(run: Run) -> Result:
    (result,) = [result for result in results(run) if result.question == "circuit.greedy"]
    return result


def replaced_table(run: Run, table: str, rows: pd.DataFrame) -> Run:
    """The run with other rows in one table."""
    changed = copy.copy(run)
    changed.derived = lambda function, *arguments: function(changed, *arguments)  # type: ignore[method-assign]
    changed.table = lambda name: rows if name == table else run.table(name)  # type: ignore[method-assign]
    return changed


def test_the_greedy_subset_is_compared_with_nothing_removed_on_the_same_prompts(run: Run) -> None:
    rows = run.table("circuit").astype({"subset": str, "pair": str})
    tested = rows[(rows["subset"] == "none") & rows["pair"].isin(["pair 1", "pair 3"])]
    expected = (tested["metric_model"] - tested["metric_circuit"]).mean()
    result = greedy_result(run)
    assert sorted(result.by_sample) == ["pair 1", "pair 3"]
    assert result.details["whole"] == pytest.approx(expected, abs=1e-6)
    assert headline(result).count("completeness") == 1


def test_the_largest_greedy_subset_counts_whatever_the_order_of_rows(run: Run) -> None:
    rows = run.table("circuit").astype({"subset": str})
    assert greedy_result(run).details["subset"] == "greedy 2"
    rows["subset"] = rows["subset"].replace({"greedy 2": "greedy 10", "greedy 1": "greedy 9"})
    for ordered in (rows, rows[::-1]):
        assert greedy_result(replaced_table(run, "circuit", ordered)).details["subset"] == "greedy 10"


def test_a_member_whose_removal_clearly_improves_the_circuit_is_harmful(run: Run) -> None:
    rows = run.table("circuit_members").copy()
    effect = rows["layer"].map({0: 2.0, 1: -1.0, 3: 0.0})
    noise = rows["pair"].astype(str).str[-1].astype(int).map({0: -0.1, 1: 0.1, 2: -0.2, 3: 0.2})
    rows["metric_without"] = rows["metric_circuit"] - effect - noise
    found = {result.question: result for result in results(replaced_table(run, "circuit_members", rows))}
    minimal = found["circuit.minimal"]
    assert (minimal.value, minimal.details["harmful"], minimal.details["others"]) == (1, "L1H2", "L3H0")
    assert_names(sentence(minimal), "L1H2")
    assert_names(headline(minimal), "L1H2")


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "obtained"), [(4, 4), (6, 6), (50, 6)])
def test_random_subsets_are_distinct_and_neither_empty_nor_all(
    folder: Path, tmp_path: Path, asked: int, obtained: int
) -> None:
    run = measured(folder, tmp_path, random_subsets=asked, greedy=0)
    rows = run.table("circuit").astype({"subset": str, "heads": str})
    heads = rows[rows["subset"].str.startswith("random")].groupby("subset")["heads"].first()
    assert len(heads) == len({*heads}) == obtained
    assert all(0 < len(text.split(",")) < len(NAMES) for text in heads)
    (result,) = [result for result in results(run) if result.question == "circuit.random"]
    assert (result.selected_from, result.details["subsets"]) == (obtained, obtained)


# Few prompts -------------------------------------------------------------------------------------------------------


def first_pairs(folder: Path, count: int) -> list[str]:
    return [write_pairs(folder / f"first-{count}.jsonl", PAIRS[:count])]


@pytest.mark.parametrize(("count", "by"), [(3, "position"), (3, "span"), (4, "position")])
def test_a_mean_over_fewer_than_three_other_prompts_warns_with_length_and_number(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int, by: str
) -> None:
    pairs = write_pairs(folder / f"first-{count}.jsonl", spanned_pairs()[:count])
    run = measured(folder, tmp_path, pairs=[pairs], greedy=0, random_subsets=0, by=by)
    assert (run.table("circuit")["reference_prompts"] == count - 1).all()
    warnings = [message for message in caplog.messages if f"'first-{count}'" in message]
    assert len(warnings) == (count == 3)
    for warning in warnings:
        assert_names(warning, "base", 3, 5, count - 1)
    assert ("--by span" in caplog.text) == (count == 3 and by == "position")


def test_a_prompt_is_not_the_only_one_in_its_own_mean(folder: Path, tmp_path: Path) -> None:
    for by in ("position", "span"):
        with refuses(BadInput, "'first-1'", "'pair 0'"):
            measured(folder, tmp_path, pairs=first_pairs(folder, 1), by=by)


def test_resample_never_draws_the_own_corrupted_prompt_and_warns_of_fewer_draws(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = measured(folder, tmp_path, complement="resample", draws=4, greedy=0, random_subsets=0)
    assert (run.table("circuit")["reference_prompts"] == 3).all()
    (warning,) = (message for message in caplog.messages if "draws" in message)
    assert_names(warning, "base", "'pairs'", 4, 5, 3)
    with refuses(BadInput, "'first-1'", "'pair 0'"):
        measured(folder, tmp_path, pairs=first_pairs(folder, 1), complement="resample")


@pytest.mark.parametrize("count", [1, 2])
def test_one_prompt_warns_that_the_greedy_test_is_left_out(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    reference = f"{folder}/pairs.jsonl"
    run = measured(folder, tmp_path, pairs=first_pairs(folder, count), reference=reference, random_subsets=0)
    has_greedy = run.table("circuit")["subset"].astype(str).str.startswith("greedy").any()
    assert has_greedy == (count > 1)
    warnings = [message for message in caplog.messages if "greedy" in message]
    assert len(warnings) == (count == 1)
    for warning in warnings:
        assert_names(warning, "base", "'first-1'")


@pytest.mark.slow
@pytest.mark.parametrize("section", [{}, {"complement": "resample", "draws": 3}, {"greedy": 0}])
def test_progress_inside_a_cell_adds_up_to_its_cost(folder: Path, tmp_path: Path, section: dict[str, Any]) -> None:
    progress = RecordedProgress()
    content = {"pairs": [f"{folder}/pairs.jsonl"], "heads": NAMES, **section}
    study = {"models": {"base": f"{folder}/tiny"}, "device": "cpu", "circuit": content}
    runner.run_study(build_study(study), tmp_path, progress=progress)
    assert len(progress.costs) > 20
    assert min(progress.costs) > -1e-6
    assert progress.costs[-1] == pytest.approx(0, abs=1e-6)  # what the cell did not report itself


class RecordedProgress(NoProgress):
    """Progress that keeps what it received."""

    def __init__(self) -> None:
        self.costs: list[float] = []

    def advance(self, cost: float) -> None:
        self.costs.append(cost)


# Refused inputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "flags"),
    [
        (("L0H1", "twice"), ("--heads", "L0H1,L0H1")),
        (("L0H1", "twice"), ("--heads", "L0H1,0.1")),
        (("L0H1@",), ("--heads", "L0H1@,L1H1")),
        (("--heads",), ()),
        (("--heads", "'all'"), ("--heads", "all")),
        (("16 heads",), ("--heads", ",".join(f"L{layer}H{head}" for layer, head in ALL))),
        (("L9H0",), ("--heads", "L9H0")),
        (("'longer'", 5, "'pair 0'"), ("--heads", "L0H1", "--reference", "longer")),
        (("'no-spans'", "'first'"), ("--heads", "L0H1", "--reference", "no-spans", "--by", "span")),
        (("L0H1@last", "twice"), ("--heads", "L0H1@last,L0H1@last")),
        (("L0H1", "L0H1@last", "token 4"), ("--heads", "L0H1,L0H1@last")),
        (("L0H1@-2:", "L0H1@second", "token 3"), ("--heads", "L0H1@second,L0H1@-2:")),
        (("'secnd'",), ("--heads", "L0H1@secnd")),
        (("'5'", "5 tokens"), ("--heads", "L0H1@5")),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    refused: Callable[..., str], folder: Path, named: tuple[object, ...], flags: tuple[Any, ...]
) -> None:
    files = {name: f"{folder}/{name}.jsonl" for name in ("longer", "no-spans")}
    tiny = ("--model", f"{folder}/tiny", "--device", "cpu", "--quiet", "--pairs", folder / "pairs.jsonl")
    assert_names(refused(2, "circuit", *tiny, *(files.get(str(flag), flag) for flag in flags)), *named)
