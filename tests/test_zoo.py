"""Every causal-LM type of the installed transformers against its own eager attention; variants; ways of use.

The zoo itself is the package `zoo` beside this file: `python -m tests.zoo TYPE ...` shows the verdicts.
"""

import json
import os
import subprocess
import sys
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
RIGHT_AT_LEAST = 120
SHARE_AT_LEAST = 0.95
VARIANTS_AT_LEAST = 60
VISION_AT_LEAST = 10
REFUSED_VARIANTS = {"laguna, windows"}
"""Of families that are right by their defaults: its windowed layers rotate other dimensions than the rest."""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """All verdicts, from a process of its own: its children are forked before it has done anything else."""
    stored = tmp_path_factory.mktemp("zoo") / "verdicts.json"
    command_line = [sys.executable, "-W", "ignore", "-m", "tests.zoo", "--variants", "--use", "--json", str(stored)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command_line, cwd=ROOT, env=one_thread, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return {name: Verdict(**each) for name, each in json.loads(stored.read_text(encoding="utf-8")).items()}


def of(verdicts: dict[str, Verdict], names: Any) -> dict[str, Verdict]:
    return {name: verdicts[name] for name in names}


def test_nothing_is_measured_wrongly_and_nothing_ends_in_a_traceback(verdicts: dict[str, Verdict]) -> None:
    assert not {name: each.what for name, each in verdicts.items() if each.kind in ("WRONG", "TRACEBACK")}


def test_at_least_so_many_causal_types_are_right_in_everything(verdicts: dict[str, Verdict]) -> None:
    assert len(hub_coverage.right(of(verdicts, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))) >= RIGHT_AT_LEAST


def test_nearly_all_checkpoints_of_the_hub_are_of_a_type_that_is_right(verdicts: dict[str, Verdict]) -> None:
    assert hub_coverage.share(hub_coverage.right(verdicts)) >= SHARE_AT_LEAST


def test_the_text_part_of_vision_language_models_is_right(verdicts: dict[str, Verdict]) -> None:
    assert len(hub_coverage.right(of(verdicts, command.VISION))) >= VISION_AT_LEAST


def test_what_varies_within_a_family_that_is_right_is_right(verdicts: dict[str, Verdict]) -> None:
    variants = of(verdicts, command.of_variants())
    right, families = hub_coverage.right(variants), hub_coverage.right(verdicts)
    assert len(right) >= VARIANTS_AT_LEAST
    assert {name for name in variants if name not in right and name.partition(", ")[0] in families} == REFUSED_VARIANTS


def test_each_kind_of_attention_decodes_with_a_cache_and_runs_in_bfloat16(verdicts: dict[str, Verdict]) -> None:
    uses = of(verdicts, command.of_use())
    assert len(uses) == 2 * len(decoding_and_bf16.KINDS)
    assert not {name: each.what for name, each in uses.items() if each.kind != "right"}


def test_the_docs_have_the_table_of_families(verdicts: dict[str, Verdict]) -> None:
    assert table.stored(ROOT / "docs" / "models.md") == table.markdown(of(verdicts, command.TYPES)), "run `make docs`"


# What the zoo sees -------------------------------------------------------------------------------------------------


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Errors can be planted: opening does not hold them against eager attention, which would refuse the model."""
    monkeypatch.setattr(checkpoint, "check_against_eager", lambda *_: None)
    return monkeypatch


def ignoring(what: str) -> Any:
    """A `Rule` that forgets one of its terms."""

    def rule(scaling: float, *terms: Any) -> AttentionVariant:
        kept = dict(zip(("window", "chunk_size", "softcap", "sink"), terms, strict=True)) | {what: None}
        return AttentionVariant(scaling, **kept)

    return rule


@pytest.mark.parametrize(
    ("name", "what"), [("mistral", "window"), ("llama4_text", "chunk_size"), ("gemma2", "softcap"), ("gpt_oss", "sink")]
)
def test_the_zoo_sees_a_term_that_is_ignored(name: str, what: str, planted: pytest.MonkeyPatch) -> None:
    planted.setattr(backend, "AttentionVariant", ignoring(what))
    assert verdict(name).kind == "WRONG"


def test_the_zoo_sees_pairs_of_other_dimensions(planted: pytest.MonkeyPatch) -> None:
    split = rotary_pairs._split_pairs
    other = {"half": "interleaved", "interleaved": "half"}
    planted.setattr(rotary_pairs, "_split_pairs", lambda t, layout: split(t, other[layout]))
    assert "pair" in verdict("llama").what


def test_the_zoo_sees_other_frequencies(planted: pytest.MonkeyPatch) -> None:
    frequencies = cells.frequencies_by_layer
    planted.setattr(cells, "frequencies_by_layer", lambda *arguments: 1.01 * frequencies(*arguments))
    assert verdict("llama").what.startswith("theta")


def test_the_zoo_sees_a_scheme_without_its_factor(planted: pytest.MonkeyPatch) -> None:
    planted.setattr(
        Yarn, "schedule", lambda self, opened: scaled_schedule(opened, "yarn", factor=4, attention_factor=1)
    )
    assert verdict("llama").what.startswith("yarn")


def verdict(name: str) -> Verdict:
    return checks.judged(partial(build.tiny, name))
