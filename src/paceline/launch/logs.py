"""torch's options for log files, on our streams: --log-dir, --redirects, --tee, filters.

A front to `torch.distributed.elastic.multiprocessing.LogsSpecs`, which lays out the files.
"""

from __future__ import annotations

import os

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsSpecs

from paceline.launch.local_ranks import Crew
from paceline.launch.output import LogFile, Stream
from paceline.launch.rank import Rank

_OUT, _ERR = 0, 1


def connect_logs(
    crew: Crew, logs: LogsSpecs, environments: dict[int, dict[str, str]], spec: WorkerSpec
) -> None:
    """Send each rank's streams where torch's options say; adds the error files to `environments`."""
    places = logs.reify(environments)
    sides = (
        (_OUT, places.stdouts, places.tee_stdouts, getattr(places, "filtered_stdout", "")),
        (_ERR, places.stderrs, places.tee_stderrs, getattr(places, "filtered_stderr", "")),
    )
    failures: list[str] = []

    def failed(text: str) -> None:
        if not failures:
            crew.say(f"paceline: the log file {text}; the job goes on without it\n")
        failures.append(text)

    words = (spec.duplicate_stdout_filters, spec.duplicate_stderr_filters)
    for side, files, tees, filtered in sides:
        matches = LogFile(filtered, failed) if words[side] else None
        for rank in crew.ranks:
            stream = _stream(rank, side)
            path = files[rank.local_rank]
            tee = rank.local_rank in tees and tees[rank.local_rank] != os.devnull
            if path not in ("", os.devnull):
                stream.files.append(LogFile(path, failed))
            if path and not tee:
                stream.console = None
            if tee and matches is not None:
                stream.matches = (matches, words[side] or [])


def _stream(rank: Rank, side: int) -> Stream:
    return rank.streams[min(side, len(rank.streams) - 1)]
