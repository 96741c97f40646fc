"""The stub of the package: fresh, complete, and typed, so that editors complete the options of every function."""

import inspect
import re
from pathlib import Path

from mypy import api as mypy_api

import headscope
from headscope import plugins, stub

ROOT = Path(__file__).parents[1]


def test_the_stub_has_the_functions_and_options_of_the_probes() -> None:
    """Run `make docs` after a change of options."""
    text = stub.FILE.read_text(encoding="utf-8")
    assert text == stub.with_probe_functions(text)


def test_the_stub_has_every_name_of_the_package() -> None:
    names = set(re.findall(r"^def (\w+)\(| as (\w+)$", stub.FILE.read_text(encoding="utf-8"), re.MULTILINE))
    assert {function or name for function, name in names} == {*dir(headscope)} - {"__version__"}


def test_mypy_accepts_every_python_block_of_the_docs(tmp_path: Path) -> None:
    """A page is one script; a block may use `run`. transformers types `generate` as no method of its models."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        if code := "\n".join(block for block in blocks if "--8<--" not in block):
            script = tmp_path / f"{'_'.join(page.relative_to(ROOT).with_suffix('').parts).replace('-', '_')}.py"
            script.write_text(f"import headscope as hs\nrun: hs.Run\n{code}")
    assert len([*tmp_path.iterdir()]) > 10
    flags = ["--ignore-missing-imports", "--disable-error-code=operator", "--disable-error-code=no-redef"]
    output, _, _ = mypy_api.run(
        [str(tmp_path), *flags, "--config-file=", "--cache-dir", str(ROOT / ".mypy_cache_docs")]
    )
    assert output.startswith("Success"), output


def test_mypy_reveals_the_types_of_every_function(tmp_path: Path) -> None:
    script = tmp_path / "uses.py"
    lines = ["import headscope as hs", "MODEL = 'smollm2-135m'"]
    for name in plugins.probe_functions():
        takes_model = "model" in inspect.signature(getattr(headscope, name)).parameters
        lines.append(f"reveal_type(hs.{name}({'MODEL' if takes_model else ''}))")
    lines += ["reveal_type(hs.load('smollm2-135m'))", "hs.measure('smollm2-135m', row=3)", "hs.needle(needles='two')"]
    script.write_text("\n".join(lines))
    output, _, _ = mypy_api.run([str(script), "--strict", "--cache-dir", str(ROOT / ".mypy_cache")])
    revealed = re.findall(r'Revealed type is "(.+)"', output)
    assert revealed == ["headscope.runs.run.Run"] * len(plugins.probe_functions()) + ["headscope.positions.model.Model"]
    assert 'Unexpected keyword argument "row" for "measure"' in output
    assert 'Argument "needles" to "needle" has incompatible type "str"' in output
