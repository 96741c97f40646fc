"""The choice of BOS: the same prompts, with or without the token, in every probe that reads text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import families
from support.refusals import refuses
from support.tiny_studies import PAIRS, save_checkpoint, save_texts, tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import headscope as hs
from headscope.cli import app as cli
from headscope.errors import BadInput, BadOption
from headscope.models.loading import locate
from headscope.positions.model import Model
from headscope.prompts.special_tokens import leading_special_tokens, opening_tokens, with_bos
from headscope.run import Run
from headscope.study.config import build_study

PROMPT = "w1 w2 w3 w1 w2"


def adding_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that begins every text with <s> by itself, as Llama's does."""
    adding = tokenizer()
    adding.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return adding


def tiny(tokens: Any = None) -> Model:
    return hs.load(families.MEASURABLE["llama-gqa"](), device="cpu", tokenizer=tokens or tokenizer())


@pytest.mark.parametrize(("choice", "expected"), [("auto", [[], ["<s>"]]), ("yes", [["<s>"]] * 2), ("no", [[], []])])
def test_the_choice_decides_the_opening_tokens(choice: Any, expected: list[list[str]]) -> None:
    for tokens, opening in zip((tokenizer(), adding_tokenizer()), expected, strict=True):
        chosen = with_bos(tokens, choice)
        assert opening_tokens(chosen) == opening
        assert tokens.convert_ids_to_tokens(leading_special_tokens(PROMPT, chosen)) == opening
        assert len(chosen) == len(tokens)
        assert chosen.decode(chosen(PROMPT, add_special_tokens=False)["input_ids"]) == PROMPT


def measured_ids(tmp_path: Path, tokens: Any, bos: str, **options: Any) -> list[str]:
    run = hs.patterns(tiny(tokens), prompt=PROMPT, bos=bos, out=tmp_path, quiet=True, **options)
    return [*run.table("token_text").sort_values("position")["text"]]


def test_a_prompt_has_the_token_once_or_not_at_all(tmp_path: Path) -> None:
    words = measured_ids(tmp_path, tokenizer(), "auto")
    assert measured_ids(tmp_path, tokenizer(), "no") == measured_ids(tmp_path, adding_tokenizer(), "no") == words
    begun = measured_ids(tmp_path, adding_tokenizer(), "auto")
    assert begun == ["<s>", *words]
    for tokens in (tokenizer(), adding_tokenizer()):
        assert measured_ids(tmp_path, tokens, "yes") == begun


def pair_run(tmp_path: Path, bos: str, prefix: str = "") -> Run:
    file = tmp_path / f"pairs{len(prefix)}.jsonl"
    pairs = [{**pair, **{side: prefix + pair[side] for side in ("clean", "corrupted")}} for pair in PAIRS]
    file.write_text("\n".join(map(json.dumps, pairs)))
    return hs.patch(tiny(), pairs=[str(file)], method="estimate", bos=bos, out=tmp_path, quiet=True)


def test_patching_with_the_choice_equals_patching_prompts_that_hold_the_token(tmp_path: Path) -> None:
    chosen, written, without = pair_run(tmp_path, "yes"), pair_run(tmp_path, "auto", "<s> "), pair_run(tmp_path, "auto")
    effects = [run.table("patching")["effect"].to_numpy() for run in (chosen, written, without)]
    np.testing.assert_array_equal(effects[0], effects[1])
    assert not np.allclose(effects[0], effects[2])


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["ablate", "attribution", "detectors", "paths"])
def test_other_probes_follow_the_choice(tmp_path: Path, probe: str) -> None:
    """Their numbers are those of a tokenizer that adds the token by itself."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(map(json.dumps, PAIRS)))
    options: dict[str, Any] = {
        "ablate": {"heads": ["L0H1"], "prompt": PROMPT, "answer": " w3"},
        "attribution": {"prompt": PROMPT},
        "detectors": {"prompt": PROMPT},
        "paths": {"pairs": [str(pairs)], "receivers": ["L1H1"]},
    }[probe]
    tables = []
    for tokens, bos in ((tokenizer(), "yes"), (adding_tokenizer(), "auto"), (adding_tokenizer(), "no")):
        run = getattr(hs, probe)(tiny(tokens), bos=bos, out=tmp_path, quiet=True, **options)
        name = next(name for name in run.tables if name not in ("positions", "scales"))
        tables.append(run.table(name))
    pd.testing.assert_frame_equal(tables[0], tables[1])
    assert not tables[0].equals(tables[2])


def test_documents_begin_with_the_token_too(tmp_path: Path) -> None:
    source = save_texts(tmp_path / "texts")
    options = {"text": source, "docs": 2, "lengths": [16], "tables": ["nll"], "out": tmp_path, "quiet": True}
    chosen, adding = hs.measure(tiny(), bos="yes", **options), hs.measure(tiny(adding_tokenizer()), **options)
    pd.testing.assert_frame_equal(chosen.table("nll"), adding.table("nll"))


def test_a_run_records_the_choice_and_names_models_that_differ(tmp_path: Path) -> None:
    models = {"plain": tiny(), "adding": tiny(adding_tokenizer())}
    run = hs.detectors(models, prompt=PROMPT, out=tmp_path, quiet=True)
    entries = {entry["label"]: (entry["bos"], entry["opening_tokens"]) for entry in run.manifest["models"]}
    assert entries == {"plain": ("auto", []), "adding": ("auto", ["<s>"])}
    findings = run.findings()
    note = findings[findings["question"] == "models.bos"]
    assert [*zip(note["model"], note["baseline"], strict=True)] == [("adding", "plain")]
    alike = hs.detectors(models, prompt=PROMPT, bos="yes", out=tmp_path, quiet=True)
    assert alike.manifest["config"]["bos"] == "yes"
    assert "models.bos" not in set(alike.findings()["question"])


def test_a_run_without_text_records_no_opening(tmp_path: Path) -> None:
    run = hs.detectors(tiny(), tokens=[3, 4, 3], out=tmp_path, quiet=True)
    assert "opening_tokens" not in run.manifest["models"][0]


def test_unusable_choices_are_named(tmp_path: Path) -> None:
    without = tokenizer()
    without.bos_token = None
    with refuses(BadInput, "'yes'", "BOS"):
        with_bos(without, "yes")
    with refuses(BadOption, "bos", "'maybe'", "'auto'"):
        build_study({"bos": "maybe"})
    with refuses(BadOption, "'bos'", "patterns", "'template'"):
        build_study({"bos": "no", "patterns": {"prompt": "x y", "template": True}})
    with refuses(BadOption, "'bos'", "needle", "'template'"):
        build_study({"bos": "yes", "needle": {"template": "chat"}})


def test_command_has_the_flag(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "tiny")
    arguments = ["detectors", "--model", f"base={checkpoint}", "--prompt", PROMPT, "--bos", "yes", "--quiet"]
    result = CliRunner().invoke(cli.app, [*arguments, "--out", str(tmp_path / "runs")])
    assert result.exit_code == 0, result.output
    (run,) = (Run.open(path) for path in (tmp_path / "runs").iterdir())
    assert run.manifest["models"][0]["opening_tokens"] == ["<s>"]


@pytest.mark.model
def test_smollm2_with_the_token_has_the_logit_difference_of_transformer_lens(smollm2: Model, tmp_path: Path) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    pair = {
        "name": "ioi",
        "clean": "When Mary and John went to the store, John gave a drink to",
        "corrupted": "When Mary and John went to the store, Mary gave a drink to",
        "answer": " Mary",
        "wrong": " John",
    }
    file = tmp_path / "pair.jsonl"
    file.write_text(json.dumps(pair))
    metrics = {}
    for bos in ("auto", "yes"):
        run = hs.patch(smollm2, pairs=[str(file)], method="estimate", bos=bos, out=tmp_path, quiet=True)
        metrics[bos] = float(run.table("patching")["metric_clean"].iloc[0])
    module = AutoModelForCausalLM.from_pretrained(locate("smollm2-135m")[0], dtype=torch.float32)
    lens = TransformerBridge.boot_transformers("any", hf_model=module, tokenizer=smollm2.tokenizer)
    for bos, prepend in (("auto", False), ("yes", True)):
        with torch.no_grad():
            logits = lens(lens.to_tokens(pair["clean"], prepend_bos=prepend))[0, -1]
        answer, wrong = (smollm2.tokenizer(pair[name])["input_ids"][0] for name in ("answer", "wrong"))
        assert metrics[bos] == pytest.approx(float(logits[answer] - logits[wrong]), abs=1e-3)
    assert abs(metrics["auto"] - metrics["yes"]) > 0.1
