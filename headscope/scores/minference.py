"""Pattern files of MInference: how many columns and diagonals the prefill of every query head keeps.

A JSON list with an object per layer: query head -> [pattern, vertical, slash, score].
"""

from collections.abc import Mapping
from typing import Any

from headscope.base.user_input import expand_path, quote, read_json
from headscope.errors import BadInput
from headscope.runs.aggregation import rows_at_longest_length
from headscope.runs.run_tables import RunTables

PATTERN, RULE = "vertical_and_slash", "vertical-slash"
Patterns = Mapping[tuple[int, int], tuple[int, int]]
"""Columns and diagonals by (layer, head)."""


def read_patterns(path: str) -> Patterns:
    """The sizes of every head in a pattern file. Raises BadInput for other content or another pattern."""
    file = expand_path(path, "patterns")
    content = read_json(file, f"patterns '{file}'")
    try:
        entries = {(layer, int(head)): entry for layer, heads in enumerate(content) for head, entry in heads.items()}
        sizes = {place: (int(vertical), int(slash)) for place, (_, vertical, slash, *_) in entries.items()}
    except (AttributeError, TypeError, ValueError) as error:
        form = f"[{PATTERN}, vertical, slash, score]"
        raise BadInput(f"patterns '{file}' are no list of layers with head: {form}. Check the file") from error
    if others := sorted({str(entry[0]) for entry in entries.values()} - {PATTERN}):
        raise BadInput(f"patterns '{file}': pattern {quote(others[0])} is not measured. Use files with {PATTERN} only")
    if not sizes or min(min(pair) for pair in sizes.values()) < 0:
        raise BadInput(f"patterns '{file}' have no head, or a negative size. Check the file")
    return sizes


def best_patterns(run: RunTables, model: str) -> list[dict[str, list[Any]]]:
    """For every layer, the measured columns and diagonals of largest recall of each head, in the published form.

    Raises BadInput without rules of this kind.
    """
    if "sparse_rows" not in run.tables:
        raise BadInput("the run has no sparse selections. Measure rules that choose keys first")
    rows = run.rows("sparse_rows", model=model, rows_of="text").astype({"rule": str})
    rows = rows_at_longest_length(rows[rows["rule"].str.startswith(f"{RULE}:")])
    if rows.empty:
        raise BadInput(f"the run has no rule {RULE}:V:S of '{model}'. Measure some with --rules {RULE}:30:800")
    recall = rows.groupby(["layer", "head", "rule"])["recall"].mean()
    best = recall.loc[recall.groupby(["layer", "head"]).idxmax()]
    layers: list[dict[str, list[Any]]] = [{} for _ in range(int(best.index.get_level_values("layer").max()) + 1)]
    for layer, head, rule, score in best.reset_index().itertuples(index=False):
        _, vertical, slash = rule.split(":")
        layers[layer][str(head)] = [PATTERN, int(vertical), int(slash), round(float(score), 3)]
    return layers
