"""The cases' own files are no tests: some do things while they are imported."""

collect_ignore_glob = ["*/task.py"]
