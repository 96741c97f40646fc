"""Every causal-LM type of the installed transformers against its own eager attention; variants; ways of use.

The zoo itself is the package `zoo` beside this file: `python -m tests.zoo TYPE ...` shows the verdicts.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from zoo import build, checks, command, decoding_and_bf16, hub_coverage, table
from zoo.checks import Verdict

from headscope.attention import backend
from headscope.attention.kernel import AttentionVariant
from headscope.measures import rotary_pairs
from headscope.models import checkpoint
from headscope.positions.rope_scaling import scaled_schedule
from headscope.positions.schemes import Yarn
from probes.measure import run as cells

ROOT = Path(__file__).parents[1]
MIN_CORRECT_CAUSAL_TYPES = 150
MIN_CHECKPOINT_SHARE = 0.985
MIN_CORRECT_VARIANTS = 60
MIN_CORRECT_VISION_TYPES = 10
REFUSED_VARIANTS: set[str] = set()
"""Of families that are right by their defaults."""
SAMPLED_TYPES = len(command.TYPES) // 10


@pytest.fixture(scope="module")
def types(tier: str, sampled: Callable[..., list[Any]]) -> list[str]:
    """The types that are judged: a tenth in `make test`, else all, as the tests below count them."""
    return sampled(command.TYPES, SAMPLED_TYPES) if tier == "everyday" else [*command.TYPES]


@pytest.fixture(scope="module")
def verdicts(types: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """Their verdicts, from a process of its own: its children are forked before it has done anything else."""
    stored = tmp_path_factory.mktemp("zoo") / "verdicts.json"
    options = ["--variants", "--use", "--json", str(stored)]
    command_line = [sys.executable, "-W", "ignore", "-m", "tests.zoo", *types, *options]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command_line, cwd=ROOT, env=one_thread, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    return {name: Verdict(**verdict) for name, verdict in json.loads(stored.read_text(encoding="utf-8")).items()}


def of(verdicts: dict[str, Verdict], names: Any) -> dict[str, Verdict]:
    return {name: verdicts[name] for name in names if name in verdicts}


@pytest.mark.slow
def test_no_model_type_is_measured_wrongly_or_raises(verdicts: dict[str, Verdict]) -> None:
    assert not {name: verdict.reason for name, verdict in verdicts.items() if verdict.kind in ("WRONG", "TRACEBACK")}


@pytest.mark.slow
def test_every_type_has_the_verdict_that_the_docs_state(types: list[str], verdicts: dict[str, Verdict]) -> None:
    """Its row of the table."""
    rows = re.findall(r"^\| (.+) \| \d+: (.+) \|$", table.stored(ROOT / "docs" / "models.md"), re.MULTILINE)
    stated = {name: outcome for outcome, names in rows for name in names.split(", ")}
    outcomes = {name: outcome for outcome, names in table.rows(of(verdicts, types)).items() for name in names}
    assert outcomes == {name: stated[name] for name in types}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_at_least_150_causal_types_pass_all_checks(verdicts: dict[str, Verdict]) -> None:
    assert len(hub_coverage.correct_types(of(verdicts, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))) >= MIN_CORRECT_CAUSAL_TYPES


@pytest.mark.slow
@pytest.mark.exhaustive
def test_passing_types_cover_98_percent_of_hub_checkpoints(verdicts: dict[str, Verdict]) -> None:
    assert hub_coverage.checkpoint_share(hub_coverage.correct_types(verdicts)) >= MIN_CHECKPOINT_SHARE


@pytest.mark.slow
@pytest.mark.exhaustive
def test_text_models_of_at_least_10_vision_language_types_pass_all_checks(verdicts: dict[str, Verdict]) -> None:
    assert len(hub_coverage.correct_types(of(verdicts, command.VISION))) >= MIN_CORRECT_VISION_TYPES


@pytest.mark.slow
def test_config_variants_of_passing_families_pass_all_checks(tier: str, verdicts: dict[str, Verdict]) -> None:
    variants = of(verdicts, command.variant_checks())
    right, families = hub_coverage.correct_types(variants), hub_coverage.correct_types(verdicts)
    assert len(right) >= MIN_CORRECT_VARIANTS or tier == "everyday"
    assert {name for name in variants if name not in right and name.partition(", ")[0] in families} == REFUSED_VARIANTS


@pytest.mark.slow
def test_each_kind_of_attention_decodes_with_a_cache_and_runs_in_bfloat16(
    types: list[str], verdicts: dict[str, Verdict]
) -> None:
    uses = of(verdicts, command.usage_checks())
    assert len(uses) == 2 * len({*types} & {*decoding_and_bf16.KINDS})
    assert not {name: verdict.reason for name, verdict in uses.items() if verdict.kind != "right"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_docs_contain_the_current_table_of_families(verdicts: dict[str, Verdict]) -> None:
    assert table.stored(ROOT / "docs" / "models.md") == table.markdown(of(verdicts, command.TYPES)), "run `make docs`"


# What the zoo sees -------------------------------------------------------------------------------------------------


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Errors can be planted: opening does not hold them against eager attention, which would refuse the model."""
    monkeypatch.setattr(checkpoint, "check_against_eager", lambda *_: None)
    return monkeypatch


def ignoring(term: str) -> Any:
    """An `AttentionVariant` without one of its terms."""

    def rule(scaling: float, *terms: Any) -> AttentionVariant:
        values = dict(zip(("window", "chunk_size", "softcap", "sink", "chosen"), terms, strict=True)) | {term: None}
        return AttentionVariant(scaling, **values)

    return rule


@pytest.mark.parametrize(
    ("name", "term"), [("mistral", "window"), ("llama4_text", "chunk_size"), ("gemma2", "softcap"), ("gpt_oss", "sink")]
)
def test_checks_detect_an_ignored_window_chunk_softcap_or_sink(
    name: str, term: str, planted: pytest.MonkeyPatch
) -> None:
    planted.setattr(backend, "AttentionVariant", ignoring(term))
    assert check_tiny_model(name).kind == "WRONG"


def test_checks_detect_pairs_of_wrong_dimensions(planted: pytest.MonkeyPatch) -> None:
    split = rotary_pairs._split_pairs
    other = {"half": "interleaved", "interleaved": "half"}
    planted.setattr(rotary_pairs, "_split_pairs", lambda t, layout: split(t, other[layout]))
    assert "pair" in check_tiny_model("llama").reason


def test_checks_detect_wrong_frequencies(planted: pytest.MonkeyPatch) -> None:
    frequencies = cells.frequencies_by_layer
    planted.setattr(cells, "frequencies_by_layer", lambda *arguments: 1.01 * frequencies(*arguments))
    assert check_tiny_model("llama").reason.startswith("theta")


def test_checks_detect_yarn_without_its_attention_factor(planted: pytest.MonkeyPatch) -> None:
    planted.setattr(
        Yarn, "schedule", lambda self, opened: scaled_schedule(opened, "yarn", factor=4, attention_factor=1)
    )
    assert check_tiny_model("llama").reason.startswith("yarn")


def check_tiny_model(name: str) -> Verdict:
    return checks.check_model(partial(build.tiny, name))
