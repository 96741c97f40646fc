"""Options and table of imported scores."""

from collections.abc import Iterator

import numpy as np
from pydantic import Field

from headscope.plugin_api import GROUP, HEAD, LAYER, MODEL, Column, Options, Rows, Table
from headscope.runs.synthetic import Sizes


class ImportedOptions(Options):
    """Store the head scores of another tool's file."""

    file: str = Field(
        min_length=1,
        description="file or folder with scores: DuoAttention, Retrieval_Head, HeadKV, QRHead, RTP-LLM, CSV, head set",
    )


IMPORTED = Table(
    "imported_scores",
    "scores of heads from a file of another tool",
    (MODEL, LAYER, HEAD, GROUP, Column("score", "value", "", "the file's score of the head or of its KV group")),
)

TABLES = (IMPORTED,)


def synthetic_cells(sizes: Sizes, model: str, number: int) -> Iterator[tuple[str, dict[str, Rows]]]:
    """Scores that fall with the growth exponent, as a retrieval score does."""
    noise = np.random.default_rng([sizes.seed, number]).normal(0, 0.05, len(sizes.units))
    keys = {name: sizes.units[name].to_numpy() for name in ("layer", "head", "kv_group")}
    yield "scores", {IMPORTED.name: {"model": model, **keys, "score": 1 - sizes.units["growth"].to_numpy() + noise}}
