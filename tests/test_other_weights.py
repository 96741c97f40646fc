"""Heads and scores of another model are refused, or used on request and marked as such."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.tiny_studies import save_checkpoint, save_texts

import headscope as hs
from headscope.errors import BadInput
from headscope.heads import HeadSet
from headscope.runs.run import Run

PROMPT = {"prompt": "w1 w2 w3", "answer": " w4"}


class Place:
    """Two tiny checkpoints of one shape, a run of the second, and what was exported from it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.own, self.other = (save_checkpoint(folder / name, seed) for seed, name in enumerate(("own", "other")))
        self.text = save_texts(folder / "texts")
        self.run = self.measure(self.other)

    def measure(self, model: Path) -> Run:
        out = self.folder / "runs"
        return hs.measure({"m": str(model)}, text=self.text, docs=1, lengths=[40], rows=8, out=out, quiet=True)

    def exported(self, file_format: str, **options: Any) -> Path:
        ending = {"csv": "csv", "qrhead": "yaml"}.get(file_format, "json")
        path = self.folder / f"{file_format}.{ending}"
        return path if path.exists() else self.run.export(file_format, path, "ess2_40", **options)

    def call(self, probe: Callable[..., Run], model: Path | None = None, **options: Any) -> Run:
        out = self.folder / "results"
        return probe({"base": str(model or self.own)}, out=out, quiet=True, **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


def assert_marked(run: Run, source: str, digest: str) -> None:
    (entry,) = run.manifest["models"]
    assert entry["other_weights"] == {source: digest}
    finding = f"base: {source} belongs to a model with other weights ({digest[:12]}), which weights=any allows."
    assert finding in run.findings()["text"].to_list()


@pytest.mark.parametrize("file_format", ["csv", "json", "duo", "retrieval-head", "headkv", "qrhead"])
def test_imported_scores_of_other_weights_are_refused_unless_allowed(place: Place, file_format: str) -> None:
    file = str(place.exported(file_format))
    with pytest.raises(BadInput, match=r"belongs to other weights \(sha256 .{12}\) than model 'base' \(.{12}\)"):
        place.call(hs.import_scores, file=file)
    run = place.call(hs.import_scores, file=file, weights="any")
    assert_marked(run, f"the scores in '{file}'", place.run.manifest["models"][0]["weights_sha256"])
    if len(run.heads["imported"].dropna()) > 1:
        assert "other weights" in run.charts("imported")[0].caption
    own = place.call(hs.import_scores, model=place.other, file=file)
    assert own.manifest["models"][0]["other_weights"] == {}


def test_scores_that_name_another_model_are_refused_unless_allowed(place: Place, tmp_path: Path) -> None:
    table = pd.DataFrame({"layer": [0, 1], "head": [0, 3], "score": [0.5, 1.0]})
    for name in ("base", "own", str(place.own)):
        table.assign(model=name).to_csv(tmp_path / "scores.csv")
        place.call(hs.import_scores, file=str(tmp_path / "scores.csv"))
    table.assign(model="gpt2").to_csv(tmp_path / "scores.csv")
    with pytest.raises(BadInput, match="belongs to model 'gpt2', not to 'base'"):
        place.call(hs.import_scores, file=str(tmp_path / "scores.csv"))
    run = place.call(hs.import_scores, file=str(tmp_path / "scores.csv"), weights="any")
    assert_marked(run, f"the scores in '{tmp_path / 'scores.csv'}'", "gpt2")
    table.assign(model=["a", "b"]).to_csv(tmp_path / "scores.csv")
    with pytest.raises(BadInput, match="belong to several models: a, b"):
        place.call(hs.import_scores, file=str(tmp_path / "scores.csv"))


@pytest.mark.parametrize("kind", ["file", "run"])
def test_ablated_heads_of_other_weights_are_refused_unless_allowed(place: Place, kind: str) -> None:
    name = f"file:{place.exported('json')}" if kind == "file" else f"run:{place.run.path}:ess2_40:2"
    with pytest.raises(BadInput, match=r"head set '.*' belongs to other weights"):
        place.call(hs.ablate, heads=[name, "L0H0"], **PROMPT)
    run = place.call(hs.ablate, heads=[name, "L0H0"], weights="any", **PROMPT)
    assert_marked(run, f"head set '{name}'", place.run.manifest["models"][0]["weights_sha256"])
    assert run.manifest["config"]["ablation"]["weights"] == "any"


def test_digest_in_a_head_set_wins_over_that_of_a_file_beside_it(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    place.run.top_heads("ess2_40", 2).write(file)
    (tmp_path / "heads.json.headscope.json").write_text(
        json.dumps({"weights_sha256": hs.load(str(place.own)).weights_sha256})
    )
    with pytest.raises(BadInput, match="belongs to other weights"):
        place.call(hs.import_scores, file=str(file))


def test_head_set_of_other_weights_is_refused_unless_allowed(place: Place) -> None:
    heads, model = place.run.top_heads("ess2_40", 2), hs.load(str(place.own))
    for selected in (heads, heads & [heads.heads[0]], heads - [heads.heads[0]], heads | [(0, 0)]):
        with pytest.raises(BadInput, match="this head set belongs to other weights"), hs.ablated(model, selected):
            pass
    with hs.ablated(model, heads, weights="any"), hs.ablated(hs.load(str(place.other)), heads):
        pass
    with pytest.raises(BadInput, match="two models"):
        _ = heads | HeadSet(((0, 0),), model_digest="0" * 64)


@pytest.mark.parametrize("kind", ["file", "run"])
def test_budget_orders_of_other_weights_are_refused_unless_allowed(place: Place, kind: str) -> None:
    order = f"file:{place.exported('headkv')}" if kind == "file" else f"run:{place.run.path}:ess2_40:m"
    options: dict[str, Any] = {"lengths": [40], "sink": 2, "recent": 4, "shares": [0.5], "text": place.text, "docs": 1}
    with pytest.raises(BadInput, match="belongs to other weights"):
        place.call(hs.budget, orders=[order], **options)
    run = place.call(hs.budget, orders=[order], weights="any", **options)
    name = "headkv" if kind == "file" else "ess2_40"
    assert_marked(run, f"the scores of the order '{name}'", place.run.manifest["models"][0]["weights_sha256"])


def test_rounded_copy_accepts_its_heads(place: Place) -> None:
    heads = place.run.top_heads("ess2_40", 2)
    with hs.ablated(hs.load(str(place.other), dtype="bf16"), heads):
        pass


def test_older_exports_without_a_digest_are_accepted(place: Place, tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text(json.dumps({"0-0": [1.0], "1-3": [0.5]}))
    assert place.call(hs.import_scores, file=str(tmp_path / "scores.json")).manifest["models"][0]["other_weights"] == {}
