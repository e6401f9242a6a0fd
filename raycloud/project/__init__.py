"""What a new project starts from: a task, a job file with its schema, a README."""
