"""What is asked: the job, from YAML or Python, checked before anything starts."""

from __future__ import annotations

from raycloud.spec.environment import Environment
from raycloud.spec.job import (
    FORMAT,
    CheckpointSection,
    DataSection,
    ElasticSection,
    ErrorsSection,
    EvaluateSection,
    Job,
    ResourcesSection,
    RoleResources,
    SyncPoint,
    SyncSection,
)
from raycloud.spec.load import dump_job, job_from_mapping, load_job
from raycloud.spec.mistakes import SpecErrors
from raycloud.spec.resuming import RESUMES, Resume, goes_on, resume_word
from raycloud.spec.rundir import RunDirectory, check_resume, choose
from raycloud.spec.task_reference import TaskReference

__all__ = [
    "FORMAT",
    "RESUMES",
    "CheckpointSection",
    "DataSection",
    "ElasticSection",
    "Environment",
    "ErrorsSection",
    "EvaluateSection",
    "Job",
    "ResourcesSection",
    "Resume",
    "RoleResources",
    "RunDirectory",
    "SpecErrors",
    "SyncPoint",
    "SyncSection",
    "TaskReference",
    "check_resume",
    "choose",
    "dump_job",
    "goes_on",
    "job_from_mapping",
    "load_job",
    "resume_word",
]
