"""The step-logic graphs of a decode step on a device: they have no weights."""
