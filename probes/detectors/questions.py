"""Questions of the detectors probe: the heads with each role, their top scores, and what one head attends to."""

from headscope.results.head_results import role_questions
from headscope.results.questions import Question
from probes.detectors.analysis import ROLE_AREAS, TARGET_DESCRIPTIONS, role_name


def _kind_questions(kind: str) -> tuple[Question, ...]:
    area, role = ROLE_AREAS[kind], role_name(kind)
    meaning = f"more than half of the weight on {TARGET_DESCRIPTIONS[kind]}, on a repeated random token sequence"
    top_head = Question(
        name=f"{area}.top_head",
        sentence=f"The top {role} head of {{model}} is {{unit}}, with a score of {{value}}[; chance is {{chance:.3g}}]",
        samples="sequences",
    )
    return (*role_questions(area, role, meaning, "headline" if kind == "induction" else "detail"), top_head)


QUESTIONS = (
    *(question for kind in TARGET_DESCRIPTIONS for question in _kind_questions(kind)),
    Question(
        name="prompt_detectors.top_head",
        sentence="In the prompts, {unit} of {model} puts the most weight on {target}: {value}[; chance is "
        "{chance:.3g}]",
        headline="{unit} has the largest weight on {target}: {value}",
        samples="prompts",
        level="headline",
    ),
    Question(
        name="prompt_detectors.prompt",
        sentence="In prompt {prompt}, the heads of {model} with the most weight on each kind of key are {heads:.2f}",
        headline="Prompt {prompt}: {first_heads:.2f}",
        level="row",
    ),
    Question(
        name="detectors.largest_score",
        sentence="On a repeated random token sequence, {context_length:,} tokens in all, {value} of its weight in "
        "{model} is on {target}[; chance is {chance:percent1}]",
        number="percent",
        samples="sequences",
    ),
)
