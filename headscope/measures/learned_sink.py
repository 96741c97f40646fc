"""The share of a row that goes to a sink which the model learned beside its keys (gpt-oss, Granite)."""

from torch import Tensor

from headscope.attention.record import AttentionRecord
from headscope.measures.row_means import BinnedRowMeans
from headscope.measures.row_sampling import IntArray, to_device


class LearnedSink(BinnedRowMeans):
    """Means of the sink's weight: the `learned_sink` table, without rows where no layer has a sink."""

    name = "learned_sink"
    statistic_names = ("share",)

    def row_values(self, record: AttentionRecord, rows: IntArray) -> Tensor | None:
        shares = record.sink_weight
        return None if shares is None else shares.index_select(1, to_device(shares.device, rows))[None]
