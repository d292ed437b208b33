"""`paceline profile`: some steps under torch's profiler on all ranks, as one trace and a summary."""
