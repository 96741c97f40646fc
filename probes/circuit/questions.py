"""Questions about a circuit of heads: faithfulness, minimality of its members, completeness."""

from headscope.results.questions import Question

_PLACE = "{model}, {prompts}, other heads {ablated}"

MEMBER = Question(
    name="circuit.member",
    sentence=f"{_PLACE}: without {{member}}, the {{label}} of the circuit falls by {{value}} ({{label_unit}})",
    number="+.2f",
    samples="prompts",
)
"""The minimality of one member."""
SUBSET = Question(
    name="circuit.random",
    sentence=f"{_PLACE}: of {{subsets:n random subsets}} of the circuit, {{subset}} ({{removed}}) separates model and "
    "circuit most: with it removed from both, the {label} of the model is higher by {value} ({label_unit}; "
    "{whole:+.2f} with nothing removed)",
    number="+.2f",
    samples="prompts",
)

QUESTIONS = (
    Question(
        name="circuit.answered",
        sentence="{model}, {prompts}: the unchanged model gives the answer ({answer_criterion}) in {value}[. Means "
        "include {unanswered:n prompts} without it][. {doubt}]",
        number="percent",
        samples="prompts",
        better="higher",
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
        sentence=f"{_PLACE}: the {{label}} of the circuit clearly falls without {{value}} of {{size:n members}} (false "
        "discovery rate {rate:percent})[; not clearly without {others}][; it clearly rises without {harmful} "
        "(harmful)]",
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
        "model is higher than that of the circuit by {value} ({label_unit}; {whole:+.2f} with nothing removed), on the "
        "prompts that did not choose it",
        headline="{prompts}, others {ablated}: completeness: with {removed} removed from both, the model exceeds the "
        "circuit by {value}; {whole:+.2f} with nothing removed",
        number="+.2f",
        samples="prompts",
        level="headline",
    ),
)
