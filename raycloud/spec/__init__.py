"""What is asked: the job, from YAML or Python, checked before anything starts."""

from __future__ import annotations

from raycloud.events import SyncPoint
from raycloud.spec.environment import Environment
from raycloud.spec.job import FORMAT, Job, TaskReference
from raycloud.spec.load import dump_job, load_job
from raycloud.spec.mistakes import SpecErrors
from raycloud.spec.rundir import (
    RESUMES,
    Resume,
    RunDirectory,
    check_resume,
    choose,
    goes_on,
    resume_word,
)
from raycloud.spec.sections import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    ErrorsSection,
    EvaluateSection,
    ResourcesSection,
    RoleResources,
    SyncSection,
)

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
    "load_job",
    "resume_word",
]
