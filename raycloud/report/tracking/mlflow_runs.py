"""MLflow, through its client: a server, or a database file."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycloud.report.tracking.seam import About, Numbers

_MOST = 1000  # metrics in one call, which is the most that a server takes
_MOST_PARAMS = 100
_ENDS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """A run in MLflow. Numbers told twice are one: they have the same name, step, time and value.

    Args:
        uri: Where runs are kept.
        experiment: Made if it is missing.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        """Nothing is asked of the server yet."""
        self._uri, self._experiment = uri, experiment
        self._client: Any = None
        self._entities: Any = None
        self._run = ""

    def begin(self, about: About) -> str:
        """Go on with the run of before, or begin one with the job's fields as parameters."""
        # An extra, and it takes seconds to import.
        client = importlib.import_module("mlflow").MlflowClient(tracking_uri=self._uri)
        self._entities = importlib.import_module("mlflow.entities")
        if about.known:
            client.update_run(about.known, status="RUNNING")
            self._client, self._run = client, about.known
            return about.known
        experiment = client.get_experiment_by_name(self._experiment)
        number = (
            client.create_experiment(self._experiment)
            if experiment is None
            else experiment.experiment_id
        )
        tags = {"raycloud.version": about.version, "raycloud.job": about.job}
        run = client.create_run(number, run_name=about.run, tags=tags)
        params = [self._entities.Param(_name(name), text) for name, text in about.asked.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(run.info.run_id, params=params[first : first + _MOST_PARAMS])
        self._client, self._run = client, str(run.info.run_id)
        return self._run

    def add(self, numbers: Sequence[Numbers]) -> None:
        """In as few calls as the server takes."""
        metrics = [
            self._entities.Metric(_name(name), value, int(one.t * 1000), one.step)
            for one in numbers
            for name, value in one.values.items()
        ]
        for first in range(0, len(metrics), _MOST):
            self._client.log_batch(self._run, metrics=metrics[first : first + _MOST])

    def end(self, status: str) -> None:
        """Say how it ended."""
        self._client.set_terminated(self._run, _ENDS.get(status, "FAILED"))


def _name(name: str) -> str:
    """As MLflow takes it: letters, digits, `_`, `-`, `.`, space and `/`."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)[:250]
