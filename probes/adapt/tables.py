"""What learning stores: each step's batch, and the held-out loss at kept steps."""

from headscope.runs.columns import DOC, LENGTH, Column, Table, key

ADAPTER = key("adapter", "label", "", "name of what is being learned: the study's name", None)
STEP = key("step", "index32", "steps", "optimiser steps taken; 0 is the untrained start")

TRAINING = Table(
    "training",
    "what each optimiser step of a training saw",
    (
        ADAPTER,
        STEP,
        Column("context_length", "index32", "tokens", "length of the step's sequences", 1),
        Column("tokens", "count", "tokens", "tokens of the step's batch", 1),
        Column("loss", "value", "nats/token", "mean next-token loss of the batch, before the step", 0),
        Column("rate", "value", "", "factor on every learning rate: warm-up, stable, decay", 0, 1),
    ),
)

VALIDATION = Table(
    "validation",
    "next-token loss by position on held-out documents, during a training",
    (
        ADAPTER,
        STEP,
        LENGTH,
        DOC,
        key("position", "index32", "tokens", "last predicted token of the bin of positions"),
        Column("nll", "value", "nats/token", "mean next-token loss over the bin", 0),
        Column("tokens", "count", "tokens", "predicted tokens in the bin", 1),
    ),
)

TABLES = (TRAINING, VALIDATION)
