"""Heads and scores of another model are refused, or used on request and marked as such."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.refusals import assert_names, refuses
from support.tiny_studies import save_checkpoint, save_texts
from transformers import LlamaForCausalLM

import headscope as hs
from headscope.base.head_set import HeadSet
from headscope.base.model_identity import WeightDigests
from headscope.errors import BadInput
from headscope.run import Run

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
    marks = run.findings().query("question == 'models.other_weights'")
    assert marks["model"].to_list() == ["base"]
    assert_names(marks["text"].item(), source, digest[:12], "weights=any")


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["csv", "json", "duo", "retrieval-head", "headkv", "qrhead"])
def test_imported_scores_of_other_weights_are_refused_unless_allowed(place: Place, file_format: str) -> None:
    file = str(place.exported(file_format))
    digests = [hs.load(str(path)).identity.weights.label[:12] for path in (place.other, place.own)]
    with refuses(BadInput, f"'{file}'", "'base'", *digests, "--weights any"):
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
    with refuses(BadInput, "'gpt2'", "'base'", "--weights any"):
        place.call(hs.import_scores, file=str(tmp_path / "scores.csv"))
    run = place.call(hs.import_scores, file=str(tmp_path / "scores.csv"), weights="any")
    assert_marked(run, f"the scores in '{tmp_path / 'scores.csv'}'", "gpt2")
    table.assign(model=["a", "b"]).to_csv(tmp_path / "scores.csv")
    with refuses(BadInput, tmp_path / "scores.csv", "a, b"):
        place.call(hs.import_scores, file=str(tmp_path / "scores.csv"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "run"])
def test_ablated_heads_of_other_weights_are_refused_unless_allowed(place: Place, kind: str) -> None:
    name = f"file:{place.exported('json')}" if kind == "file" else f"run:{place.run.path}:ess2_40:2"
    with refuses(BadInput, f"'{name}'", "'base'", "--weights any"):
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
    with refuses(BadInput, f"'{file}'", "'base'", "--weights any"):
        place.call(hs.import_scores, file=str(file))


def test_head_set_of_other_weights_is_refused_unless_allowed(place: Place) -> None:
    heads, model = place.run.top_heads("ess2_40", 2), hs.load(str(place.own))
    for selected in (heads, heads & [heads.heads[0]], heads - [heads.heads[0]], heads | [(0, 0)]):
        with refuses(BadInput, f"'{model.name}'", "--weights any"), hs.ablated(model, selected):
            pass
    with hs.ablated(model, heads, weights="any"), hs.ablated(hs.load(str(place.other)), heads):
        pass
    with refuses(BadInput, "models"):
        _ = heads | HeadSet(((0, 0),), model_digests=WeightDigests("0" * 64))


@pytest.mark.parametrize("kind", ["file", "run"])
def test_budget_orders_of_other_weights_are_refused_unless_allowed(place: Place, kind: str) -> None:
    order = f"file:{place.exported('headkv')}" if kind == "file" else f"run:{place.run.path}:ess2_40:m"
    options: dict[str, Any] = {"lengths": [40], "sink": 2, "recent": 4, "shares": [0.5], "text": place.text, "docs": 1}
    with refuses(BadInput, "'base'", "--weights any"):
        place.call(hs.budget, orders=[order], **options)
    run = place.call(hs.budget, orders=[order], weights="any", **options)
    name = "headkv" if kind == "file" else "ess2_40"
    assert_marked(run, f"the scores of the order '{name}'", place.run.manifest["models"][0]["weights_sha256"])


@pytest.fixture(scope="module")
def copy(place: Place) -> Path:
    """A copy in float16 of the checkpoint that the run measured, whose values lose precision."""
    folder = place.folder / "half"
    shutil.copytree(place.other, folder)
    LlamaForCausalLM.from_pretrained(place.other).half().save_pretrained(folder)
    own, half = (hs.load(str(path)).identity.weights for path in (place.other, folder))
    assert own.compare(half) == "equal after rounding to float16"
    assert own.bfloat16 != half.bfloat16
    return folder


@pytest.mark.parametrize("file_format", ["csv", "json", "duo", "retrieval-head"])
def test_a_float16_copy_accepts_exported_scores(place: Place, copy: Path, file_format: str) -> None:
    run = place.call(hs.import_scores, model=copy, file=str(place.exported(file_format)))
    assert run.manifest["models"][0]["other_weights"] == {}


def test_a_float16_copy_accepts_heads_and_orders(place: Place, copy: Path) -> None:
    heads = place.run.top_heads("ess2_40", 2)
    selections: list[Any] = [heads, [f"file:{place.exported('json')}"], [f"run:{place.run.path}:ess2_40:2"]]
    for selection in selections:
        run = place.call(hs.ablate, model=copy, heads=selection, **PROMPT)
        assert run.manifest["models"][0]["other_weights"] == {}
    for model in (hs.load(str(copy)), hs.load(str(place.other), dtype="bf16")):
        with hs.ablated(model, heads), hs.ablated(model, heads - [heads.heads[0]]):
            pass
    options: dict[str, Any] = {"lengths": [40], "sink": 2, "recent": 4, "shares": [0.5], "text": place.text, "docs": 1}
    orders = [f"file:{place.exported('headkv')}", f"run:{place.run.path}:ess2_40:m"]
    assert place.call(hs.budget, model=copy, orders=orders, **options).manifest["models"][0]["other_weights"] == {}


def test_heads_of_a_model_and_of_its_rounded_copy_combine(place: Place, copy: Path) -> None:
    """The union keeps the digests that both share, so that it belongs to both models and to no other."""
    digests = [hs.load(str(path)).identity.weights for path in (place.other, copy)]
    first, second = (HeadSet(((0, head),), model_digests=own) for head, own in enumerate(digests))
    assert (first | second).model_digests == WeightDigests(float16=digests[0].float16)
    assert (first | [(0, 1)]).model_digests == (HeadSet(((0, 1),)) | first).model_digests == digests[0]
    with refuses(BadInput, "--weights any"), hs.ablated(hs.load(str(place.own)), first | second):
        pass


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_head_sets_are_stored_with_all_digests_and_read_with_the_one_of_older_files(
    place: Place, tmp_path: Path, ending: str
) -> None:
    heads, file = place.run.top_heads("ess2_40", 2), tmp_path / f"heads.{ending}"
    heads.write(file)
    assert HeadSet.read(file).model_digests == heads.model_digests == hs.load(str(place.other)).identity.weights
    file.write_text(json.dumps({"heads": ["L0H0"], "model_digest": heads.model_digests.bfloat16}))
    assert HeadSet.read(file).model_digests == WeightDigests(heads.model_digests.bfloat16)
    name = f"weights:{heads.model_digests.bfloat16}:{heads}"  # in the study of an older run
    run = place.call(hs.ablate, model=place.other, heads=[name], **PROMPT)
    assert len(run.ablation) == 2
    with refuses(BadInput, f"'{heads}'", "'base'", "--weights any"):
        place.call(hs.ablate, heads=[name], **PROMPT)


def test_older_exports_without_a_digest_are_accepted(place: Place, tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text(json.dumps({"0-0": [1.0], "1-3": [0.5]}))
    assert place.call(hs.import_scores, file=str(tmp_path / "scores.json")).manifest["models"][0]["other_weights"] == {}
