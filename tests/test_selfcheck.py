"""The check of a machine: it agrees where all is right, and disagrees with every measure that is made wrong."""

import json
from typing import Any

import pytest
import torch
from support import families
from support.tiny_studies import save_checkpoint
from torch import Tensor
from typer.testing import CliRunner

import headscope as hs
from headscope.cli import app as cli
from headscope.errors import BadInput
from headscope.forward import selfcheck
from headscope.forward.selfcheck import RULE_CASES, TOLERANCES, run_checks
from headscope.positions.model import Model

LENGTH = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("selfcheck") / "tiny"))


@pytest.fixture(scope="module")
def tiny(folder: str) -> Model:
    return hs.load(folder, device="cpu")


def disagreeing(model: Model) -> list[str]:
    return [check.quantity for check in run_checks(model, torch.arange(LENGTH) % 120) if not check.is_within_tolerance]


def test_every_measure_of_the_real_checkpoint_agrees_in_float32_and_in_bfloat16(smollm2: Model, tokens: Tensor) -> None:
    for model, dtype in ((smollm2, "float32"), (hs.load("smollm2-135m", device="cpu", dtype="bf16"), "bfloat16")):
        told = list(run_checks(model, tokens[0, :LENGTH]))
        assert [check.quantity for check in told] == list(TOLERANCES)
        assert {check.dtype for check in told} == {dtype}
        assert [check for check in told if not check.is_within_tolerance] == []


@pytest.mark.parametrize(
    ("family", "scheme", "said"),
    [
        ("llama-gqa", "yarn:factor=4", "is under yarn:factor=4"),
        *((family, "base", "attends by more than q . k") for family in ("mistral-sliding", "gemma2", "gpt_oss")),
    ],
)
def test_what_the_formulas_are_not_those_of_is_refused(family: str, scheme: str, said: str) -> None:
    model = hs.load((families.SPECS | families.OTHERS)[family].build(), device="cpu").with_scheme(scheme)
    with pytest.raises(BadInput, match=said):
        disagreeing(model)


def made_wrong(measure: Any, by: float) -> Any:
    def wrong(*arguments: Any) -> Any:
        found = measure(*arguments)
        return tuple(each * by for each in found) if isinstance(found, tuple) else found * by

    return wrong


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ("in_blocks", ["log-sum-exp, in blocks"]),
        ("row_statistics", ["rows of attention"]),
        ("moment_sums", ["rotary pairs"]),
        ("row_means", ["rotary pairs"]),
        ("profile_sums", ["distance profile"]),
        ("attend", list(RULE_CASES)),
    ],
)
@pytest.mark.parametrize("by", [1.01, float("nan")])
def test_a_measure_that_is_off_by_one_in_a_hundred_or_no_number_is_found(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, part: str, what: list[str], by: float
) -> None:
    assert disagreeing(tiny) == []
    monkeypatch.setattr(selfcheck, part, made_wrong(getattr(selfcheck, part), by))
    assert disagreeing(tiny) == what


def test_another_loss_than_under_eager_attention_is_found(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "last_hidden_states", made_wrong(selfcheck.last_hidden_states, 1.1))
    assert disagreeing(tiny) == ["loss"]


def test_the_command_ends_with_1_where_something_disagrees(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["selfcheck", "--device", "cpu", "--model", folder, "--length", "40", "--longest", "256"]
    good = CliRunner().invoke(cli.app, [*asked, "--json"])
    assert good.exit_code == 0, good.output
    rows = json.loads(good.output.splitlines()[-1])
    checked, timed = rows[: 2 * len(TOLERANCES)], rows[2 * len(TOLERANCES) :]
    assert {row["result"] for row in checked} == {"agrees"}
    assert [row["check"] for row in checked] == 2 * list(TOLERANCES)
    assert [row["check"] for row in timed] == ["time of measuring, ratio", "memory of measuring, ratio"]
    assert {row["length"] for row in timed} == {256}
    monkeypatch.setattr(selfcheck, "row_statistics", made_wrong(selfcheck.row_statistics, 1.01))
    bad = CliRunner().invoke(cli.app, asked)
    assert bad.exit_code == 1
    assert "DISAGREES" in bad.output
    assert f"torch {torch.__version__.partition('+')[0]}" in bad.output
