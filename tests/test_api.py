"""The Python interface refuses values of the wrong type with BadInput, in one line, before anything is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.refusals import assert_names
from support.tiny_studies import save_checkpoint

import headscope as hs
from headscope.base import plugins
from headscope.errors import BadInput

CALLS: dict[str, tuple[tuple[object, ...], Callable[[Any], Any]]] = {
    "no-model": (("measure", None), lambda tiny: hs.measure(None)),
    "no-model-to-adapt": (("adapt", None), lambda tiny: hs.adapt(None)),
    "no-model-of-a-label": (("'NoneType'",), lambda tiny: hs.measure({"base": None})),
    "number-as-model": (("'int'",), lambda tiny: hs.measure(5)),
    "no-models": (("--model base=smollm2-135m",), lambda tiny: hs.measure({})),
    "number-as-label": (("model name 5", "text"), lambda tiny: hs.measure({5: tiny})),
    "no-out": (("out", None), lambda tiny: hs.measure(tiny, out=None)),
    "number-as-out": (("out", 5), lambda tiny: hs.measure(tiny, out=5)),
    "number-as-study": (("content=5", "path"), lambda tiny: hs.run_study(5)),
    "no-study": (("content=None", "path"), lambda tiny: hs.run_study(None)),
    "study-out": (("out", 5), lambda tiny: hs.run_study({"models": {"a": tiny}, "measure": {}}, 5)),
    "text-as-resume": (("resume", True, False, "'x'"), lambda tiny: hs.measure(tiny, resume="x")),
    "number-as-quiet": (("quiet", True, False, 1), lambda tiny: hs.measure(tiny, quiet=1)),
    "number-as-run": (("path=5",), lambda tiny: hs.Run.open(5)),
    "no-run": (("path=None",), lambda tiny: hs.Run.open(None)),
    "load-number": (("'int'",), lambda tiny: hs.load(5)),
    "load-none": (("'NoneType'",), lambda tiny: hs.load(None)),
    "load-list": (("'list'",), lambda tiny: hs.load([tiny])),
    "in-memory-dtype": (
        ("torch.float32", "bf16"),
        lambda tiny: hs.measure(hs.load(tiny, device="cpu"), dtype="bf16"),
    ),
    "in-memory-device": (
        ("'cuda:99'",),
        lambda tiny: hs.measure(hs.load(tiny, device="cpu").module, device="cuda:99"),
    ),
    "no-device": (("device=None",), lambda tiny: hs.load(tiny, device=None)),
    "no-dtype": (("dtype=None",), lambda tiny: hs.load(tiny, device="cpu", dtype=None)),
    "number-as-text": (("texts.source", "string", 5), lambda tiny: hs.measure(tiny, text=5)),
    "number-as-name": (("name", "string", 5), lambda tiny: hs.measure(tiny, name=5)),
    "number-as-engine": (("engine", "mapping", 5), lambda tiny: hs.measure(tiny, engine=5)),
    "text-as-docs": (("texts.docs", "integer", "'x'"), lambda tiny: hs.measure(tiny, docs="x")),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_value_of_the_wrong_type_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, call = CALLS[name]
    monkeypatch.chdir(tmp_path)
    tiny = str(save_checkpoint(tmp_path / "tiny"))
    with pytest.raises(BadInput) as refused:
        call(tiny)
    assert_names(str(refused.value), *named)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_an_unknown_option_of_a_function_names_the_similar_one() -> None:
    with pytest.raises(TypeError, match=r"'length'.*'lengths'"):
        hs.measure("smollm2-135m", length=[64])


def test_dir_lists_the_public_interface_only() -> None:
    public = {*hs.__all__, "__version__", *(probe.function_name for probe in plugins.requestable_probes().values())}
    assert {*dir(hs)} == public
    assert all(getattr(hs, name).__doc__ for name in public)
