"""Question that the results of the probe `imported` answer."""

from headscope.results.questions import Question

QUESTIONS = (
    Question(
        name="imported.agreement",
        sentence="In {model}, the measures that rank the {n:n heads} with a score most like the imported scores are "
        "{measures:.2f}; in parentheses, Spearman's rank correlation",
        headline="Imported scores rank {n:n heads} most like {closest:.2f} (rank correlation)",
        number=".2f",
        level="headline",
    ),
)
