"""`run.array`: tables as arrays with named axes, cell by cell as in the rows."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.refusals import refuses
from support.synthetic_runs import synthetic_run

from headscope.errors import BadInput, BadRun
from headscope.runs.arrays import _default_axes
from headscope.runs.arrow import decode_map
from headscope.runs.columns import all_tables
from headscope.runs.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), pairs=3, lengths=(256,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("patching", "effect"),
        ("patching_layers", "metric_patched"),
        ("ablation", "metric_after"),
    ],
)
def test_every_row_is_the_cell_of_its_labels(run: Run, name: str, column: str) -> None:
    table, keys = run.table(name), all_tables()[name].keys
    array = run.array(name, column, axes=keys, model="base")
    rows = table[table["model"] == "base"]
    assert array.axes == keys
    assert np.isfinite(array.values).sum() == len(rows)
    for _, row in rows.iloc[:: max(1, len(rows) // 20)].iterrows():
        place = tuple(int(np.flatnonzero(labels == row[axis])[0]) for axis, labels in array.labels.items())
        assert array.values[place] == pytest.approx(row[column])


@pytest.mark.slow
def test_the_default_axes_are_the_keys_that_vary(run: Run) -> None:
    array = run.array("patching", model="base", activation="z", method="exact", position=-1, prompts="ioi")
    assert {"layer", "head"} <= {*array.axes} <= {"pair", "layer", "head", "direction"}


@pytest.mark.parametrize(
    ("heads", "groups", "axes"),
    [([0, 1, 2, 3], [0, 0, 1, 1], ["head"]), ([-1, -1, 0, 1], [0, 1, 0, 1], ["head", "kv_group"])],
)
def test_a_default_axis_of_kv_groups_is_left_out_only_if_the_heads_identify_the_rows(
    heads: list[int], groups: list[int], axes: list[str]
) -> None:
    assert _default_axes(pd.DataFrame({"head": heads, "kv_group": groups}), ["head", "kv_group"]) == axes


def test_rows_are_chosen_by_one_number_of_a_float_column(run: Run) -> None:
    effects = run.table("patching")["effect"]
    for value in (float(effects.iloc[0]), effects.iloc[0], float(str(effects.iloc[0]))):
        assert len(run.rows("patching", effect=value)) == (effects == np.float32(value)).sum() > 0


def test_maps_are_decoded(run: Run) -> None:
    rows = run.rows("attention_maps", model="base", layer=0, head=0)
    place = {name: rows[name].iloc[0] for name in ("doc", "context_length")}
    rows = rows[(rows["doc"] == place["doc"]) & (rows["context_length"] == place["context_length"])]
    array = run.array("attention_maps", model="base", layer=0, head=0, **place)
    assert array.axes == ["query_block", "key_block"]
    np.testing.assert_array_equal(array.values, decode_map(rows.sort_values("query_block")["weights"].tolist()))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"table": "patch"}, ("table", "'patch'")),
        ({"table": "patching", "column": "efect"}, ("'patching'", "'efect'", "'effect'")),
        ({"table": "patching", "laier": 1}, ("'patching'", "'laier'", "'layer'")),
        ({"table": "patching", "layer": 99}, ("'patching'", "'layer'", 99)),
        ({"table": "patching", "axes": ["layer", "hed"]}, ("'patching'", "'hed'", "'head'")),
        ({"table": "patching", "axes": ["layer"]}, ("'patching'", "layer", "head")),
    ],
)
def test_bad_input_is_named(run: Run, arguments: dict[str, object], named: tuple[object, ...], tmp_path: Path) -> None:
    with refuses(BadRun if "patch" in arguments.values() else BadInput, *named):
        run.array(**arguments)  # type: ignore[arg-type]
