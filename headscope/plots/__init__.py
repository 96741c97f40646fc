"""Plot types that several probes share: pure functions from a DataFrame to a plotly figure.

A function that gets an empty table, or a table without a required column, returns a figure that states the reason.
The categorical column `model` gives the order and the colours of the models.
"""
