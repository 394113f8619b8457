"""``vime report``: a run record as one HTML page that needs nothing else."""
