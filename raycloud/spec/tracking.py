"""The section of a job that says to whom its numbers are told beside TensorBoard."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raycloud.spec.sections import Location, Section


class MlflowSection(Section):
    """Numbers for an MLflow server or store. Needs raycloud's extra `mlflow`."""

    uri: Location | None = Field(
        default=None,
        description="Where MLflow keeps its runs: `http://host:port` of a server, or "
        "`sqlite:////path/to/mlflow.db`. A password in it is written as `${NAME}` and taken from "
        "the environment. null: MLflow is not used.",
    )
    experiment: str | None = Field(
        default=None,
        min_length=1,
        description="The experiment that the run belongs to. null: the job's name.",
    )


class WandbSection(Section):
    """Numbers for Weights & Biases. Needs raycloud's extra `wandb`."""

    mode: Literal["off", "offline", "online"] = Field(
        default="off",
        description="offline: kept in `wandb/` in the run directory, for `wandb sync`. online: "
        "also sent at once, with the key in `WANDB_API_KEY` or from `wandb login`. off: not used.",
    )
    project: str | None = Field(
        default=None,
        min_length=1,
        description="The project that the run belongs to. null: the job's name.",
    )
    entity: str | None = Field(
        default=None,
        min_length=1,
        description="The team or user that owns the project. null: the key's own.",
    )


class TrackingSection(Section):
    """To whom the run's numbers are told, beside TensorBoard's files, which are always written."""

    mlflow: MlflowSection = Field(default_factory=MlflowSection, description="MLflow.")
    wandb: WandbSection = Field(default_factory=WandbSection, description="Weights & Biases.")
