"""What travels to other processes: a job's working directory, checked, and a task's code."""
