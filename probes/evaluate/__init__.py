"""Probe `evaluate`: scores of each model on tasks of EleutherAI's lm-evaluation-harness."""

from headscope.probe import Probe


class Evaluate(Probe):
    """The declaration of the probe `evaluate`."""

    name = "evaluate"
    title = "Tasks"
    tab = "Benchmarks"
    summary = "Score each model on tasks of the lm-evaluation-harness: RULER, common benchmarks, your own task files."
    group = "Tasks"
    order = 35
    takes = ("models",)
    example = "headscope evaluate --model base=smollm2-135m --tasks niah_single_1,ruler_vt --length 4096 --limit 50"
    parts = (
        "options runner tables statistics=results.STATISTICS model_columns=results.model_statistics "
        "questions=results.QUESTIONS results overview glossary charts"
    )


PROBE = Evaluate()
