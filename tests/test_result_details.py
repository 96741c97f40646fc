"""The names in templates of questions and the keys of `Result.details` agree, in every probe."""

import ast
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headscope
from headscope.base import plugins
from headscope.results.questions import SHARED_QUESTIONS, Question, QuestionParts
from headscope.results.result import Bound, Result
from headscope.results.words import REASONS, _places

RESULT_PLACES = {*_places(Result(question="q", bound=Bound("above")), Question(name="q", sentence=""), False), "values"}
"""Places that every result fills."""
RESULTS = Path(headscope.__file__).parent / "results"
QUESTIONS = {type(probe).__module__: questions for probe, questions in plugins.call_parts(QuestionParts.questions)}


def place_names(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template.translate({91: None, 93: None})) if name}


def named(question: Question) -> set[str]:
    templates = (question.sentence, question.headline, question.answer, question.statement, question.criterion)
    return set().union(*map(place_names, templates)) - RESULT_PLACES


def nodes(*folders: Path) -> list[ast.AST]:
    files = (file for folder in folders for file in folder.rglob("*.py"))
    return [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]


def is_details(node: ast.AST) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")) == "details"


def keys_of_details(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """The literal keys of details at this node, and whether code reads them."""
    details: ast.AST | None = None
    if isinstance(node, ast.Subscript) and is_details(node.value) and isinstance(node.slice, ast.Constant):
        yield str(node.slice.value), isinstance(node.ctx, ast.Load)
    elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and is_details(node.comparators[0]):
        yield str(node.left.value), True
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        details = node.value if any(map(is_details, targets)) else None
    elif isinstance(node, ast.keyword) and node.arg == "details":
        details = node.value
    for part in ast.walk(details) if details else ():
        if isinstance(part, ast.Dict):
            yield from ((str(key.value), False) for key in part.keys if isinstance(key, ast.Constant))


def names_in_code(some_nodes: list[ast.AST]) -> set[str]:
    """Constants and keywords, and those that begin or end like a text such as f"{name}_low"."""
    names = {str(node.value) for node in some_nodes if isinstance(node, ast.Constant)}
    names |= {str(node.arg) for node in some_nodes if isinstance(node, ast.keyword)}
    words = {name for name in names if name.isidentifier()}
    for node in some_nodes:
        if isinstance(node, ast.JoinedStr) and len(node.values) == 2:
            start, end = ({part.value} if isinstance(part, ast.Constant) else words for part in node.values)
            names |= {f"{first}{last}" for first in start for last in end} if start is not end else set()
    return names


SHARED_NODES = nodes(RESULTS)


@pytest.mark.parametrize("package", QUESTIONS)
def test_names_in_templates_and_keys_of_details_agree(package: str) -> None:
    own_nodes = nodes(Path(str(sys.modules[package].__file__)).parent)
    places = set().union(*map(named, QUESTIONS[package]))
    names = names_in_code([*own_nodes, *SHARED_NODES])
    assert places - names == set(), "a template names a detail that no code gives"
    own_keys, shared_keys = (
        [key for node in some_nodes for key in keys_of_details(node)] for some_nodes in (own_nodes, SHARED_NODES)
    )
    read = {key for key, is_read in (*own_keys, *shared_keys) if is_read}
    reasons = set().union(*map(place_names, REASONS.values()))
    unnamed = {key for key, _ in own_keys} - places - read - reasons - set().union(*map(named, SHARED_QUESTIONS))
    assert unnamed == set(), "code gives a detail that no template names"


def test_details_of_shared_results_are_named_by_a_question() -> None:
    keys = [key for node in SHARED_NODES for key in keys_of_details(node)]
    places = set().union(*map(named, (*SHARED_QUESTIONS, *(item for own in QUESTIONS.values() for item in own))))
    assert {key for key, _ in keys} - places - {key for key, is_read in keys if is_read} == set()
