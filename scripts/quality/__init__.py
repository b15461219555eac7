"""Measuring what a sparse recipe does to a model: the same seeds through dense attention, a control and recipes."""
