"""Everything that touches Ray.

A start goes down this list and does not come back up: `run` (train) attaches to a Ray (`attach`,
`registration` on a cluster), `launch` puts a `session` together: `cluster` over `fleet` over `pool`
(the actors of `actors`), beside `checkpoints`; then `raycloud.run.driver` drives.
`failover` is entered on a cluster alone, where a run outlives its command.

- Data: the process of `ingest` makes a task's sources into blocks, as `pipeline` says, by
  `read_tasks`, in the `block_store`; members read them through `provider`.
- A task's class and its code: `tasks`.
- Beside a run: `dry_run` (plan, --try), `survey` (plan, doctor), `chaos`.
- Over the Jobs API: `submission`, `jobs_api`.
"""
