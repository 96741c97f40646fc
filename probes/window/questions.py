"""Questions that the results of the probe `window` answer."""

from headscope.results.questions import Question

QUESTIONS = (
    Question(
        name="window.solved",
        sentence="With {scheme}, {value} of {n:n models} solve the task",
        headline="With {scheme}, {value} of {n:n models} solve the task",
        number=",.0f",
        level="headline",
        better="higher",
    ),
    Question(
        name="window.accuracy",
        sentence="With {scheme} the mean accuracy over {n:n widths} is {value}",
        number=".3f",
        better="higher",
    ),
    Question(
        name="window.lowest_accuracy",
        sentence="With {scheme} the accuracy is lowest at W = {width:,}: {value}",
        number=".3f",
        samples="models",
        better="higher",
    ),
    Question(
        name="window.mass_by_width",
        sentence="Under fixed RoPE the rank correlation of frequency mass and width is {value} over {n:n widths}",
        number="+.2f",
    ),
    Question(
        name="window.mass_bounds",
        sentence="The frequency mass of all {n:n models} that solve the task is between C1 / (W/2 + 1) with C1 = "
        "{value} and pi / (W + 1) + C2 with C2 = {c2:number} rad/token (Theorem 1, r = 1)",
    ),
)
