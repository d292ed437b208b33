"""A process as a rank of a job: joining, leaving, stores, small exchanges, failures of peers."""
