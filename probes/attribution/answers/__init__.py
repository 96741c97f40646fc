"""Direct logit attribution of an answer: what each part adds to its logit, minus that of a wrong answer, in every row."""
