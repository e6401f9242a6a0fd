"""One fold of the event log into the state of a run, and the views that read it.

Written: `log` (the format, readers), `recorder` (all files of a run), `snapshot` (the state, kept).
Folded: `state` takes in events; below it `goodput`, `data` and `recoveries`, each a subject.
Read: `run_status` (now, also for Prometheus), `summary` (in the end), `audit` (with the ledger),
`comparison` (several runs), `chaos` (with and without faults), `runs` (those on this machine).
Shown: `progress`, `watch`, `summary_text`; `notes` and `figures` are their words.
Sent: `tracking` (MLflow, Weights & Biases).
"""
