"""The README's table of families: what is measured, what is refused and why, written from the verdicts."""

from collections.abc import Mapping
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import hub_coverage, use_checks
from .checks import Verdict

START, END = "<!-- families: written by `make docs` -->", "<!-- end of families -->"
MEASURED = {
    "right": "measured: attention, rotary pairs, loss, position schemes",
    "right without pairs": "measured, without rotary pairs and schemes: nothing rotates, or not by pairs that all "
    "layers share",
}


def rows(verdicts: Mapping[str, Verdict]) -> dict[str, list[str]]:
    """What happens -> the types that it happens to, in the order of the table."""
    table: dict[str, list[str]] = {words: [] for words in MEASURED.values()}
    for kind, prefix in (("refused", "refused: "), ("cannot be built", "not tried: ")):
        for verdict in verdicts.values():
            if verdict.kind == kind:
                table.setdefault(_reason(prefix, verdict), [])
    for name, verdict in verdicts.items():
        if verdict.kind in MEASURED:
            table[MEASURED[verdict.kind]].append(name)
        elif verdict.kind == "refused":
            table[_reason("refused: ", verdict)].append(name)
        elif verdict.kind == "cannot be built":
            table[_reason("not tried: ", verdict)].append(name)
    return table


def _reason(prefix: str, verdict: Verdict) -> str:
    """The reason without the figures of the tiny model; what transformers cannot build has many reasons and one row."""
    if prefix == "not tried: ":
        return (
            prefix + "transformers builds or runs it from text only with packages or inputs missing on the test machine"
        )
    return prefix + verdict.reason.partition(" [(")[0]


def markdown(verdicts: Mapping[str, Verdict]) -> str:
    """How many are measured, and the table, in Markdown."""
    measured, listed = hub_coverage.correct_types(verdicts), hub_coverage.checkpoints()
    causal = sum(name in measured for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    lines = [
        f"{causal} of the {len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)} causal types of transformers are measured, and of "
        f"vision-language types {len(measured) - causal}, by",
        f"their text part. Of the {listed.total():,} checkpoints of causal types in the registry of transformer-lens, "
        f"{hub_coverage.checkpoint_share(measured):.1%} belong to a supported",
        "type.",
        "",
        "Influence, patching and ablation resume passes over copies of a text. These are compared with full passes at",
        f"every layer with attention of each measured type: {use_checks.COPIES} copies with different edits, in texts",
        f"of {' and '.join(map(str, use_checks.TOKENS))} tokens. `python -m tests.zoo --every-use` compares ablation,",
        "influence, patching (all heads of a layer as one batch), and generation with and without left padding of all",
        "types with eager attention.",
        "",
        "| what happens | types |",
        "|---|---|",
    ]
    lines += [f"| {outcome} | {len(types)}: {', '.join(types)} |" for outcome, types in rows(verdicts).items() if types]
    return "\n".join(lines)


def write(path: Path, verdicts: Mapping[str, Verdict]) -> None:
    """Put the table between its markers."""
    text = path.read_text(encoding="utf-8")
    head, _, rest = text.partition(START)
    _, _, tail = rest.partition(END)
    path.write_text(f"{head}{START}\n\n{markdown(verdicts)}\n\n{END}{tail}", encoding="utf-8")


def stored(path: Path) -> str:
    """The table that stands there."""
    return path.read_text(encoding="utf-8").partition(START)[2].partition(END)[0].strip()
