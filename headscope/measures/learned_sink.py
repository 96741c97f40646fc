"""The share of a row that goes to a sink which the model learned beside its keys (gpt-oss, Granite)."""

from torch import Tensor

from headscope.attention.record import AttentionRecord
from headscope.measures.row_means import RowMeans
from headscope.measures.row_sampling import Places, on


class LearnedSink(RowMeans):
    """Means of the sink's weight: the `learned_sink` table, without rows where no layer has a sink."""

    name = "learned_sink"
    statistics = ("share",)

    def of_rows(self, heard: AttentionRecord, rows: Places) -> Tensor | None:
        shares = heard.sink_share
        return None if shares is None else shares.index_select(1, on(shares.device, rows))[None]
