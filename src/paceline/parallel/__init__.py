"""Fronts to torch's ways of spreading one model over ranks."""
