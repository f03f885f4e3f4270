"""Draft heads at run time: each proposes a token tree for every sequence."""
