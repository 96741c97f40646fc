"""Texts and prompts longer than the native context are marked, whichever probe reads them."""

import json
import logging
from pathlib import Path

import pytest
from support import families
from support.tiny_studies import PAIRS, content, save_texts, tokenizer

from headscope.results.collection import all_results
from headscope.study import runner
from headscope.study.config import build_study

NATIVE, LONG = 20, 30
LONG_PAIRS = [
    {**pair, **{side: " ".join(["w5"] * (LONG - 5)) + f" {pair[side]}" for side in ("clean", "corrupted")}}
    for pair in PAIRS
]
TEXTS = {"lengths": [LONG]}
PROBES = {
    "measure": TEXTS | {"tables": ["nll"]},
    "patterns": TEXTS,
    "sparsity": TEXTS | {"rules": ["top:4"]},
    "spans": TEXTS | {"classes": ["digit"]},
    "attribution": TEXTS,
    "attribution of answers": {"pairs": ["pairs.jsonl"]},
    "weights": TEXTS | {"parts": ["distance"]},
    "detectors": {"periods": [LONG // 2], "sequences": 1},
    "patching": {"pairs": ["pairs.jsonl"], "method": "estimate"},
    "paths": {"pairs": ["pairs.jsonl"], "senders": ["L0H0"], "through": ["logits"]},
    "ablation": {"pairs": ["pairs.jsonl"], "heads": ["L0H0"]},
    "circuit": {"pairs": ["pairs.jsonl"], "heads": ["L0H0"], "greedy": 0, "random_subsets": 0},
    "budget": {"lengths": [LONG], "sink": 1, "recent": 8, "orders": ["random"], "rows": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("native")
    options = families.SPECS["llama-gqa"].options | {"max_position_embeddings": NATIVE}
    families.build("llama", options).save_pretrained(folder / "tiny")
    tokenizer().save_pretrained(folder / "tiny")
    save_texts(folder / "texts")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in LONG_PAIRS))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("probe", PROBES)
def test_every_probe_marks_texts_beyond_the_native_context(probe, folder, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.chdir(folder)
    study = content(folder, **{probe.split()[0]: PROBES[probe]})
    if probe != "measure":
        del study["measure"]
    with caplog.at_level(logging.WARNING, "headscope"):
        run = runner.run_study(build_study(study), tmp_path)
    marks = [
        (result.model, *result.where.values())
        for result in all_results(run)
        if result.question == "models.beyond_native_context"
    ]
    assert marks == [("base", LONG, NATIVE)]
    warnings = [record.getMessage() for record in caplog.records if "was trained for" in record.getMessage()]
    assert len(warnings) == 1
    assert f"contexts of {LONG}" in warnings[0]
