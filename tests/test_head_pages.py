"""Every page of a head in every shipped run has its charts, and none is missing without a word."""

from pathlib import Path

import pytest
from flask import Flask

from dashboards.layout import resolve_url
from dashboards.run_store import RunStore
from headscope.cli.flags import EXAMPLES
from headscope.rendering.blocks import Chart, TextBlock

CHARTS = {"from-scratch": 6, "from-scratch-seeds": 5, "example": 10, "causes": 6, "patching": 3, "budget": 2}
CHARTS |= {"needle": 3, "patching-needle": 3, "maps": 3, "circuits": 5}
CHARTS |= {"spans-context": 3, "spans-injected": 3, "spans-code": 3, "sparsity": 3}
RUNS = {path.name.split("-", 1)[1].rpartition("-")[0]: path for path in sorted(EXAMPLES.glob("2026*"))}
MAX_WORDS = 50
ALL_HEADS, HEADS_PER_RUN = 36, 3
"""A run of at most so many heads shows all of them, a larger one these from first to last: all would take minutes."""


@pytest.mark.parametrize("name", RUNS)
def test_the_pages_of_heads_have_all_their_charts(name: str) -> None:
    server = Flask("test")
    server.config["RUN_STORE"] = RunStore(Path(RUNS[name]), True)
    with server.app_context():
        _, run, _, _ = resolve_url("/head", {})
        heads = run.heads[["layer", "head"]].drop_duplicates().to_numpy().tolist()
        for layer, head in heads if len(heads) <= ALL_HEADS else heads[:: len(heads) // HEADS_PER_RUN]:
            content = resolve_url(f"/head/{layer}.{head}", {})[3]
            assert len(content.introduction.split()) <= MAX_WORDS
            blocks = [block for section in content.sections.values() for block in section]
            texts = [text for block in blocks if isinstance(block, TextBlock) for text in block.sentences]
            assert not [text for text in texts if text.startswith("Not shown")]
            assert sum(isinstance(block, Chart) for block in blocks) == CHARTS[name], f"L{layer}H{head}"
