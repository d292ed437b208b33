"""The arithmetic of one optimizer step: weights, precision, clipping, control word."""
