"""Tables of a training: the batch of each step, and the validation loss at saved steps."""

from headscope.runs.columns import DOC, LENGTH, Column, Table, key

ADAPTER = key("adapter", "label", "", "name of the training: the study's name", None)
STEP = key("step", "index32", "steps", "optimiser steps taken; 0 is before training")

TRAINING = Table(
    "training",
    "batch and loss of each optimiser step of a training",
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
