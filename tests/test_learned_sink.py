"""Learned sinks: the share of a row that no key gets equals that of the family's own eager attention."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.families import OTHERS
from support.tiny_studies import save_checkpoint, save_texts, tokenizer
from transformers import AutoModelForCausalLM

import headscope as hs
from headscope.base.bins import visible_bin_edges
from headscope.study.config import build_study
from headscope.study.runner import run_study as study
from probes.measure.run import measure_tokens

LENGTH = 48


def test_the_share_of_a_learned_sink_is_one_minus_the_eager_weights() -> None:
    module = OTHERS["gpt_oss"].build(0)
    ids = torch.randint(3, 100, (LENGTH,), generator=torch.Generator().manual_seed(0))
    columns = measure_tokens(hs.load(module), ids, ["attention"], None)["learned_sink"]
    eager = AutoModelForCausalLM.from_config(module.config, attn_implementation="eager", trust_remote_code=False)
    eager.load_state_dict(module.state_dict())
    with torch.no_grad():
        weights = eager.eval()(ids[None], output_attentions=True).attentions  # without the sink's
    edges = visible_bin_edges(LENGTH)
    assert len(columns["share"]) > 0
    for layer, head, visible, rows, share in zip(
        *(columns[name] for name in ("layer", "head", "visible", "rows", "share")), strict=True
    ):
        visible_counts = np.minimum(np.arange(LENGTH) + 1, OTHERS["gpt_oss"].windows[layer] or LENGTH)
        in_bin = edges[np.searchsorted(edges, visible_counts)] == visible
        sink_share = 1 - weights[layer][0, head].sum(-1).double().numpy()
        assert rows == in_bin.sum()
        assert share == pytest.approx(sink_share[in_bin].mean(), abs=1e-5)


def test_only_models_with_a_sink_have_stored_shares(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "plain")
    OTHERS["gpt_oss"].build(0).save_pretrained(tmp_path / "sink")
    tokenizer().save_pretrained(tmp_path / "sink")
    models = {name: str(tmp_path / name) for name in ("plain", "sink")}
    texts = {"source": save_texts(tmp_path / "texts"), "docs": 2}
    content = {
        "models": models,
        "device": "cpu",
        "texts": texts,
        "measure": {"lengths": [LENGTH], "tables": ["attention"]},
    }
    mixed_run = study(build_study(content), tmp_path / "both")
    assert set(mixed_run.learned_sink["model"]) == {"sink"}
    shares = mixed_run.heads.groupby("model", observed=True)["learned_sink"]
    assert shares.count()["plain"] == 0
    assert shares.min()["sink"] > 0
    alone = study(build_study({**content, "models": {"plain": models["plain"]}}), tmp_path / "one")
    assert "learned_sink" not in alone.tables
    assert "learned_sink" not in alone.heads
