"""Pattern files of MInference: the keys that the prefill of every query head keeps, most often columns and diagonals.

A JSON list with an object per layer: query head -> [pattern, vertical, slash, score].
"""

import math
from collections.abc import Mapping
from typing import Any

from headscope.base.heads import Head, format_head
from headscope.base.input_files import read_json
from headscope.base.user_input import MAX_LENGTH, expand_path, parse_index, quote
from headscope.errors import BadInput, ResourceMissing
from headscope.runs.aggregation import rows_at_longest_length
from headscope.runs.run_tables import RunTables

PATTERN, RULE = "vertical_and_slash", "vertical-slash"
KNOWN_PATTERNS = (PATTERN, "stream_llm", "block_sparse")
Patterns = Mapping[Head, tuple[str, int, int]]
"""Pattern and two sizes by (layer, head): columns and diagonals, first and last keys, or two numbers without effect."""


def read_patterns(path: str) -> Patterns:
    """The pattern and sizes of every head in a pattern file.

    Raises ResourceMissing without the file, BadInput for other content and another pattern.
    """
    file = expand_path(path, "patterns")
    try:
        content = read_json(file, f"patterns '{file}'")
        layers = [{parse_index(head): entry for head, entry in heads.items()} for heads in content]
        patterns = {
            (layer, head): _parse_pattern(layer, head, entry)
            for layer, heads in enumerate(layers)
            for head, entry in heads.items()
        }
        if not patterns:
            raise ValueError("it has no head")
    except FileNotFoundError as error:
        raise ResourceMissing(f"no patterns at '{file}'. Check the path") from error
    except (AttributeError, TypeError) as error:
        form = f"[{PATTERN}, vertical, slash, score]"
        raise BadInput(f"patterns '{file}' are no list of layers with head: {form}. Check the file") from error
    except ValueError as error:
        raise BadInput(f"patterns '{file}': {error}. Check the file") from error
    return patterns


def _parse_pattern(layer: int, head: int, entry: Any) -> tuple[str, int, int]:
    name = format_head(layer, head)
    if not isinstance(entry, list) or len(entry) != 4:
        raise ValueError(f"{name} is {quote(entry)}, not [pattern, vertical, slash, score]")
    pattern, vertical, slash, score = entry
    if pattern not in KNOWN_PATTERNS:
        known = ", ".join(KNOWN_PATTERNS)
        raise ValueError(f"{name} has the unknown pattern {quote(pattern)}, not one of {known}")
    for size in (vertical, slash):
        if type(size) is not int or not 0 <= size <= MAX_LENGTH:
            raise ValueError(f"the size {quote(size)} of {name} is not a whole number from 0 to {MAX_LENGTH:,}")
    if pattern != "block_sparse" and vertical + slash == 0:
        raise ValueError(f"the pattern of {name} keeps no key: both sizes are 0")
    if type(score) not in (int, float) or not math.isfinite(score):
        raise ValueError(f"the score {quote(score)} of {name} is not a finite number")
    return pattern, vertical, slash


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
