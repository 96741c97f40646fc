"""Every page of a head in every shipped run has its charts, and none is missing without a word."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

from dashboards.layout import resolve_url
from dashboards.run_store import RunStore
from headscope.base.heads import format_head
from headscope.cli.flags import EXAMPLES
from headscope.rendering.blocks import Chart, TextBlock

CHARTS = {"from-scratch": 6, "from-scratch-seeds": 5, "example": 10, "causes": 6, "patching": 3, "budget": 2}
CHARTS |= {"needle": 3, "patching-needle": 3, "maps": 3, "weights": 5}
CHARTS |= {"spans-context": 3, "spans-injected": 3, "spans-code": 3, "sparsity": 3, "head-influence": 3}
FURTHER_CHARTS = {("weights", "L18H6"): 1}
"""Charts of a head that its run describes in more detail than the others."""
RUNS = {path.name.split("-", 1)[1].rpartition("-")[0]: path for path in sorted(EXAMPLES.glob("2026*"))}
MAX_WORDS = 50
SAMPLE = 8
"""Heads of each run whose pages `make test` opens, besides those of `FURTHER_CHARTS`."""


@pytest.mark.exhaustive(sample=4)
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_pages_of_heads_have_all_their_charts(name: str, sampled: Callable[..., list[Any]]) -> None:
    server = Flask("test")
    server.config["RUN_STORE"] = RunStore(Path(RUNS[name]), True)
    with server.app_context():
        _, run, _, _ = resolve_url("/head", {})
        heads = run.heads[["layer", "head"]].drop_duplicates().to_numpy().tolist()
        described = [[layer, head] for layer, head in heads if (name, format_head(layer, head)) in FURTHER_CHARTS]
        for layer, head in described + sampled(heads, SAMPLE):
            content = resolve_url(f"/head/{layer}.{head}", {})[3]
            assert len(content.introduction.split()) <= MAX_WORDS
            blocks = [block for section in content.sections.values() for block in section]
            texts = [text for block in blocks if isinstance(block, TextBlock) for text in block.sentences]
            assert not [text for text in texts if text.startswith("Not shown")]
            head_name = format_head(layer, head)
            expected = CHARTS[name] + FURTHER_CHARTS.get((name, head_name), 0)
            assert sum(isinstance(block, Chart) for block in blocks) == expected, head_name
