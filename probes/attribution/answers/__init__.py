"""Direct logit attribution of an answer, minus that of a wrong answer: every part in every row of a prompt."""
