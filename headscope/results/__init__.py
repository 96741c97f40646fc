"""Results as data: what a run answers, one number each, worded and ranked in one place.

`result` is one number with its interval, verdict and conditions. `questions` declares what results answer and how a
sentence about them reads. `words` writes sentences, `ranking` chooses headlines, `verdicts` judges claims. Terminal,
report, app, `run.findings()`, `headscope compare` and `headscope check` are views of the same results.
"""
