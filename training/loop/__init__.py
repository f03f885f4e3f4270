"""The training loop: it begins, steps, evaluates, saves and reports."""
