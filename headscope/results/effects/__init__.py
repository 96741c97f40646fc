"""Effects of changing one unit at a time, such as a head: statistics that every causal measurement shares.

A probe declares a `Sweep` as data and reads its rows; everything else follows from `sweep.sweep_effects`.
"""
