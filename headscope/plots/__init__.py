"""Tables in, plotly figures out. Pure: no file, no model, no state; one idea a module.

Every function accepts an empty table, or one without the column it needs, and then says so in the figure.
The order of the models, and with it their colours, is that of the categorical column `model`.
"""
