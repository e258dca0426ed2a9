"""Jobs that take time and do nothing, for processes that tests start."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Nap:
    """A job."""

    name: str
    seconds: float


class Sleeper:
    """Sleeps for as long as a job says; ``argument`` is the shortest nap that it refuses."""

    def __init__(self, argument):
        self.refused = argument

    def do(self, job):
        if job.seconds >= self.refused:
            raise ValueError(f"{job.seconds} seconds are too long")
        time.sleep(job.seconds)
        return {"slept": job.seconds}
