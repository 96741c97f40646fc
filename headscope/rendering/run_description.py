"""What a run covers, in a title and a sentence: its models, context lengths and documents."""

from collections.abc import Sequence

from headscope.results.words import count_nouns, join_words
from headscope.runs.columns import Table, all_tables
from headscope.runs.run import Run

MAX_LISTED_LENGTHS = 6
"""Context lengths that are listed; of more, only the ends are."""


def title(models: Sequence[str]) -> str:
    """The title of a report, with up to four models by name."""
    if not models:
        return "Probes"
    named = list(models) if len(models) <= 4 else [*models[:3], f"{len(models) - 3} others"]
    return f"Attention heads of {join_words(named)}"


def describe_run(run: Run) -> str:
    """One sentence: how many models the run has, at which context lengths on how many documents, and on how many
    prompts."""
    if not run.models:
        return ""
    models = count_nouns(len(run.models), "models")
    baseline = f", compared with {run.models[0]}," if len(run.models) > 1 else ""
    documents = f"{_describe_lengths(run)} {_describe_documents(run)}".strip()
    texts = " and ".join(filter(None, [documents, _describe_prompts(run)]))
    return f"All attention heads of {models}{baseline} {texts}".rstrip(", ") + "."


def declared_tables(run: Run) -> list[Table]:
    """The tables of the run that an installed probe declares."""
    return [all_tables()[name] for name in run.tables if name in all_tables()]


def _describe_lengths(run: Run) -> str:
    """The context lengths of all tables: "at context lengths of 512 and 2,048 tokens"; "" if no table has any.

    Rows with context length 0 are about every length, not about a text: tables `positions` and `scales` have such rows.
    """
    lengths = {
        length
        for table in declared_tables(run)
        if "context_length" in table.keys
        for length in run.distinct(table.name, ["context_length"])["context_length"]
        if length > 0
    }
    if not lengths:
        return ""
    if len(lengths) > MAX_LISTED_LENGTHS:
        return f"at {len(lengths)} context lengths from {min(lengths):,} to {max(lengths):,} tokens"
    listed = join_words([f"{length:,}" for length in sorted(lengths)])
    return f"at {'context lengths' if len(lengths) > 1 else 'a context length'} of {listed} tokens"


def _describe_documents(run: Run) -> str:
    """The number of documents: "on 10 documents"; "on up to 10 documents" if tables or context lengths have fewer."""
    sets = document_sets(run)
    count = len(set().union(*sets))
    differ = any(len(names) < count for names in sets)
    return f"on {'up to ' if differ else ''}{count_nouns(count, 'documents')}" if count else ""


def _describe_prompts(run: Run) -> str:
    """The number of prompts with answers and how long they are: "on 5 prompts of 10 to 14 tokens"; "" without any."""
    keys = ["prompts", "pair"]
    tables = [table.name for table in declared_tables(run) if {*keys} <= {*table.keys}]
    prompts = {tuple(row) for name in tables for row in run.distinct(name, keys).astype(str).itertuples(index=False)}
    lengths = [model.get("prompt_tokens") for model in run.manifest["models"]]
    known = sorted({length for own in lengths if own for length in own})
    spread = f" of {' to '.join(f'{end:,}' for end in dict.fromkeys((known[0], known[-1])))} tokens" if known else ""
    return f"on {count_nouns(len(prompts), 'prompts')}{'' if None in lengths else spread}" if prompts else ""


def document_sets(run: Run) -> list[set[str]]:
    """The names of the documents of each table and context length."""
    sets: list[set[str]] = []
    for table in declared_tables(run):
        if "doc" in table.keys:
            columns = [name for name in ("context_length", "doc") if name in table.keys]
            rows = run.distinct(table.name, columns)
            parts = rows.groupby("context_length")["doc"] if "context_length" in columns else [("", rows["doc"])]
            sets += [{*names} for _, names in parts]
    return sets
