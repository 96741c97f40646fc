"""One reader of files that name heads: every form gives the same heads in the same order wherever heads are taken."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from support.refusals import refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import save_checkpoint

import headscope as hs
from headscope import scores
from headscope.base.head_set import HeadSet
from headscope.errors import BadInput
from headscope.results.collection import results_of_all_models
from headscope.run import Run
from headscope.runs.head_names import parse_heads
from headscope.study.config import Options
from probes.ablation.declaration import AblationOptions
from probes.circuit.declaration import CircuitOptions
from probes.patching.declaration import PatchingOptions
from probes.patching.paths.declaration import PathsOptions
from probes.spans.declaration import SpansOptions

RANKED = ((3, 2), (3, 0), (1, 3), (0, 1))
NAMES = [f"L{layer}H{head}" for layer, head in RANKED]
SCORES = [0.9, 0.5, 0.25, -1.0]
DASHED = [f"{layer}-{head}" for layer, head in RANKED]
SHUFFLED = (2, 0, 3, 1)

LISTS: dict[str, tuple[str, str]] = {
    "QRHead": ("h.yaml", f"attn_head_set: {', '.join(DASHED)}\nmodel_name_or_path: m\n"),
    "names": ("h.json", json.dumps(NAMES)),
    "names with a dot": ("h.json", json.dumps([name.replace("H", ".H") for name in NAMES])),
    "names with a dash": ("h.yaml", "\n".join(f"- {name}" for name in DASHED)),
    "text": ("h.txt", "\n".join(DASHED)),
    "pairs": ("h.json", json.dumps(RANKED)),
    "PASTA": ("h.json", '{"3": [2, 0], "1": [3], "0": [1]}'),
    "CSV without scores": ("h.csv", "layer,head\n" + "\n".join(f"{layer},{head}" for layer, head in RANKED)),
    "head set": ("h.yaml", f"heads: [{', '.join(NAMES)}]"),
}
"""Files that name heads in order of rank."""


def shuffled(*columns: Any) -> list[Any]:
    rows = [*zip(*columns, strict=True)]
    return [rows[at] for at in SHUFFLED]


MATRIX = np.full((4, 4), -2.0)
for place, value in zip(RANKED, SCORES, strict=True):
    MATRIX[place] = value
SCORED: dict[str, tuple[str, str]] = {
    "Retrieval_Head": ("h.json", json.dumps({name: [score, score] for name, score in shuffled(DASHED, SCORES)})),
    "scores by name": ("h.json", json.dumps(dict(shuffled(NAMES, SCORES)))),
    "names with scores": ("h.json", json.dumps(shuffled(DASHED, SCORES))),
    "pairs with scores": ("h.json", json.dumps([[*pair, score] for pair, score in shuffled(RANKED, SCORES)])),
    "CSV": ("h.csv", "\n".join(["layer,head,x", *(f"{p[0]},{p[1]},{s}" for p, s in shuffled(RANKED, SCORES))])),
    "matrix": ("h.json", json.dumps(MATRIX.tolist())),
    "head set with weights": ("h.json", json.dumps({"heads": NAMES, "weights": SCORES})),
}
"""Files with scores, most of them out of order."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    save_checkpoint(folder)
    return folder


@pytest.mark.parametrize("form", [*LISTS, *SCORED])
def test_every_reader_keeps_order_and_scores(form: str, tmp_path: Path) -> None:
    name, content = {**LISTS, **SCORED}[form]
    (tmp_path / name).write_text(content)
    heads = HeadSet.read(tmp_path / name)
    assert heads.heads[:4] == parse_heads(f"file:{tmp_path / name}").heads[:4] == RANKED
    assert (heads.weights and [*heads.weights][:4]) == (SCORES if form in SCORED else None)
    ranking = scores.read(tmp_path / name).ranking
    assert ranking.heads[:4] == RANKED
    assert [*(ranking.weights or ())][:4] == (SCORES if form in SCORED else [4, 3, 2, 1])


@pytest.mark.parametrize("name", ["retrieval-head", "headkv", "qrhead", "csv", "json"])
def test_exported_heads_are_read_in_their_order(name: str, tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "runs", models=("base",), probes=("measure",))
    ending = {"qrhead": "yaml", "csv": "csv"}.get(name, "json")
    heads = HeadSet.read(run.export(name, tmp_path / f"h.{ending}", "ess2_1024"))
    best = run.top_heads("ess2_1024", 10)
    assert heads.heads[:10] == best.heads
    assert heads.model_digests == best.model_digests


def test_masks_name_the_heads_that_they_select(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "runs", models=("base",), probes=("measure",))
    path = run.export("rtp-llm", tmp_path / "c.json", "ess2_1024", share=0.25)
    kept = scores.read(path).by_head()
    assert {*HeadSet.read(path)} == {*zip(*np.nonzero(kept), strict=True)}
    np.save(tmp_path / "mask.npy", kept.astype(bool))
    assert [*HeadSet.read(tmp_path / "mask.npy")] == [*HeadSet.read(path)]
    np.save(tmp_path / "mask.npy", 0 * kept)
    with refuses(BadInput, tmp_path / "mask.npy", "no head"):
        HeadSet.read(tmp_path / "mask.npy")


def test_kv_groups_are_not_taken_for_heads(tmp_path: Path) -> None:
    file = tmp_path / "full_attention_heads.tsv"
    file.write_text("0.1\t0.2\n0.3\t0.4\n")
    with refuses(BadInput, file, "KV groups"):
        HeadSet.read(file)
    with refuses(BadInput, file, "KV groups"):
        _ = scores.read(file).ranking


def test_a_column_of_a_wide_csv_is_read_and_others_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "wide.csv"
    file.write_text("layer,head,a,b\n0,0,1,3\n0,1,2,2\n1,1,4,1\n")
    assert HeadSet.read(file, "b").weights == (3, 2, 1)
    assert scores.read(file, "a").ranking.heads[0] == (1, 1)
    with refuses(BadInput, file, "a", "b", "column"):
        HeadSet.read(file)
    with refuses(BadInput, file, "'c'", "a", "b"):
        HeadSet.read(file, "c")
    (tmp_path / "h.json").write_text('["L0H1"]')
    with refuses(BadInput, tmp_path / "h.json", "'b'"):
        HeadSet.read(tmp_path / "h.json", "b")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("h.json", "[1, 2]", ("1 is a number",)),
        ("h.json", "[[0.5, 1.0], [1.0]]", ("different lengths",)),
        ("h.json", '[["L0H1", 0.5], "L0H2"]', ("some heads have a score",)),
        ("h.json", '[["L0H1", 0.5, 1]]', ("['L0H1', 0.5, 1]",)),
        ("h.json", '["L0H1", "0-1"]', ("L0H1", "twice")),
        ("h.json", '["L0H40000"]', ("40000",)),
        ("h.json", '{"3": 2}', ("2", "list")),
        ("h.json", '{"3": [0.5]}', ("0.5",)),
        ("h.json", '{"3": [1], "03": [2]}', ("'03'",)),
        ("h.json", '{"headwise_config": {"0": [1], "00": [0]}}', ("'00'",)),
        ("h.json", '{"0-1": [NaN]}', ("L0H1", "nan")),
        ("h.json", '{"0-1": [1], "0-1": [2]}', ("'0-1'", "twice")),
        ("h.json", '{"0-1": [1], "00-1": [2]}', ("L0H1", "twice")),
        ("h.json", '{"0-1": [1]', ("line 1",)),
        ("h.json", '{"0-1": ["x"]}', ("'x'",)),
        ("h.json", '{"0-1": []}', ("'0-1'", "empty")),
        ("h.json", '{"a": 1}', ("'a'",)),
        ("h.json", '{"headwise_config": {"sink_token_num": 4}}', ("no heads",)),
        ("h.json", '["18.g2"]', ("'18.g2'", "KV group")),
        ("h.yaml", "attn_head_set: 1_2", ("'12'",)),
        ("h.yaml", "attn_head_set: 8-21,8-21", ("L8H21", "twice")),
        ("h.yaml", "", ("None",)),
        ("h.yaml", "[]", ("no heads",)),
        ("h.csv", "layer,head,score,score\n0,0,1,2\n", ("'score'", "two columns")),
        ("h.csv", "layer,score\n0,1\n", ("'head'", "layer", "head")),
        ("h.csv", "layer,head,score\n0,1,0,5\n", ("row 1", "more values", "points")),
        ("h.yaml", "heads: [L0H1]\nwieghts: [2]", ("'wieghts'", "weights")),
        ("h.npy", "", ("h.npy",)),
    ],
)
def test_files_that_name_no_heads_are_refused_by_every_reader(
    name: str, content: str, named: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    for read in (HeadSet.read, scores.read):
        with refuses(BadInput, tmp_path / name, *named) as error:
            read(tmp_path / name)
        assert "\n" not in str(error.value)


OPTIONS: dict[str, tuple[type[Options], str, dict[str, Any]]] = {
    "patch": (PatchingOptions, "heads", {}),
    "paths": (PathsOptions, "senders", {"receivers": ["L1H0"]}),
    "ablate": (AblationOptions, "heads", {"pairs": ["ioi"]}),
    "circuit": (CircuitOptions, "heads", {}),
    "spans": (SpansOptions, "heads", {"prompts": "p.jsonl", "steer": 0.1}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_heads_takes_a_text_and_refuses_a_blank_name(name: str) -> None:
    options, field, others = OPTIONS[name]
    for text, names in (("L0H1, L1H3", ["L0H1", "L1H3"]), ("file:a,b.yaml", ["file:a,b.yaml"])):
        assert getattr(options(**{field: text}, **others), field) == names
    for blank in ("", "L0H1,", ["L0H1", ""], []):
        with pytest.raises(ValidationError):
            options(**{field: blank}, **others)


def test_a_list_without_heads_steers_no_head(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "[[a]]w1 w2[[/a]] w3", "continuation": " w4"}')
    (tmp_path / "empty.yaml").write_text("heads: []")
    nothing = HeadSet((), model_digests=hs.load(str(tiny)).identity.weights)
    for heads, named in ((f"file:{tmp_path / 'empty.yaml'}", "no heads"), (nothing, "no head")):
        with refuses(BadInput, named):
            hs.spans(str(tiny), prompts=str(tmp_path / "p.jsonl"), steer=0.1, heads=heads, out=tmp_path, quiet=True)


def import_scores(tiny: Path, tmp_path: Path, **options: Any) -> Run:
    run: Run = hs.import_scores({"base": str(tiny)}, out=tmp_path / "runs", quiet=True, **options)
    return run


def test_an_imported_list_keeps_its_order_and_its_run_names_the_top_heads(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "h.yaml").write_text("attn_head_set: 1-3,1-0,0-2")
    run = import_scores(tiny, tmp_path, file=str(tmp_path / "h.yaml"))
    assert [*parse_heads(f"run:{run.path}:imported:2")] == [(1, 3), (1, 0)]
    (top,) = (result for result in results_of_all_models(run) if result.question == "imported.top_heads")
    assert top.details["top"] == {"L1H3": 3, "L1H0": 2, "L0H2": 1}


def test_a_list_of_the_first_heads_is_no_smaller_model(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "h.yaml").write_text("attn_head_set: 0-1,0-0")
    assert import_scores(tiny, tmp_path, file=str(tmp_path / "h.yaml")).heads["imported"].count() == 2


def test_the_import_command_reads_a_column_and_prints_the_top_heads(tiny: Path, tmp_path: Path, headscope: Any) -> None:
    file = tmp_path / "wide.csv"
    file.write_text("layer,head,a,b\n1,2,5,0.25\n0,1,2,0.75\n")
    options = ("--model", f"base={tiny}", "--file", file, "--column", "b", "--out", tmp_path / "runs")
    code, out, err = headscope("import", *options)
    assert code == 0, err
    assert "L0H1" in out
    assert "RoPE base" not in out
