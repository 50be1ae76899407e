"""Embeds the texts of files into a file of vectors, in flat memory; what was stopped goes on: `matmuls embed`."""

from .job import SUFFIXES, Job, Progress, Summary, run
from .journal import Foreign
from .records import FORMATS, Source, Unreadable

__all__ = ["FORMATS", "SUFFIXES", "Foreign", "Job", "Progress", "Source", "Summary", "Unreadable", "run"]
