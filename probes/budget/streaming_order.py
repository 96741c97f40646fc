"""The order in which KV groups start to stream, and the size of the KV cache that remains."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from headscope.base.heads import format_head
from headscope.base.model_identity import AcceptedWeights
from headscope.errors import BadInput
from headscope.runs.run import Run
from headscope.scores import HeadScores, match_heads, model_heads, read, refuse_other_model
from headscope.streaming import LayerCache, StreamingWindow
from probes.budget.declaration import RUN_PATTERN

SIGNS_AND_COLUMNS: Mapping[str, tuple[int, str]] = {
    "effective-length": (1, "log_ess2"),
    "local-mass": (-1, "local_mass"),
    "far-mass": (1, "far_mass"),
}
"""Measured order -> sign and column of its score in the table `budget_scores`."""
UNIT = ["layer", "kv_group"]
STABILITY_SAMPLES = 200
"""Simulated samples of query rows in the stability of an order."""


class FixedScores:
    """Scores from a stored run or a file, read once, before any model is opened."""

    def __init__(self, order: str, labels: Sequence[str]):
        self.order = order
        self.measured_documents: frozenset[str] = frozenset()
        match = RUN_PATTERN.fullmatch(order)
        if match is None:
            self._scores, self._sign = dict.fromkeys(labels, read(order.partition(":")[2])), 1
            return
        run = Run.open(match["folder"])
        self._sign = -1 if match["reversed"] else 1
        by_model = {}
        for label in labels:
            model = match["model"] or (label if label in run.models else None)
            by_model[label] = HeadScores.from_run(run, match["column"], model)
        self._scores = by_model
        self.measured_documents = frozenset(
            name for entry in run.manifest["models"] for name in (entry.get("documents_sha256") or {})
        )

    @property
    def content(self) -> list[str]:
        """The scores as digest parts: `--resume` refuses scores that changed."""
        return [scores.table.to_csv(index=False) for scores in self._scores.values()]

    def check_model(self, label: str, model: Any, weights: AcceptedWeights) -> str:
        """The digest or name of the model that the scores belong to, if it is another one; "" otherwise.

        Raises BadInput for another model unless `weights` is "any".
        """
        scores = self._scores[label]
        if not refuse_other_model(scores, model.identity, label, model.name, weights):
            return ""
        return scores.model_digests.label or scores.model

    def by_head(self, label: str, geometry: Any) -> pd.DataFrame:
        """Layer, head, kv_group and score of every head. Raises BadInput for a list of some heads: the order of the
        others is unknown."""
        rows = match_heads(self._scores[label], geometry, label)
        if len(rows) < len(heads := model_heads(geometry)):
            first = heads.merge(rows, how="left").query("score.isna()").iloc[0]
            raise BadInput(
                f"order '{self.order}' names {len(rows)} of the {len(heads)} heads of model '{label}', and not "
                f"{format_head(int(first['layer']), int(first['head']))}. Give a score for every head"
            )
        return rows.assign(score=self._sign * rows["score"])


def measured_scores(rows: pd.DataFrame, order: str) -> pd.DataFrame:
    """Layer, head, kv_group and score of every head: the mean over the documents of a `budget_scores` table."""
    sign, column = SIGNS_AND_COLUMNS[order]
    means = rows.astype({column: "float64"}).groupby(["layer", "head", "kv_group"])[column].mean()
    return (sign * means).rename("score").reset_index()


def rank_groups(scores: pd.DataFrame, reduction: str) -> pd.DataFrame:
    """One row per KV group: layer, kv_group, score and rank, 0 for the lowest; equal scores by layer and group."""
    groups = scores.groupby(UNIT)["score"].agg(reduction).reset_index().sort_values(UNIT, ignore_index=True)
    return groups.assign(rank=groups["score"].rank(method="first").astype(int) - 1)


def set_stability(
    scores: pd.DataFrame, errors: pd.DataFrame, order: str, reduction: str, shares: Sequence[float]
) -> pd.DataFrame:
    """Columns share, kept and same_set of the table `budget_stability` for a measured order.

    `scores` and `errors` are rows of the tables `budget_scores` and `budget_score_errors` of the same documents. The
    scores of another sample of query rows are drawn from a normal model of heads and errors (empirical Bayes), which
    shrinks the scores towards their mean: errors spread the scores of this sample too far.
    """
    _, column = SIGNS_AND_COLUMNS[order]
    heads = measured_scores(scores, order)
    squares = errors.assign(square=errors[f"{column}_se"].astype("float64") ** 2)
    of_heads = squares.groupby(["layer", "head", "kv_group"])["square"].agg(["sum", "count"])
    variance = (of_heads["sum"] / of_heads["count"] ** 2).to_numpy()
    score = heads["score"].to_numpy()
    spread = max(score.var(ddof=1) - variance.mean(), 0.0) if len(score) > 1 else 0.0  # of the heads, without errors
    shrink = np.where(variance > 0, spread / np.maximum(spread + variance, np.finfo(float).tiny), 1.0)
    noise = np.random.default_rng(0).standard_normal((STABILITY_SAMPLES, len(heads)))
    others = score.mean() + shrink * (score - score.mean()) + np.sqrt((1 + shrink) * variance) * noise
    samples = np.vstack([score, others])
    starts = np.flatnonzero((heads[UNIT] != heads[UNIT].shift()).any(axis=1))  # the heads of a group are neighbours
    groups = (np.maximum if reduction == "max" else np.add).reduceat(samples, starts, axis=1)
    if reduction == "mean":
        groups = groups / np.diff(starts, append=len(heads))
    ranks = groups.argsort(axis=1, kind="stable").argsort(axis=1)
    rows = []
    for share in shares:
        streams = ranks < (count := streaming_count(share, ranks.shape[1]))
        common = (streams[1:] & streams[0]).sum(1)
        kept = common.mean() / count if count else 1.0
        rows.append({"share": share, "kept": kept, "same_set": (common == count).mean()})
    return pd.DataFrame(rows)


def random_ranks(groups: pd.DataFrame, seed: int, draw: int) -> pd.DataFrame:
    """The KV groups (layer, kv_group) in a random order; the score is the rank."""
    rank = np.random.default_rng([seed, draw]).permutation(len(groups))
    return groups[UNIT].assign(score=rank.astype(float), rank=rank)


def streaming_count(share: float, groups: int) -> int:
    """Number of KV groups that stream, the nearest to the share."""
    return round(share * groups)


def lowest_groups(ranks: pd.DataFrame, count: int) -> dict[int, tuple[int, ...]]:
    """The KV groups of the `count` lowest ranks by layer number."""
    rows = ranks[ranks["rank"] < count].sort_values(UNIT)
    by_layer: Any = rows.groupby("layer")["kv_group"]
    return {int(layer): tuple(map(int, part)) for layer, part in by_layer}


def kept_tokens(length: int, layer_limit: int | None, streaming: StreamingWindow | None) -> int:
    """Tokens that a KV group keeps after `length` tokens: all, or those that a streaming query there could see; at
    most the last `layer_limit`, those in the window of the layer."""
    first_visible = 0 if layer_limit is None else max(0, length - layer_limit)
    if streaming is None:
        return length - first_visible
    first_recent = max(first_visible, length - streaming.recent)
    return length - first_recent + max(0, min(streaming.sink, first_recent) - first_visible)


def cache_bytes(
    layers: Mapping[int, LayerCache],
    kv_groups: Mapping[int, int],
    streaming_groups: Mapping[int, Sequence[int]],
    window: StreamingWindow,
    length: int,
    bytes_per_value: int,
) -> int:
    """Bytes of keys and values of one sequence of `length` tokens; the first three arguments are by layer number.

    A streaming KV group saves nothing where its layer stores what all heads share (latent attention).
    """
    total = 0
    for number, layer in layers.items():
        groups, streaming = kv_groups[number], len(streaming_groups.get(number, ()))
        if streaming > groups:
            raise BadInput(f"{streaming} KV groups cannot stream in layer {number}. Name at most {groups}")
        all_tokens, streamed = (kept_tokens(length, layer.limit, streams) for streams in (None, window))
        dropped = streaming * (all_tokens - streamed) if layer.has_groups else 0
        total += layer.values * bytes_per_value * (groups * all_tokens - dropped) // groups
    return total
