"""A mistake in options carries the path of the option, and is worded for a study file or for flags."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from headscope.errors import BadOption, OptionError, OptionName
from headscope.study.config import build_study, read_study


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"needle": {"needles": 0}}, ("needle", "needles")),
        ({"measure": {"lengths": [64, "x"]}}, ("measure", "lengths", 1)),
        ({"adapt": {"start": "base", "adapter": "x"}}, ("adapt",)),
        ({"texts": {"docs": 0}}, ("texts", "docs")),
        ({"seed": -1}, ("seed",)),
    ],
)
def test_a_mistake_carries_the_path_of_its_option(options: dict[str, Any], path: tuple[str | int, ...]) -> None:
    with pytest.raises(BadOption) as caught:
        build_study({"measure": {}} | options)
    assert caught.value.path == path
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_options_that_exclude_each_other_are_named_by_key_or_flag() -> None:
    with pytest.raises(BadOption) as caught:
        build_study({"adapt": {"start": "base", "factor": 8}})
    error = caught.value
    assert str(error).startswith("study: adapt: 'factor' and 'start' cannot be combined: 'factor' is for")
    described = error.describe("--{}".format, "")
    assert described.startswith("--factor and --start cannot be combined: --factor is for the default start.")


def test_a_value_with_braces_or_the_name_of_an_option_is_left_as_it_is() -> None:
    error = OptionError("{rows} cannot be {value}, unlike {other}", value="{rows} 'rows'", other=OptionName("keys"))
    assert str(error) == "'rows' cannot be {rows} 'rows', unlike 'keys'"
    assert error.describe("--{}".format) == "--rows cannot be {rows} 'rows', unlike --keys"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--start", "base", "--factor", "8"], "--factor and --start cannot be combined: "),
        (["--phases", "x"], "--phases: invalid phase 'x'."),
        (["--docs", "0"], "--docs must be an integer from 1 to 1000000: '0'. Use e.g. 1"),
        (["--workers", "2"], "--workers needs --engine ray, not plain. Change --engine, or remove --workers"),
    ],
)
def test_a_command_names_flags(flags: list[str], expected: str, headscope: Any) -> None:
    code, out, err = headscope("adapt", "--model", "none", *flags)
    assert (code, out) == (2, "")
    assert expected in err


def test_beside_a_study_file_only_typed_flags_are_named_so(tmp_path: Path, headscope: Any) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("adapt: {start: base}\nmodels: {base: none}")
    with pytest.raises(BadOption) as caught:
        read_study(file, {"adapt": {"factor": 8}})
    assert caught.value.source == f"study file '{file}'"
    code, _, err = headscope("adapt", "--config", file, "--factor", "8")
    assert code == 2
    assert f"study file '{file}': adapt: --factor and 'start' cannot be combined: --factor is for" in err
