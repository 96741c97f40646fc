"""Questions about a circuit of heads: faithfulness, minimality of its members, completeness."""

from headscope.results.answers import answer_questions
from headscope.results.questions import Question

_PLACE = "{model}, {prompts}, other heads {ablated}"

MEMBER = Question(
    name="circuit.member",
    sentence=f"{_PLACE}: {{member}} changes the {{label}} of the circuit by {{value}} ({{label_unit}})",
    number="+.2f",
    samples="prompts",
)
"""The minimality of one member."""
SUBSET = Question(
    name="circuit.random",
    sentence=f"{_PLACE}: of {{subsets:n random subsets}} of the circuit, {{subset}} ({{removed}}) separates model and "
    "circuit most: with it removed from both, the {label} of the model minus that of the circuit is {value} "
    "({label_unit}; {whole:+.2f} with nothing removed)",
    number="+.2f",
    samples="prompts",
)

QUESTIONS = (
    *answer_questions("circuit"),
    Question(
        name="circuit.prompt",
        sentence=f"{_PLACE}, prompt {{pair}}: the {{label}} of the circuit is {{value}}, that of the model "
        "{model_metric:.2f}, that of no head {empty:.2f} ({label_unit})",
        headline="{prompts}, {pair}, others {ablated}, {label}: circuit {value}, model {model_metric:.2f}, no head "
        "{empty:.2f}",
        number=".2f",
        level="row",
    ),
    Question(
        name="circuit.faithfulness",
        sentence=f"{_PLACE}: the faithfulness of the circuit of {{size:n heads}} is {{value}}: its mean {{label}} is "
        "{circuit:.2f}, that of the model {model_mean:.2f}, that of no head {empty:.2f} ({label_unit})",
        headline="circuit of {size:n heads}, {prompts}, others {ablated}: faithfulness {value}",
        number=".2f",
        samples="prompts",
        level="headline",
        better="higher",
    ),
    Question(
        name="circuit.undefined",
        sentence=f"{_PLACE}: the faithfulness is undefined, because ablating all heads changes the {{label}} by "
        "{number:+.2f} ({label_unit}), which is not clearly different from 0. Use more or other prompts",
        number="+.2f",
        level="warning",
    ),
    Question(
        name="circuit.minimal",
        sentence=f"{_PLACE}: the {{label}} of the circuit clearly {{worsens}} without {{value}} of {{size:n members}} "
        "(false discovery rate {rate:percent})[; not clearly without {others}][; it clearly {improves} without "
        "{harmful} (harmful)]",
        headline="{prompts}, others {ablated}: {value} of {size:n members} are needed[; not clearly {others}]"
        "[; harmful: {harmful}]",
        number=".0f",
        level="headline",
    ),
    MEMBER,
    SUBSET,
    Question(
        name="circuit.greedy",
        sentence=f"{_PLACE}: completeness: with the greedy subset {{removed}} removed from both, the {{label}} of the "
        "model minus that of the circuit is {value} ({label_unit}; {whole:+.2f} with nothing removed), on the prompts "
        "that did not choose it",
        headline="{prompts}, others {ablated}: completeness: with {removed} removed from both, model minus circuit is "
        "{value}; {whole:+.2f} with nothing removed",
        number="+.2f",
        samples="prompts",
        level="headline",
    ),
)
