"""The HTTP interface of Triton, the open inference protocol, answered in front of it."""
