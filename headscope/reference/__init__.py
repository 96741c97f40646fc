"""Writes the generated pages of the documentation from the declarations of commands, tables, statistics and terms.

docs/reference.md and docs/glossary.md are written as a whole. docs/measures.md, docs/api.md and docs/plugin-api.md are
written by hand; this module fills in tables of columns, signatures and docstrings. Run it
with: python -m headscope.reference
"""

import dataclasses
import inspect
import re
import textwrap
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

import headscope
from headscope.api import SHARED_KEYWORDS, keyword_fields, shared_keywords
from headscope.base import plugins
from headscope.base.declaration import Declaration
from headscope.cli.app import app
from headscope.cli.command_groups import ProbeCommand
from headscope.cli.flags import TYPE_NAMES
from headscope.cli.probe_commands import choices
from headscope.reference.api_pages import fill_page
from headscope.rendering.blocks import Term
from headscope.rendering.view_parts import ViewParts
from headscope.results.questions import QuestionParts
from headscope.runs.column_metadata import capitalise, roles, statistics
from headscope.runs.columns import all_tables
from headscope.study.answer_options import ACCEPTS_FUNCTION, ACCEPTS_POSITIONS
from headscope.study.config import OptionParts

STUB = Path(__file__).parents[1] / "__init__.pyi"
MARK = "# The functions of the probes, written by `make docs` from their options.\n"

SHARED_TYPES = {
    "text": "str | Path | Sequence[str]",
    "docs": "int",
    "seed": "int",
    "out": "str | Path",
    "name": "str",
    "device": "str",
    "dtype": "str",
    "bos": 'Literal["auto", "yes", "no"]',
    "engine": "str | Mapping[str, Any]",
    "resume": "bool",
    "quiet": "bool",
}


def add_probe_functions(stub: str) -> str:
    """Replace the functions below MARK with those of the installed probes."""
    functions = "\n".join(
        line for probe, options in plugins.call_parts(OptionParts.options) for line in _function(probe, options)
    )
    return f"{stub.partition(MARK)[0]}{MARK}\n{functions}\n"


def _function(probe: Declaration, options: type[BaseModel]) -> Iterator[str]:
    yield f"def {probe.function_name}("
    if {"models", "model"} & {*probe.takes}:
        yield "    model: ModelSource | Mapping[str, ModelSource],"
    yield "    *,"
    for name, default in shared_keywords(probe).items():
        yield f"    {name}: {SHARED_TYPES[name]} = {_literal(default)},"
    for name, field in keyword_fields(options).items():
        default = field.get_default(call_default_factory=True)
        kind = " | MetricFunction" if ACCEPTS_FUNCTION in field.metadata else ""
        kind += " | Positions" if ACCEPTS_POSITIONS in field.metadata else ""
        yield f"    {name}: {_type(field.annotation)}{kind} = {_literal(default)},"
    yield ") -> Run:"
    summary = textwrap.fill(probe.summary, 112, subsequent_indent="    ")
    yield f'    """{summary}"""\n'


def _literal(default: Any) -> str:
    """The default as a stub can state it: plain values, not lists."""
    if isinstance(default, str):
        return f'"{default}"'
    return repr(default) if default is None or isinstance(default, bool | int | float) else "..."


def _type(annotation: Any) -> str:
    """The type of an option as Python source; a list may be any sequence."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return f"Literal[{', '.join(_literal(value) for value in arguments)}]"
    if origin in (Union, types.UnionType):
        return " | ".join(map(_type, arguments))
    if origin in (list, tuple):
        return f"Sequence[{_type(arguments[0])}]"
    if origin is dict:
        return f"Mapping[{_type(arguments[0])}, {_type(arguments[1])}]"
    if annotation is type(None):
        return "None"
    if annotation is Any:
        return "Any"
    return "Mapping[str, Any]" if issubclass(annotation, BaseModel) else str(annotation.__name__)


DOCS = Path(__file__).parents[2] / "docs"
FILE = DOCS / "reference.md"
GLOSSARY_FILE = DOCS / "glossary.md"
MEASURES_FILE = DOCS / "measures.md"
CODE_FILES = (DOCS / "api.md", DOCS / "plugin-api.md", DOCS / "tutorials" / "your-own-probe.md")
COLUMNS_BLOCK = re.compile(r"(<!-- columns: (.+?) -->\n).*?(<!-- end of columns -->)", re.DOTALL)
"""A generated table in docs/measures.md, between comments; the first names its statistics."""
FLAG = re.compile(r"--([a-z][a-z-]*)")
"""A flag in the description of an option."""
INPUTS = ("text", "docs")
"""Keywords of SHARED_KEYWORDS that not all probes take: those in the heading of the function do."""
VOCABULARY = (
    Term(
        "Attention record",
        "What one layer computed for one sequence: queries, keys, values, head outputs and the logarithm of each row's "
        "softmax denominator. Listeners receive it; it is not stored.",
    ),
    Term(
        "Checkpoint and model",
        "A checkpoint is weights and a configuration. A model is a labelled checkpoint under a position scheme: the "
        "unit of comparison.",
    ),
    Term(
        "Context length",
        "The number of tokens that were read together. The native context is the length that the checkpoint was "
        "trained or declared for; the original context is the length before RoPE scaling.",
    ),
    Term(
        "Estimate and exact",
        "An exact effect is measured by a forward pass in which the head is changed. An estimate comes from gradients, "
        "for all heads at once. It is marked, selects heads for exact passes, and decides nothing.",
    ),
    Term(
        "KV group",
        "The query heads that share one key head and one value head (grouped-query attention). Keys, values and rotary "
        "frequencies belong to the group.",
        "kv_group = head // (heads / KV groups)",
    ),
    Term(
        "Logit",
        "Attention logits are scaled, after temperature and soft cap and before the softmax. Logits of tokens are the "
        "model's output.",
    ),
    Term(
        "Probe",
        "One analysis: its options, tables, columns, charts and findings. Other packages can add probes.",
    ),
    Term(
        "Prompt pair",
        "A clean prompt, which leads the model to the right answer, and a corrupted prompt, which does not. Both have "
        "the same number of tokens or, with --align end, share their last tokens.",
    ),
    Term(
        "Run",
        "One stored study: a folder of parquet tables and run.json, which records the configuration, the digests of "
        "the inputs, versions, seed and machine.",
    ),
    Term(
        "Verdict",
        "Supported: the whole 95 % confidence interval lies on the claimed side of the threshold. Not supported: it "
        "lies on the other side. Inconclusive: neither, or too few documents, or estimated values.",
    ),
    Term(
        "Wavelength",
        "The distance in tokens over which a rotary pair turns once.",
        "2π / θ",
    ),
)
"""Terms that no probe declares."""


def reference_page() -> str:
    """The whole reference as Markdown."""
    parts = [
        "# headscope reference",
        "Generated by `python -m headscope.reference`; do not edit by hand.",
        "## Commands",
        *_commands(),
        "## Python",
        "`import headscope as hs`. Each probe is a function that takes the inputs in its heading (`model`, `text`, "
        "`docs`), the keywords below it and "
        f"{_join_code_names(name for name in SHARED_KEYWORDS if name not in INPUTS)}. `model` is a spec string, an "
        "opened model, a transformers model or a TransformerBridge; for all probes but adapt also a mapping from "
        "label to any of these.",
        *_functions(),
        "## Position schemes",
        "Written `CHECKPOINT@SCHEME:key=value,...`. Sliding-window layers with frequencies of their own (Gemma 3) keep "
        "them under `unscaled`, `yarn`, `linear`, `ntk`, `abf` and `llama3`: a window does not grow with the context.",
        _schemes(),
        "## Tables of a run",
        "Each is `<table>.parquet` in the run directory; bold columns are its key. Choices made where "
        "the paper is silent are marked [ours].",
        *_tables(),
        "## Results",
        "What `run.findings()` lists in the column `question`, and a file of checks names. Sentences have places for "
        "the numbers; parts in square brackets are left out where a run lacks them.",
        _results(),
        "## The wide per-head table",
        "`run.heads`: one row per (model, layer, head).",
        _statistics(),
    ]
    return "\n\n".join(parts) + "\n"


def _join_code_names(names: Iterable[str]) -> str:
    """The names as code, joined by commas and "and"."""
    *first_names, last = (f"`{name}`" for name in names)
    return f"{', '.join(first_names)} and {last}"


def _commands() -> list[str]:
    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    parts = []
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        command = command.with_flags() if isinstance(command, ProbeCommand) else command
        rows = ["| option | meaning |", "|---|---|"]
        for parameter in command.params:
            argument = parameter.param_type_name == "argument"
            positional = f"{parameter.metavar or parameter.name.upper()}{'...' if parameter.nargs != 1 else ''}"
            flag = positional if argument else ", ".join(parameter.opts)
            help_text, metavar = getattr(parameter, "help", "") or "", parameter.metavar or ""
            values = metavar.split("|")
            if not argument and len(values) > 1 and not {*TYPE_NAMES.values()} & {*values}:
                help_text += f" Choices: {', '.join(values)}."
            rows.append(f"| `{flag}` | {_plain(help_text)} |")
        parts.append(f"### headscope {name}\n\n{_plain(inspect.cleandoc(command.help or ''))}\n\n" + "\n".join(rows))
    return parts


def _functions() -> list[str]:
    parts = []
    for name in headscope.__all__:
        exported = getattr(headscope, name)
        names = "" if isinstance(exported, type) else f"({', '.join(inspect.signature(exported).parameters)})"
        parts.append(f"### hs.{name}{names}\n\n{_first_paragraph(exported)}")
    for probe, options in plugins.call_parts(OptionParts.options):
        rows = ["| keyword | default | meaning |", "|---|---|---|"]
        for name, field in keyword_fields(options).items():
            default = field.get_default(call_default_factory=True)
            default_text = ", ".join(map(str, default)) if isinstance(default, list) else str(default)
            default_text = "(required)" if field.is_required() else default_text
            meaning = FLAG.sub(_keyword_of_flag, (field.description or "") + choices(field))
            rows.append(f"| `{name}` | {default_text} | {_plain(meaning)} |")
        inputs = "".join(f"{name.replace('models', 'model')}, " for name in probe.takes)
        parts.append(f"### hs.{probe.function_name}({inputs}...)\n\n{probe.summary}\n\n" + "\n".join(rows))
    return parts


def _keyword_of_flag(flag: re.Match[str]) -> str:
    """The Python keyword of a flag, as code: "`save_every`" of "--save-every"."""
    return f"`{flag[1].replace('-', '_')}`"


def _first_paragraph(exported: Any) -> str:
    return " ".join(inspect.cleandoc(exported.__doc__ or "").partition("\n\n")[0].split())


def _plain(help_text: str) -> str:
    """Help without terminal markup, safe in a Markdown table."""
    plain = re.sub(r"^headscope .*$", r"`\g<0>`", help_text.replace("|", "\\|"), flags=re.MULTILINE)
    return plain.replace("][", "]\\[")  # else Markdown takes the second bracket for a link target


def _schemes() -> str:
    from headscope.positions.schemes import SCHEMES

    rows = ["| scheme | keys | meaning |", "|---|---|---|"]
    for name, scheme in SCHEMES.items():
        keys = ", ".join(f"`{field.name}`" for field in dataclasses.fields(scheme))
        meaning = " ".join((scheme.__doc__ or "").split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {keys} | {meaning} |")
    return "\n".join(rows)


def _tables() -> list[str]:
    parts = []
    for table in all_tables().values():
        rows = ["| column | unit | range | meaning |", "|---|---|---|---|"]
        for column in table.columns:
            name = f"**{column.name}**" if column.key else column.name
            low, high = ("" if bound is None else f"{bound:g}" for bound in (column.low, column.high))
            meaning = column.meaning.replace("|", "\\|")
            rows.append(f"| {name} | {column.unit} | {f'{low} .. {high}' if low or high else ''} | {meaning} |")
        parts.append(f"### {table.name}\n\n{table.meaning}\n\n" + "\n".join(rows))
    return parts


def _results() -> str:
    """A row per question that results answer, by probe."""
    rows = ["| question | sentence | interval over |", "|---|---|---|"]
    for _, asked in plugins.call_parts(QuestionParts.questions):
        for question in sorted(asked, key=lambda one: one.name):
            rows.append(f"| `{question.name}` | {question.sentence.replace('|', '/')} | {question.samples} |")
    return "\n".join(rows)


def _statistics() -> str:
    rows = ["| column | unit | meaning |", "|---|---|---|"]
    for name, statistic in statistics().items():
        meaning = statistic.meaning.replace("|", "\\|")
        rows.append(f"| {name} | {statistic.unit} | {meaning} |")
    return "\n".join(rows)


def glossary_page() -> str:
    """The glossary as Markdown: the terms of all probes, the general vocabulary, and the roles of heads."""
    terms = {term.word: term for term in VOCABULARY}
    for _, declared_terms in plugins.call_parts(ViewParts.glossary):
        for term in declared_terms:
            terms.setdefault(term.word, term)
    parts = ["# Glossary", "The words of reports, app and tables. `python -m headscope.reference` writes this page."]
    for word in sorted(terms, key=str.casefold):
        parts.append(f"## {word}\n\n{terms[word].definition}")
        if formula := terms[word].formula:
            parts.append(f"    {formula}")
    rows = ["| role | a head has it with |", "|---|---|"]
    rows += [f"| {name} | {capitalise(role.meaning)} |" for name, role in roles().items()]
    return "\n\n".join([*parts, "## Roles of heads", "\n".join(rows)]) + "\n"


def measures_page(page: str) -> str:
    """The text of docs/measures.md with fresh tables of columns."""
    return COLUMNS_BLOCK.sub(lambda match: f"{match[1]}\n{_column_table(match[2].split())}\n\n{match[3]}", page)


def _column_table(names: Iterable[str]) -> str:
    rows = ["| column of `run.heads` | unit | what it is | formula |", "|---|---|---|---|"]
    for name in names:
        entry = statistics()[name]
        meaning, formula = (text.replace("|", "\\|") for text in (entry.meaning, entry.formula))
        rows.append(f"| `{name}` | {entry.unit} | {meaning} | {formula} |")
    return "\n".join(rows)


def write_pages() -> None:
    """Write the stub of the package and every generated page."""
    STUB.write_text(add_probe_functions(STUB.read_text(encoding="utf-8")), encoding="utf-8")
    FILE.write_text(reference_page(), encoding="utf-8")
    GLOSSARY_FILE.write_text(glossary_page(), encoding="utf-8")
    for file in CODE_FILES:
        file.write_text(fill_page(file.read_text(encoding="utf-8")), encoding="utf-8")
    MEASURES_FILE.write_text(measures_page(MEASURES_FILE.read_text(encoding="utf-8")), encoding="utf-8")
