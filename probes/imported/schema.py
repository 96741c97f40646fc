"""Options and table of imported scores."""

from pydantic import Field

from headscope.model_identity import WEIGHTS_OPTION, AcceptedWeights
from headscope.plugin_api import GROUP, HEAD, LAYER, MODEL, Column, Options, Table


class ImportedOptions(Options):
    """Store the head scores of another tool's file."""

    file: str = Field(
        min_length=1,
        description="file or folder with scores: DuoAttention, Retrieval_Head, HeadKV, QRHead, RTP-LLM, CSV, head set",
    )
    weights: AcceptedWeights = Field("same", description=WEIGHTS_OPTION)


IMPORTED = Table(
    "imported_scores",
    "scores of heads from a file of another tool",
    (MODEL, LAYER, HEAD, GROUP, Column("score", "value", "", "the file's score of the head or of its KV group")),
)

TABLES = (IMPORTED,)
