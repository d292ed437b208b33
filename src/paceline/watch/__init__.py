"""Diagnosis of hangs, crashes and stragglers: evidence in, text out."""
