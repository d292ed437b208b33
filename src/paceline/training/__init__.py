"""`Training` and its steps, evaluation, and `Trainer`."""
