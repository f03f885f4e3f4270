"""Single questions: is sampling exact, is the probability calibrated, what does a part cost."""
