"""`paceline report`: what a run's folder tells, as Markdown or as one HTML file."""
