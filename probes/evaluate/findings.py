"""What evaluating found, in sentences, the words that a reader needs, and what the terminal shows."""

from collections.abc import Iterator

from headscope.report.blocks import Finding, Overview, Term
from headscope.runs.run import Run
from probes.evaluate import PROBE
from probes.evaluate.analysis import means_over_tasks, preferred_metric_rows

GLOSSARY = (
    Term(
        "Task",
        "A benchmark of the lm-evaluation-harness, which makes the prompts and scores the answers. RULER's tasks ask "
        "for facts hidden in made-up text of a wanted length; their score is the share of the wanted strings found.",
        tables=("tasks",),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """Each task's scores, model by model, and means over tasks of a kind."""
    if "tasks" not in run.tables:
        return
    rows = preferred_metric_rows(run.tasks)
    for (task, length, metric), each in rows.groupby(["task", "context_length", "metric"], sort=False):
        told = ", ".join(f"{row.model} {row.score:.3f} ± {row.stderr:.3f}" for row in each.itertuples())
        fewest, most = each["documents"].min(), each["documents"].max()
        among = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
        yield Finding(PROBE.title, f"{task} at {length:,} tokens ({metric}, {among} documents): {told}.")
    for (kind, length), each in means_over_tasks(rows).groupby(["kind", "context_length"], sort=False):
        told = ", ".join(f"{row.model} {row.score:.3f} ± {row.stderr:.3f}" for row in each.itertuples())
        yield Finding(PROBE.title, f"Mean {kind} of {each['tasks'].max()} tasks at {length:,} tokens: {told}.")


def overview(run: Run) -> Overview | None:
    """One row a model, task and length."""
    if "tasks" not in run.tables:
        return None
    data = preferred_metric_rows(run.tasks)
    rows = [
        {
            "model": row.model,
            "task": row.task,
            "tokens": f"{row.context_length:,}",
            "metric": row.metric,
            "score": f"{row.score:.3f} ± {row.stderr:.3f}",
            "documents": f"{row.documents:,}",
        }
        for row in data.itertuples()
    ]
    return Overview("tasks", PROBE.title, data, rows)
