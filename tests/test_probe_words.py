"""Probes yield results and format nothing: numbers, intervals, percentages and p-values are worded in one place."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source_tree import ROOT

from headscope.results.questions import questions
from headscope.results.words import fill

PROBE_FILES = sorted((ROOT / "probes").rglob("*.py"))
RESULT_FILES = [
    file for file in PROBE_FILES if re.search(r"\bResult\(|import .*\bResult\b", file.read_text(encoding="utf-8"))
]
"""Files that create results."""
WORDED = re.compile(r"interval (of )?\{|\b[pq] = \{|confidence interval [0-9+-]")
"""A sentence with an interval or a p-value."""


def formatted_numbers(tree: ast.AST) -> Iterator[str]:
    """Numbers with decimals or per cent in f-strings, `format` and %-formatting."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            spec = "".join(str(part.value) for part in ast.walk(node.format_spec) if isinstance(part, ast.Constant))
            if re.search(r"\.\d|[efg%]$", spec):
                yield f"line {node.lineno}: {spec}"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("format", "format_percent", "percent"):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_files_with_results_were_found() -> None:
    assert {"measure", "needle", "influence", "patching"} <= {file.parent.name for file in RESULT_FILES}


@pytest.mark.parametrize("file", RESULT_FILES, ids=lambda file: str(file.relative_to(ROOT / "probes")))
def test_no_file_of_results_formats_a_number(file: Path) -> None:
    assert [*formatted_numbers(ast.parse(file.read_text(encoding="utf-8")))] == []


@pytest.mark.parametrize("file", PROBE_FILES, ids=lambda file: str(file.relative_to(ROOT / "probes")))
def test_no_probe_words_an_interval_or_a_p_value(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    texts = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    assert [text for text in texts if WORDED.search(text)] == []


@pytest.mark.parametrize("name", ["-3:", "3:7", ":5", "-1", "3", "last", "answer"])
def test_sentences_describe_positions_by_number_in_words(name: str) -> None:
    described = fill("at {span:positions}: x", {"span": name})
    assert (described == f"at {name}: x") == (name in ("last", "answer"))
    assert "::" not in described
    templates = [text for question in questions().values() for text in (question.sentence, question.headline)]
    assert not [text for text in templates if "{span}" in text]
