"""Files of a job: atomic writes, locks, size limits of documents that a user downloads."""
