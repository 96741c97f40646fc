"""The selfcheck finds no difference on a correct machine, and reports every measure that is wrong."""

import importlib
import itertools
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import families
from support.kernels import interpreting
from support.refusals import refuses
from support.tiny_studies import save_checkpoint
from torch import Tensor
from typer.testing import CliRunner

import headscope as hs
from headscope.attention.kernel import AttentionVariant
from headscope.attention.kernels import runtime
from headscope.bench.precision import precision_differences
from headscope.cli import app as cli
from headscope.errors import BadInput
from headscope.forward import selfcheck
from headscope.forward.selfcheck import TOLERANCES, VARIANT_CASES, run_checks
from headscope.positions.model import Model
from headscope.study import progress

LENGTH = 40

CPU_CHECKS = [name for name in TOLERANCES if not name.endswith("kernel")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("selfcheck") / "tiny"))


@pytest.fixture(scope="module")
def tiny(folder: str) -> Model:
    return hs.load(folder, device="cpu")


def failed_checks(model: Model) -> list[str]:
    return [check.quantity for check in run_checks(model, torch.arange(LENGTH) % 120) if not check.is_within_tolerance]


@pytest.mark.slow
def test_every_measure_of_the_real_checkpoint_agrees_in_float32_and_in_bfloat16(smollm2: Model, tokens: Tensor) -> None:
    for model, dtype in ((smollm2, "float32"), (hs.load("smollm2-135m", device="cpu", dtype="bf16"), "bfloat16")):
        checks = list(run_checks(model, tokens[0, :LENGTH]))
        assert [check.quantity for check in checks] == CPU_CHECKS
        assert {check.dtype for check in checks} == {dtype}
        assert [check for check in checks if not check.is_within_tolerance] == []


@pytest.mark.parametrize(
    ("family", "scheme", "named"),
    [
        ("llama-gqa", "yarn:factor=4", "'yarn:factor=4'"),
        *((family, "base", "selfcheck") for family in ("mistral-sliding", "gemma2", "gpt_oss")),
    ],
)
def test_models_that_the_formulas_do_not_cover_are_refused(family: str, scheme: str, named: str) -> None:
    model = hs.load((families.SPECS | families.OTHERS)[family].build(), device="cpu").with_scheme(scheme)
    with refuses(BadInput, f"'{model.name}'", named):
        failed_checks(model)


def scaled(measure: Any, factor: float) -> Any:
    """The measure with all its results multiplied by a factor."""

    def scaled_measure(*arguments: Any) -> Any:
        result = measure(*arguments)
        return tuple(part * factor for part in result) if isinstance(result, tuple) else result * factor

    return scaled_measure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "quantities"),
    [
        ("blockwise_attention", ["log-sum-exp, blockwise"]),
        ("row_statistics", ["row statistics"]),
        ("pair_moment_sums", ["rotary pairs"]),
        ("mean_abs_by_row", ["rotary pairs"]),
        ("profile_sums", ["distance profile"]),
        ("add_block_sums", ["pooled maps"]),
        ("attend", list(VARIANT_CASES)),
    ],
)
@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_measure_that_is_one_percent_off_or_nan_fails_its_check(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, function: str, quantities: list[str], factor: float
) -> None:
    assert failed_checks(tiny) == []
    monkeypatch.setattr(selfcheck, function, scaled(getattr(selfcheck, function), factor))
    assert failed_checks(tiny) == quantities


def test_a_loss_that_differs_from_eager_attention_fails_its_check(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "last_hidden_states", scaled(selfcheck.last_hidden_states, 1.1))
    assert failed_checks(tiny) == ["loss"]


@pytest.mark.slow
def test_the_command_exits_with_1_if_a_check_fails(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["selfcheck", "--device", "cpu", "--model", folder, "--length", "40", "--longest", "256"]
    elapsed = itertools.count(step=11.0)  # seconds: progress has a line for every step
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(elapsed)))
    good = CliRunner().invoke(cli.app, [*arguments, "--json"])
    assert good.exit_code == 0, good.output
    steps = [line.partition("%  ")[2] for line in good.stderr.splitlines()]
    for compared_with in (("bf16", "eager"), ("fp32", "eager"), ("bf16", "fp32")):
        assert any(all(word in step for word in compared_with) for step in steps), compared_with
    assert "Ctrl-C" not in good.stderr
    rows = json.loads(good.output.splitlines()[-1])
    checked, compared, timed = rows[: 2 * len(CPU_CHECKS)], rows[2 * len(CPU_CHECKS) : -2], rows[-2:]
    assert {row["result"] for row in checked} == {"agrees"}
    assert [row["check"] for row in checked] == 2 * CPU_CHECKS
    assert [row["check"] for row in timed] == ["time of measuring, ratio", "memory of measuring, ratio"]
    assert {row["length"] for row in timed} == {256}
    assert compared == []  # heads do not differ on a text of one token
    monkeypatch.setattr(selfcheck, "row_statistics", scaled(selfcheck.row_statistics, 1.01))
    bad = CliRunner().invoke(cli.app, arguments)
    assert bad.exit_code == 1
    assert "DISAGREES" in bad.output
    assert f"torch {torch.__version__.partition('+')[0]}" in bad.output


@pytest.mark.slow
def test_kernels_are_checked_where_they_run(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here in Triton's interpreter; an error of one percent fails them."""
    monkeypatch.setattr(selfcheck, "RANDOM_KEY_COUNT", 20)
    monkeypatch.setattr(selfcheck, "RANDOM_QUERY_COUNTS", (9,))
    monkeypatch.setattr(
        selfcheck, "VARIANT_CASES", {name: VARIANT_CASES[name] for name in ("soft cap", "learned sink")}
    )
    ids = torch.randint(3, 100, (12,), generator=torch.Generator().manual_seed(0))
    for function in ("pair_moments.pair_moments", "distance_sums.distance_sums", "pooled_map.add_pooled_map"):
        module, name = function.split(".")
        kernel = getattr(importlib.import_module(f"headscope.attention.kernels.{module}"), name)
        monkeypatch.setattr(f"headscope.attention.kernels.{function}", scaled(kernel, 1.01))
    with interpreting():
        results = {result.quantity: result for result in selfcheck.run_checks(tiny, ids)}
    failed = [name for name, result in results.items() if not result.is_within_tolerance]
    assert failed == ["rotary pairs, kernel", "distance profile, kernel", "pooled maps, kernel"]
    assert "row statistics, kernel" in results


@pytest.mark.slow
def test_every_kernel_agrees_with_the_formulas_in_float32(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: maps in blocks of several tiles and of one, in full passes and after cached keys."""
    monkeypatch.setattr(selfcheck, "RANDOM_KEY_COUNT", 90)
    monkeypatch.setattr(selfcheck, "RANDOM_QUERY_COUNTS", (90, 9, 1))
    cases = {"chunked attention": AttentionVariant(1.0, chunk_size=64), "soft cap": VARIANT_CASES["soft cap"]}
    monkeypatch.setattr(selfcheck, "VARIANT_CASES", cases)
    monkeypatch.setattr(selfcheck, "MAP_BLOCK_SIZES", (20, 70))
    with interpreting():
        results = {result.quantity: result for result in selfcheck.run_checks(tiny, torch.arange(12) % 7 + 3)}
    kernels = [name for name in TOLERANCES if name.endswith("kernel")]
    assert [name for name in kernels if name in results] == kernels
    assert [name for name, result in results.items() if not result.is_within_tolerance] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "quantity"),
    [
        ("row_sums.row_sums", "row statistics"),
        ("pair_moments.pair_moments", "rotary pairs"),
        ("pair_products.mean_abs_products", "rotary pairs"),
        ("distance_sums.distance_sums", "distance profile"),
        ("pooled_map.add_pooled_map", "pooled maps"),
    ],
)
def test_a_kernel_that_does_not_compile_fails_its_check(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, kernel: str, quantity: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(selfcheck, "VARIANT_CASES", {})
    monkeypatch.setattr(f"headscope.attention.kernels.{kernel}", fail)
    with interpreting(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "_replace", lambda *_: None)
        results = {result.quantity: result for result in selfcheck.run_checks(tiny, torch.arange(12) % 7 + 3)}
    failed = [name for name, result in results.items() if not result.is_within_tolerance]
    assert failed == [f"{quantity}, kernel"]
    assert results[failed[0]].difference == float("inf")


@pytest.mark.slow
def test_without_triton_the_torch_code_is_checked(folder: str) -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import headscope as hs, torch; from headscope.forward.selfcheck import run_checks\n"
        f"checks = run_checks(hs.load({folder!r}, device='cpu'), torch.arange({LENGTH}))\n"
        "print([check.quantity for check in checks if check.is_within_tolerance])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == str(CPU_CHECKS), result.stderr[-2000:]


@pytest.mark.slow
def test_differences_between_bf16_and_fp32_are_those_of_two_runs(smollm2: Model) -> None:
    half = hs.load("smollm2-135m", device="cpu", dtype="bf16")
    differences = precision_differences(half, smollm2, 64).set_index("statistic")
    heads = [
        hs.measure(model, lengths=[64], docs=1, tables=["attention"], quiet=True).heads for model in (half, smollm2)
    ]
    relative = ((heads[0].sink_mass - heads[1].sink_mass) / heads[1].sink_mass).abs()
    assert differences.loc["sink mass", "median"] == relative.median()
    assert 0 < relative.median() < relative.quantile(0.95) == differences.loc["sink mass", "largest"]
    assert differences.rank_correlation.between(0.99, 1, inclusive="left").all()
