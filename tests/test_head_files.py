"""One reader of files that name heads: every form gives the same heads in the same order wherever heads are taken."""

import io
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.planted_needle import run_needle_probe, write_needle_files
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import save_checkpoint

import headscope as hs
from headscope import scores
from headscope.base.head_set import HeadSet
from headscope.base.model_identity import WeightDigests
from headscope.errors import BadInput
from headscope.results.collection import results_of_all_models
from headscope.run import Run
from headscope.runs.head_names import format_heads_of_weights, parse_heads, parse_heads_of_weights
from headscope.study.config import Options
from probes.ablation.declaration import AblationOptions
from probes.circuit.declaration import CircuitOptions
from probes.patching.declaration import PatchingOptions
from probes.patching.paths.declaration import PathsOptions
from probes.spans.declaration import SpansOptions
from probes.weights.declaration import WeightsOptions

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
    write_needle_files(folder.parent)
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


def npy(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def csv_text(values: Any) -> str:
    return "\n".join(["layer,head,x", *(f"{layer},{head},{value}" for (layer, head), value in np.ndenumerate(values))])


WHOLE: dict[str, tuple[str, Callable[[Any], str | bytes]]] = {
    "matrix": ("m.json", lambda values: json.dumps(values.tolist())),
    "array": ("m.npy", npy),
    "mask": ("m.npy", lambda values: npy(values == values.max())),
    "CSV": ("m.csv", csv_text),
    "scores by name": ("m.json", lambda values: json.dumps({f"{n}-{h}": v for (n, h), v in np.ndenumerate(values)})),
    "RTP-LLM": ("m.json", lambda values: json.dumps({"headwise_config": dict(enumerate(values.tolist()))})),
}
"""Files with a score for every head of a model, by the values [layers, heads]."""
PROMPT = {"prompt": "w1 w2 w3", "answer": " w4"}


def ablate_within(tiny: Path, heads: Any, **_: Any) -> None:
    with hs.ablated(hs.load(str(tiny)), heads):
        pass


ENTRANCES: dict[str, Callable[..., Any]] = {
    "--heads": lambda tiny, file, **run: hs.ablate({"base": str(tiny)}, heads=f"file:{file}", **PROMPT, **run),
    "heads=": lambda tiny, file, **run: hs.ablate({"base": str(tiny)}, heads=HeadSet.read(file), **PROMPT, **run),
    "ablated": lambda tiny, file, **run: ablate_within(tiny, HeadSet.read(file)),
    "subset": lambda tiny, file, **run: ablate_within(tiny, HeadSet.read(file) & [(0, 0), (1, 1)]),
    "needle": lambda tiny, file, **_: run_needle_probe(
        tiny.parent, {"base": str(tiny)}, heads=str(file), ablate_top=[1], lengths=[60]
    ),
    "import": lambda tiny, file, **run: hs.import_scores({"base": str(tiny)}, file=str(file), **run),
    "budget": lambda tiny, file, **run: hs.budget(
        {"base": str(tiny)}, orders=[f"file:{file}"], lengths=[40], sink=2, recent=4, shares=[0.5], docs=1, **run
    ),
}
"""Everything that takes the heads of a file."""


@pytest.mark.exhaustive(sample=11)
@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("form", WHOLE)
def test_scores_of_all_heads_of_another_shape_fit_no_model(
    form: str, entrance: str, tiny: Path, tmp_path: Path
) -> None:
    name, write = WHOLE[form]
    for layers, heads in ((4, 2), (3, 4), (4, 5)):
        content = write(np.arange(layers * heads).reshape(layers, heads) / 64 + 0.5)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        named = (f"{layers} layers", f"{heads} heads", "4 layers", "4 heads", *(["KV group"] if heads == 2 else []))
        with refuses(BadInput, *named) as error:
            ENTRANCES[entrance](tiny, tmp_path / name, out=tmp_path / "runs", quiet=True)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("entrance", ["--heads", "heads=", "ablated"])
def test_heads_that_name_another_model_give_a_warning(
    entrance: str, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for model, warnings in (("org/tiny", 0), (f"org/other-{entrance}", 1)):
        caplog.clear()
        (tmp_path / "h.yaml").write_text(f"attn_head_set: 0-1\nmodel_name_or_path: {model}")
        with caplog.at_level(logging.WARNING, "headscope"):
            ENTRANCES[entrance](tiny, tmp_path / "h.yaml", out=tmp_path / "runs", quiet=True)
        lines = [line for line in caplog.messages if "org/" in line]
        assert len(lines) == warnings
        for line in lines:
            assert_names(line, f"'{model}'", "tiny")


digests = st.just("") | st.text("0123456789abcdef", min_size=64, max_size=64)
numbers = st.integers(0, 2**15 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
head_sets = st.builds(
    lambda scored, has_weights, **others: HeadSet(
        tuple(scored), tuple(scored.values()) if has_weights else None, **others
    ),
    st.dictionaries(
        st.tuples(numbers, numbers), st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8
    ),
    st.booleans(),
    source=st.text(),
    model=st.text(),
    shape=st.none() | st.tuples(st.integers(2**15, 2**16), st.integers(2**15, 2**16)),
    model_digests=st.builds(WeightDigests, digests, digests, digests),
)


@settings(max_examples=50)
@given(head_sets, st.sampled_from(["h.yaml", "h.json", "h.txt"]))
def test_a_head_set_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, heads: HeadSet, name: str
) -> None:
    file = tmp_path_factory.getbasetemp() / name
    heads.write(file)
    assert HeadSet.read(file) == heads
    assert parse_heads_of_weights(format_heads_of_weights(heads)) == replace(heads, weights=None, source="")


def test_a_head_set_is_not_written_as_a_table(tmp_path: Path) -> None:
    for name in ("h.csv", "h.tsv", "h.npy"):
        with refuses(BadInput, tmp_path / name, ".yaml"):
            HeadSet(((0, 1),)).write(tmp_path / name)


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
        ("h.yaml", "", ("empty",)),
        ("h.yaml", "[]", ("no heads",)),
        ("h.csv", "layer,head,score,score\n0,0,1,2\n", ("'score'", "two columns")),
        ("h.csv", "layer,score\n0,1\n", ("'head'", "layer", "head")),
        ("h.csv", "layer,head,score\n0,1,0,5\n", ("row 1", "more values", "points")),
        ("h.yaml", "heads: [L0H1]\nwieghts: [2]", ("'wieghts'", "weights")),
        ("h.npy", "", ("h.npy",)),
        ("h.json", "[[0, 1], [1, 0]]", ("[0, 1]", "matrix", "L0H1", "[0.0, 1.0]")),
        ("h.yaml", "[[1, 0, 1], [1, 1, 0]]", ("[1, 0, 1]", "matrix", "L1H0", "[1.0, 0.0, 1.0]")),
        ("h.json", "[[0.5, 1.5], [1, 7]]", ("[1, 7]", "matrix", "L1H7", "[1.0, 7.0]")),
        ("h.json", '["all", "L0H1"]', ("'all'", "alone")),
        ("h.json", "[" * 700 + "]" * 700, ("not a head",)),
        ("h.json", "[" * 100_000, ("nested too deeply",)),
        ("h.json", '["L0H1é"]'.encode("latin-1"), ("UTF-8",)),
        ("h.csv", "layer,head\n0,1".encode("utf-16"), ("UTF-8",)),
        ("h.txt", "L0H1".encode("utf-16-le"), ("UTF-8",)),
        ("h.tsv", "layer\thead\n0\t1", ("'layer'", "header", ".csv")),
        ("h.csv", "layer,head\n1_0,1", ("'1_0'",)),
        ("h.yaml", "heads: [L0H1]\nmodel_digests: {sha: abc}", ("'sha'", "bfloat16")),
        ("h.yaml", "heads: [L0H1]\nmodel_digests: [1]", ("[1]", "SHA-256")),
        ("h.yaml", "heads: [L0H1]\nmodel_digest: abc", ("'abc'", "SHA-256")),
        ("h.yaml", "heads: [L0H1]\nshape: [4]", ("[4]", "[30, 9]")),
        ("h.yaml", "heads: [L0H1]\nweights: 0", ("0", "list")),
        ("h.yaml", "heads: [L0H1]\nweights: [.inf]", ("inf", "L0H1")),
    ],
)
def test_files_that_name_no_heads_are_refused_by_every_reader(
    name: str, content: str | bytes, named: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
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


BAD_HEADS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "negative": ([(-1, 0)], ("-1",)),
    "float": ([(0.0, 1)], ("(0.0, 1)",)),
    "boolean": ([(True, 1)], ("True",)),
    "too large": ([(0, 40000)], ("40000",)),
    "triple": ([(0, 1, 2)], ("(0, 1, 2)",)),
    "texts": ([("0", "1")], ("('0', '1')",)),
    "one pair": ((0, 1), ("0 is a number", "[(1, 10)]")),
    "number": ([18.6], ("18.6", "quotes")),
    "bytes": (b"L0H1", ("b'L0H1'",)),
    "all and one": (["all", "L0H1"], ("'all'",)),
    "none": (None, ()),
}
"""Values that are no heads, wherever Python or a study names heads."""


@pytest.mark.parametrize("name", BAD_HEADS)
def test_values_that_are_no_heads_are_refused_everywhere(name: str, tiny: Path) -> None:
    value, named = BAD_HEADS[name]
    for take in (HeadSet, lambda heads: ablate_within(tiny, heads)):
        with refuses(BadInput, *named):
            take(value)
    with pytest.raises(ValueError, match="head") as error:
        HeadSet.parse(value)
    assert_names(str(error.value), *named)
    for options, field, others in (*OPTIONS.values(), (WeightsOptions, "heads", {})):
        with pytest.raises(ValidationError) as invalid:
            options(**{field: value}, **others)
        if isinstance(value, list | tuple):
            assert_names(str(invalid.value), *named)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), "x", True, None])
def test_a_weight_that_is_no_number_is_refused(weight: Any) -> None:
    with refuses(BadInput, "L1H0", repr(weight)):
        HeadSet(((0, 1), (1, 0)), (0.5, weight))


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
