"""The weightless graphs of a decode step on a device."""
