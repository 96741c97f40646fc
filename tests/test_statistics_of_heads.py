"""Every taker of a statistic, a list or a mask of heads refuses by name what is none, some, or of another model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import assert_names, refuses
from support.shipped_runs import shipped_path
from support.synthetic_runs import synthetic_run

import headscope as hs
from headscope import scores
from headscope.base.head_set import HeadSet
from headscope.errors import BadInput, ResourceMissing
from headscope.run import Run
from headscope.runs.head_names import parse_heads

TAKERS: dict[str, Callable[[Run, str, str], Any]] = {
    "top_heads": lambda run, name, model: run.top_heads(name, 2, model),
    "HeadSet.top": lambda run, name, model: HeadSet.top(run.heads[run.heads["model"] == model], name, 2),
    "run:": lambda run, name, model: parse_heads(f"run:{run.path}:{name}:2:{model}"),
    "to_latex": lambda run, name, model: run.to_latex(name, model=model),
    "to_latex, second column": lambda run, name, model: run.to_latex("growth", name, model=model),
    "HeadScores": lambda run, name, model: scores.HeadScores.from_run(run, name, model),
}
"""What takes the name of a statistic of heads."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base", "learned"))


@pytest.mark.parametrize("name", ["model", "layer", "head", "kv_group", "no_statistic"])
@pytest.mark.parametrize("taker", TAKERS)
def test_a_column_that_is_no_statistic_of_heads_is_refused(run: Run, taker: str, name: str) -> None:
    with refuses(BadInput, f"'{name}'"):
        TAKERS[taker](run, name, "base")


@pytest.mark.parametrize("taker", ["top_heads", "run:", "to_latex", "HeadScores"])
def test_the_method_of_a_statistic_and_a_statistic_without_values_are_refused(taker: str) -> None:
    """The shipped example has influences of one model only."""
    run = Run.open(shipped_path("example"))
    with refuses(BadInput, "'influence_joint_method'"):
        TAKERS[taker](run, "influence_joint_method", "adarope")
    with refuses(BadInput, "'influence_joint'", "value"):
        TAKERS[taker](run, "influence_joint", "base")


@pytest.mark.parametrize(
    "take",
    [
        lambda run: run.rows("attention", model="zz"),
        lambda run: run.top_heads("growth", 2, "zz"),
        lambda run: run.head(0, 0, "zz"),
        lambda run: run.to_latex("growth", model="zz"),
    ],
)
def test_a_model_that_a_run_does_not_have_is_named(run: Run, take: Callable[[Run], Any]) -> None:
    with refuses(BadInput, "'zz'", "base"):
        take(run)


def test_fewer_heads_than_asked_for_are_announced(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    heads = run.top_heads("growth", 9999, "base")
    assert_names(caplog.text, "9999", len(heads.heads))


@pytest.mark.parametrize(
    ("layers", "heads", "named"), [([0, 1], 8, "L3H7"), ([0, 3], 2, "L3H7"), ([0, 3], 0, "0"), ([0, 3], -1, "-1")]
)
def test_a_mask_has_a_place_for_every_head_or_names_it(layers: list[int], heads: int, named: str) -> None:
    members = HeadSet(((0, 1), (3, 7)))
    assert members.mask([0, 3], 8).sum() == 2
    with refuses(BadInput, named):
        members.mask(layers, heads)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"weights": True}, "True"),
        ({"weights": (True,)}, "True"),
        ({"weights": 5}, "5"),
        ({"weights": "x"}, "x"),
        ({"source": 5}, "5"),
        ({"model": 5}, "5"),
        ({"shape": (1, 1)}, "L0H1"),
        ({"shape": 5}, "5"),
    ],
)
def test_a_field_of_a_head_set_of_another_type_is_refused(fields: dict[str, Any], named: str) -> None:
    with refuses(BadInput, named):
        HeadSet(((0, 1),), **fields)


@pytest.mark.parametrize("rows", [[[18, 6], [3, 2]], [[18, 6], [3, 2], [0, 1]]])
def test_rows_of_two_integers_are_heads_in_every_format(rows: list[list[int]], tmp_path: Path) -> None:
    np.save(tmp_path / "h.npy", np.array(rows))
    (tmp_path / "h.json").write_text(str(rows))
    expected = tuple(map(tuple, rows))
    assert HeadSet.read(tmp_path / "h.npy").heads == HeadSet.read(tmp_path / "h.json").heads == expected


@pytest.mark.parametrize("name", ["h.npy", "h.json"])
def test_rows_of_zeros_and_ones_may_be_heads_or_a_mask_and_are_refused(name: str, tmp_path: Path) -> None:
    rows = [[1, 0], [0, 1]]
    np.save(tmp_path / "h.npy", np.array(rows))
    (tmp_path / "h.json").write_text(str(rows))
    with refuses(BadInput, name):
        HeadSet.read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("h.yaml", "heads: [L0H1]\nweights: [true]", "true"),
        ("h.yaml", "heads: [L0H9]\nshape: [4, 4]", "L0H9"),
        ("h.yaml", "heads: [L0H1]\nsource: 5", "5"),
        ("h.json", '[["L0H1", true]]', "true"),
        ("h.json", '{"0-1": true}', "true"),
        ("h.npz", "PK\x03\x04", ".npz"),
        ("h.txt", "", "empty"),
    ],
)
def test_a_file_with_a_boolean_score_a_head_outside_its_shape_or_nothing_is_refused(
    name: str, content: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with refuses(BadInput, name):
        HeadSet.read(tmp_path / name)
    with pytest.raises(BadInput, match=f"(?i){named}"):
        parse_heads(f"file:{tmp_path / name}")


def test_a_run_folder_is_no_file_of_heads_and_the_way_out_is_named(run: Run) -> None:
    with refuses(ResourceMissing, "headscope export"):
        HeadSet.read(run.path)


def test_a_count_of_heads_of_a_model_without_values_is_refused() -> None:
    run = Run.open(shipped_path("example"))
    with refuses(BadInput, "'influence_joint'"):
        hs.check(run, [{"statistic": "influence_joint", "model": "base", "count_below": 1.0, "at_most": 3}])
