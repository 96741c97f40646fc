"""One score for every head of one model, and the match of a file's scores to the heads of a model."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.base.head_files import no_ranking, read_heads
from headscope.base.head_set import HeadSet
from headscope.base.heads import check_statistic, estimate_mask, format_unit
from headscope.base.model_identity import (
    NO_DIGESTS,
    AcceptedWeights,
    ModelIdentity,
    WeightDigests,
    refuse_other_name,
    refuse_other_weights,
)
from headscope.errors import BadInput
from headscope.runs.run_tables import RunTables, check_model
from headscope.runs.summary import model_identity

if TYPE_CHECKING:
    from headscope.attention.geometry import Geometry

log = logging.getLogger("headscope")

Reduction = Literal["max", "mean"]
"""How the scores of the query heads that share a key head become one score."""
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HeadScores:
    """A finite score for each head, in a table of columns layer, head, kv_group (-1 if unknown) and score.

    `name` is the statistic, `model` the label or name of the model, `source` the run or file that the scores come from,
    and `model_digests` those of its weights. `per_group` says that `head` counts KV groups, as in files that have one
    score per KV group; `shape` is the number of layers, and of heads or KV groups, that a file of all of them states.
    """

    table: pd.DataFrame
    name: str
    model: str = ""
    source: str = ""
    model_digests: WeightDigests = NO_DIGESTS
    per_group: bool = False
    shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        missing = self.table[~np.isfinite(self.table["score"].to_numpy(dtype=np.float64))]
        if len(missing):
            units = "KV groups" if self.per_group else "heads"
            raise BadInput(
                f"score '{self.name}' has no finite value in {len(missing)} of {len(self.table)} {units}, the first "
                f"{self._unit_name(missing)}. Choose another score, or measure these {units}"
            )
        repeated = self.table[self.table.duplicated(["layer", "head"])]
        if len(repeated):
            raise BadInput(
                f"score '{self.name}' has two values for {self._unit_name(repeated)}. Give one value per head"
            )

    def _unit_name(self, rows: pd.DataFrame) -> str:
        """The name of the head or KV group of the first of these rows."""
        layer, number = int(rows["layer"].iloc[0]), int(rows["head"].iloc[0])
        return format_unit(layer, number, self.per_group)

    @classmethod
    def from_run(cls, run: RunTables, name: str, model: str | None = None) -> "HeadScores":
        """The scores in column `name` of `run.heads`. Raises BadInput for a column or model that the run lacks."""
        heads: pd.DataFrame = run.heads
        check_statistic(heads, name)
        label = choose_model(run, model)
        rows = heads.loc[heads["model"] == label, ["layer", "head", "kv_group", name]]
        if estimated := int(estimate_mask(heads[heads["model"] == label], name).sum()):
            log.warning(
                "score '%s' is estimated for %d of %d heads of '%s'. Use method exact to measure them",
                *(name, estimated, len(rows), label),
            )
        table = rows.rename(columns={name: "score"}).astype({"score": "float64"}).reset_index(drop=True)
        digests = model_identity(run, label).weights
        return cls(table.sort_values(["layer", "head"], ignore_index=True), name, label, run.name, digests)

    def by_head(self) -> Matrix:
        """Scores [layers, heads]. Raises BadInput if layers differ in their number of heads."""
        return self._matrix(self.table, "head")

    def by_group(self, reduction: Reduction = "max") -> Matrix:
        """Scores [layers, KV groups], each the maximum or mean over the query heads of the group."""
        if self.per_group:
            return self.by_head()
        groups = self.table.groupby(["layer", "kv_group"])["score"].agg(reduction).reset_index()
        return self._matrix(groups, "kv_group")

    @property
    def ranking(self) -> HeadSet:
        """All heads by decreasing score; equal scores by layer and head. Raises BadInput for scores of KV groups."""
        if self.per_group:
            raise no_ranking(self.source)
        rows = self.table.sort_values(["layer", "head"]).sort_values("score", ascending=False, kind="stable")
        heads = tuple((int(layer), int(head)) for layer, head in zip(rows["layer"], rows["head"], strict=True))
        source = f"{self.name} of {self.model}" if self.model else self.name
        weights = tuple(map(float, rows["score"]))
        return HeadSet(heads, weights, f"{source}, {self.source}", self.model_digests, shape=self.shape)

    def _matrix(self, rows: pd.DataFrame, column: str) -> Matrix:
        counts = rows.groupby("layer").size()
        if counts.nunique() != 1:
            raise BadInput(
                f"layers have {counts.min()} to {counts.max()} values of '{self.name}', and this format needs the same "
                "number in every layer. Use csv or json"
            )
        return np.asarray(rows.pivot(index="layer", columns=column, values="score").to_numpy(dtype=np.float64))


def read(path: Path | str, column: str | None = None) -> HeadScores:
    """The scores of a file, see `read_heads`; of a list without scores n for the first of n heads to 1 for the last."""
    content = read_heads(path, column)
    count = len(content.rows)
    rows = [
        (layer, head, head if content.per_group else -1, float(count - rank) if score is None else score)
        for rank, (layer, head, score) in enumerate(content.rows)
    ]
    table = pd.DataFrame(rows, columns=["layer", "head", "kv_group", "score"])
    return HeadScores(
        table.sort_values(["layer", "head"], ignore_index=True),
        content.name,
        content.model,
        str(Path(path).expanduser()),
        content.digests,
        content.per_group,
        content.shape,
    )


def choose_model(run: RunTables, model: str | None) -> str:
    """The label of the model, which may be left out if the run has one. Raises BadInput for any other case."""
    if model is None and len(run.models) != 1:
        raise BadInput(f"{run.name} has {len(run.models)} models. Name one of them: {', '.join(run.models)}")
    label = run.models[0] if model is None else model
    check_model(run, label)
    return label


def refuse_other_model(
    scores: HeadScores, identity: ModelIdentity, label: str, checkpoint: str, weights: AcceptedWeights
) -> bool:
    """Raise BadInput for scores of another model than `label`, unless `weights` is "any".

    Models are compared by the digests of their weights, or else by name. Returns whether it is another model.
    """
    source = f"'{scores.source}'"
    if scores.model_digests:
        return refuse_other_weights(source, scores.model_digests, identity, label, weights)
    return refuse_other_name(source, scores.model, label, [checkpoint], weights)


def match_heads(scores: HeadScores, geometry: "Geometry", label: str) -> pd.DataFrame:
    """Columns layer, head, kv_group and score; a KV group's score goes to each of its query heads.

    Heads that a file of selected heads does not name are left out. Raises BadInput for a layer or head that the model
    does not have, and for the scores of a model of another shape.
    """
    source = f"'{scores.source}'"
    geometry.check_shape(source, scores.shape, label, scores.per_group)
    unit = "kv_group" if scores.per_group else "head"
    heads = model_heads(geometry)
    table = scores.table[["layer", "head", "score"]].rename(columns={"head": unit})
    own_units = {*heads[["layer", unit]].itertuples(index=False, name=None)}
    for layer, number in table[["layer", unit]].itertuples(index=False, name=None):
        if (layer, number) not in own_units:
            name = format_unit(layer, number, scores.per_group)
            raise BadInput(f"{source} names {name}, but model '{label}' has none. {geometry.suggest_heads(layer)}")
    return heads.merge(table)


def model_heads(geometry: "Geometry") -> pd.DataFrame:
    """Every query head of a model: layer (its number), head, kv_group."""
    return pd.DataFrame(
        [
            (number, head, geometry.kv_group(layer, head))
            for layer, number in enumerate(geometry.layer_numbers)
            for head in range(geometry.layer_heads[layer])
        ],
        columns=["layer", "head", "kv_group"],
    )
