"""What evaluating stores: a score with its standard error for each model, task, length and metric."""

from headscope.runs.columns import LENGTH, MODEL, Column, Table, key

TASKS = Table(
    "tasks",
    "scores of each model on tasks of the lm-evaluation-harness",
    (
        MODEL,
        key("task", "label", "", "the harness's name of the task", None),
        LENGTH,
        key(
            "metric",
            "label",
            "",
            "the harness's name of the metric; match, for tasks made to a length: share of the wanted strings in the "
            "answer, any case",
            None,
        ),
        key("filter", "label", "", "what the harness took from an answer before it was scored", None),
        Column("score", "value", "", "the metric over all documents, in the metric's own unit"),
        Column(
            "stderr",
            "value",
            "",
            "standard error of the score over documents: the harness's or, where it gives none, that of 1000 seeded "
            "resamples [ours]",
            0,
        ),
        Column("documents", "count", "documents", "documents that were scored", 1),
        Column("higher_is_better", "flag", "", "whether a higher score is a better one"),
    ),
)

TABLES = (TASKS,)
