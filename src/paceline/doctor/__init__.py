"""What can be known of the hosts before a job: facts gathered, links measured, findings judged."""
