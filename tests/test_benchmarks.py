"""The developers' benchmarks: what they compare, their bounds, and what they need before they measure."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import families
from support.prompt_pairs import LENGTH, random_pair
from support.refusals import assert_names, refuses
from support.tiny_studies import save_checkpoint
from torch import Tensor
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from typer.testing import CliRunner

import headscope as hs
from benchmarks import __main__ as command
from benchmarks import comparison, lens, rounding, scale, shapes, variants
from headscope.bench import measuring
from headscope.errors import BadInput, ResourceMissing
from headscope.models.loading import load_tokenizer
from headscope.positions.model import Model
from headscope.prompts.texts import TokenDocument
from headscope.study import ray_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(Path(tmp_path_factory.mktemp("bench")) / "tiny"))


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of random tokens: the checkpoint has no real vocabulary."""

    def random_documents(source: str, tokenizer: Any, docs: int, length: int) -> list[TokenDocument]:
        rng = np.random.default_rng(0)
        return [TokenDocument(f"{doc}", rng.integers(3, 120, length).tolist()) for doc in range(docs)]

    monkeypatch.setattr(rounding, "load_token_documents", random_documents)


@pytest.mark.slow
def test_bfloat16_rows_have_ratio_and_error(folder: str) -> None:
    rows = rounding.compare_bfloat16(folder, 64)
    assert [row["table"] for row in rows] == [f"{table} in bfloat16" for table in measuring.TABLES]
    for row in rows:
        assert row["ratio"] > 0
        assert 1e-5 < row["error"] < 0.5
        assert row["error_over_sampling"] > 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_error_is_relative_to_the_standard_error_over_documents(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With synthetic columns: an exact statistic, one with a 10 % error, a key, a frequency and a standard error."""
    document_sums: list[float] = []

    def synthetic_columns(model: Model, ids: Tensor, tables: list[str], rows: int) -> dict[str, dict[str, Any]]:
        document_sum = float(ids.sum())
        if document_sum not in document_sums:
            document_sums.append(document_sum)
        document = document_sums.index(document_sum)
        is_bfloat16 = model.module.dtype.itemsize == 2
        value = np.array([1.0, 2.0]) + [0.0, 0.2, 0.4, 0.6][document]
        columns = {
            "layer": np.array([0, 1]),
            "theta": np.array([1.0, 2.0 + is_bfloat16]),
            "mean_abs_se": np.array([0.1, 0.1 + is_bfloat16]),
            "exact": value,
            "off": value * (1.1 if is_bfloat16 else 1.0),
        }
        return dict.fromkeys(tables, columns)

    monkeypatch.setattr(rounding, "measure_tokens", synthetic_columns)
    rows = rounding.compare_bfloat16(folder, 64)
    means, standard_error = np.array([1.3, 2.3]), np.std([0.0, 0.2, 0.4, 0.6], ddof=1) / 2
    for row in rows:
        assert row["error"] == 0.05  # the median of 0, 0, 0.1 and 0.1
        expected = 0.1 * np.sqrt((means**2).mean()) / standard_error
        assert row["error_over_sampling"] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("worst", "relation"), [(0.08, "smaller"), (3.0, "larger")])
def test_bfloat16_is_timed_only_on_cpus_that_compute_in_it(
    monkeypatch: pytest.MonkeyPatch, worst: float, relation: str
) -> None:
    row = {"table": "nll in bfloat16", "ratio": 0.45, "error": 0.002, "error_over_sampling": worst}
    monkeypatch.setattr(rounding, "compare_bfloat16", lambda *_: [row])
    monkeypatch.setattr(rounding, "has_bfloat16", lambda: True)
    output = CliRunner().invoke(command.app, ["bfloat16"]).output
    assert {"bfloat16", f"{worst:g}", relation} <= {*output.split()}
    rows = json.loads(CliRunner().invoke(command.app, ["bfloat16", "--json"]).output.splitlines()[-1])["rows"]
    assert rows == [row]
    monkeypatch.setattr(rounding, "has_bfloat16", lambda: False)
    with refuses(BadInput, "CPU", "bfloat16"):
        command.bfloat16()


def test_measuring_has_bounds_and_the_ratios_of_an_earlier_bench(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        {"length": 4096, "what": measuring.PLAIN, "ratio": 1.0},
        {"length": 4096, "what": measuring.EXACT_STATISTICS, "ratio": 1.321},
    ]
    monkeypatch.setattr(command, "load", lambda *_, **__: None)
    monkeypatch.setattr(command, "document_tokens", lambda *_: None)
    monkeypatch.setattr(command, "time_measuring", lambda *_: rows)
    earlier = tmp_path / "earlier.json"
    earlier.write_text(CliRunner().invoke(command.app, ["measuring", "--device", "cpu", "--json"]).output)
    rows[1]["ratio"] = 1.212
    output = CliRunner().invoke(command.app, ["measuring", "--device", "cpu", "--compare", str(earlier)]).output
    assert json.loads(earlier.read_text().splitlines()[-1])["date"] in output
    assert {"1.212", "1.25", "1.321"} <= {*output.split()}


def test_the_comparison_looks_for_transformer_lens_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_lens.model_bridge", None)
    monkeypatch.setattr(variants, "load", lambda spec, **_: pytest.fail("a model was opened"))
    with refuses(ResourceMissing, "pip install 'headscope[lens]'"):
        next(variants.compare_lens(folder, 64, 1))


def test_bench_of_engines_looks_for_ray_before_it_measures(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setattr(variants, "run_study", lambda *_, **__: pytest.fail("a study was run"))
    monkeypatch.setattr(ray_engine.importlib.util, "find_spec", lambda name: None)
    with refuses(ResourceMissing, "pip install 'headscope[ray]'"):
        variants.compare_engines(folder, 64)


@pytest.mark.slow
def test_bench_patches_the_same_layers_in_transformer_lens_and_in_headscope() -> None:
    """Both sides return the same metrics, so their times are of the same work."""
    model, other = (hs.load(families.MEASURABLE["llama-gqa"]()) for _ in range(2))
    bridge = build_bridge_from_module(other.module, type(other.module).__name__, hf_config=other.module.config)
    theirs, ours = (call() for call in lens.layer_patching_calls(model, bridge, random_pair()).values())
    assert len(ours) == 3 * lens.PATCHED_LAYERS * LENGTH
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert np.ptp(ours) > 1e-2


def test_rows_are_printed_that_were_measured_before_a_later_table_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {"what": measuring.PLAIN, "ratio": 1.0}

    def compare_lens(*_: Any) -> Any:
        yield [row]
        raise BadInput("no memory is left")

    monkeypatch.setattr(variants, "compare_lens", compare_lens)
    result = CliRunner().invoke(command.app, ["lens", "--json"])
    assert isinstance(result.exception, BadInput)
    assert json.loads(result.stdout.splitlines()[-1])["rows"] == [row]


@pytest.mark.parametrize("content", [None, "", "[1]", '{"rows": 5, "date": 1, "machine": 2}'])
def test_other_files_are_no_earlier_bench(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "earlier.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "measuring", "--compare", str(file)])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert_names(str(stopped.value), "--json", f"'{file}'")
    assert "\n" not in str(stopped.value)
    assert capsys.readouterr().out == ""


def test_bench_of_scale_shows_ratios_at_twice_the_size_with_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(step: str, size: int, _: Path) -> dict[str, float]:
        return {"seconds": size / 10, "megabytes": 100.0}

    monkeypatch.setattr(scale, "_run_step", measure)
    rows = [row for table in scale.compare_growth() for row in table]
    assert [row["step"] for row in rows] == [*scale.STEPS]
    assert {(row["time_ratio"], row["memory_ratio"]) for row in rows} == {(2.0, 1.0)}
    assert {(row["time_bound"], row["memory_bound"]) for row in rows} == {(2.3, 1.2)}
    assert "rows of a head" in CliRunner().invoke(command.app, ["scale"]).output


def test_a_step_of_the_bench_of_scale_measures_itself(tmp_path: Path) -> None:
    clock = scale.Clock()
    scale.STEPS["list of runs"](3, tmp_path, clock)
    assert clock.measured["seconds"] > 0
    assert clock.measured["megabytes"] >= 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_steps_of_the_bench_of_scale_share_a_folder_and_measure_their_own_memory(tmp_path: Path) -> None:
    """A process that measures begins with a larger parent, whose memory must not count."""
    ballast = np.ones(100_000_000)
    steps = [scale._run_step(step, 1, tmp_path) for step in ("report", "first head page")]
    assert all(0 < step["megabytes"] < ballast.nbytes / 1e6 for step in steps)


SMALL_SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 300,
}


@pytest.mark.slow
def test_a_shape_needs_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "tiny": SMALL_SHAPE})
    monkeypatch.setattr(command, "load", lambda *_, **__: pytest.fail("a checkpoint was opened"))
    arguments = ["measuring", "--shape", "tiny", "--length", "64", "--repeats", "1", "--device", "cpu"]
    words = " ".join(CliRunner().invoke(command.app, arguments).output.split())
    assert all(word in words for word in ("plain", "sampled", "exact", "ratio", "peak MiB"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["measuring", "--shape", "llama-9b"], ("'llama-9b'", "llama-8b", "smollm2-135m")),
        (["measuring", "--shape", "llama-8b", "--model", "other"], ("--shape", "--model")),
        (["measuring", "--device", "tpu"], ("device", "'tpu'")),
        (["probe", "nothing", "14"], ("'nothing'", "patching")),
    ],
)
def test_unknown_shapes_devices_and_probes_are_refused(
    arguments: list[str], named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert_names(str(stopped.value), *named)


def test_a_gpu_has_bounds_of_its_own() -> None:
    rows = [{"what": measuring.EXACT_STATISTICS, "length": length} for length in (4096, 8192)]
    assert [row.get("bound") for row in comparison.add_bounds(rows)] == [1.25, None]
    assert [row.get("bound") for row in comparison.add_bounds(rows, True, "llama-8b")] == [None, 1.4]
    assert [row.get("bound") for row in comparison.add_bounds(rows, True)] == [None, None], "of another model"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_all_estimates_and_some_exact_patches_are_timed_with_their_bounds() -> None:
    model = hs.load(families.build("llama", {"vocab_size": 49152}), tokenizer=load_tokenizer("smollm2-135m"))
    rows = variants.time_probe("patching", model, 24)
    plain, estimate, exact, layers = (row["what"] for row in rows)
    assert plain == "plain forward with logits"
    assert estimate.endswith("all heads estimated (bound: 5)")
    assert exact.endswith("12 heads patched exactly, 3 evenly spaced layers (bound: 7.2)")
    assert layers.endswith("3 layers, resid_pre, attn_out, mlp_out patched exactly (bound: 9)")
    assert all(row["ratio"] > 0 for row in rows)


@pytest.mark.exhaustive(sample=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*variants.PROBES} - {"patching", "pretrain", "needle"}))
def test_a_probe_is_timed_beside_plain_passes(name: str) -> None:
    """Training and a grid of needles take longer, and patching has a test of its own."""
    model = hs.load(families.build("llama", {"vocab_size": 49152}), tokenizer=load_tokenizer("smollm2-135m"))
    rows = variants.time_probe(name, model, 96)
    assert len(rows) > 1
    assert rows[0]["ratio"] == 1
