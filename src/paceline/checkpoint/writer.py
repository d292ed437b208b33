"""Writes a save in the background: stage, write, acknowledge, commit. No collective is used.

Ranks acknowledge through the job's store, by a client of their own: the training's groups are in use, and
its store client may wait in a blocking call. Rank 0 commits when all have written, prunes, and tells the
verdict, which is the same on every rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import paceline
from paceline.checkpoint.layout import Layout
from paceline.checkpoint.manifest import Chunk, Manifest, Saved
from paceline.checkpoint.staging import Staging
from paceline.checkpoint.store import Store, commit, committed
from paceline.job.job import Job

_POLL_S = 0.005
_NICE = 19  # a sixtieth of a core that the training wants too


def _step_back() -> None:
    """Let the training have the cores first: its next steps are waited for, this thread is not."""
    # On Linux a thread has a priority of its own, which cannot be raised again.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a save ended.

    Args:
        kind: "saved", "disk" (the storage failed), "non-finite" or "other".
        text: What happened, where it was not saved.
        rank: Where.
    """

    kind: str
    text: str = ""
    rank: int = 0


class Cancelled(Exception):
    """The job is being abandoned."""


class Save:
    """A save in flight, with its thread.

    Args:
        number: Of the save in this job; equal on all ranks.
        tree: The values, as JSON; rank 0's are written.
        finite: Prefix of the names of tensors that must be finite; "" for none.
        waited: Somebody waits for it, as before the end of a preempted job: it goes on at full priority.
        prune: Called on rank 0 after the commit.

    Attributes:
        verdict: None while it is in flight, and where it was cancelled.
        cost_s: What it took of this rank's processor in its thread, in seconds.

    Collective: all ranks make one, for the same step.
    """

    def __init__(
        self,
        job: Job,
        store: Store,
        staging: Staging,
        *,
        number: int,
        step: int,
        best: bool,
        tree: Any,
        finite: str,
        waited: bool,
        prune: Callable[[], None],
    ) -> None:
        self.step = step
        self.staging = staging
        self.verdict: Verdict | None = None
        self.cost_s = 0.0
        self._rank, self._world_size = job.rank, job.world_size
        self._timeout_s = job.timeout_s
        self._store = store
        self._best, self._tree, self._finite, self._prune = best, tree, finite, prune
        self._waited = waited
        self._cancel = threading.Event()
        self._acks: dist.Store | None = None
        if job.store is not None:
            own_client: dist.Store = job.store.clone()  # type: ignore[attr-defined] # not in torch's stubs
            self._acks = dist.PrefixStore(f"checkpoint/{number}", own_client)
        self._thread = threading.Thread(target=self._run, name="paceline-save", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether nothing of it runs any more."""
        return not self._thread.is_alive()

    def wait(self) -> Verdict | None:
        """Until it has ended. Collective: none, but the other ranks must get as far."""
        self._thread.join()
        return self.verdict

    def cancel(self) -> None:
        """Give up, waiting for nobody; nothing is committed later."""
        self._cancel.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        began = time.thread_time()
        try:
            self.verdict = self._conclude(self._write_own())
        except Cancelled:
            return
        except RuntimeError as error:  # the job's store is gone, with rank 0
            self.verdict = Verdict(kind="other", text=f"the job's store is gone: {error}")
        self.cost_s = time.thread_time() - began

    def _write_own(self) -> dict[str, Any]:
        """This rank's acknowledgement: its digests, or why there are none."""
        try:
            self.staging.finish()
            if not self._waited:
                _step_back()
            if self.staging.changed is not None:
                text = f"{self.staging.changed} was changed outside of the optimizer while it was saved"
                return {"kind": "other", "text": text}
            name = self.staging.non_finite(self._finite) if self._finite else None
            if name is not None:
                return {"kind": "non-finite", "text": name}
            if self.step in committed(self._store):
                return {"kind": "kept", "text": ""}  # of the same step, so of no other content
            digests: list[str] = []
            if self.staging.layout.mine:
                folder = self._store.scratch(self.step)
                self._store.write(f"{folder}/rank-{self._rank}.bin", self._parts(digests))
        except Cancelled:
            raise
        except OSError as error:
            return {"kind": "disk", "text": f"{type(error).__name__}: {error}"}
        except Exception as error:
            return {"kind": "other", "text": f"{type(error).__name__}: {error}"}
        boxes = [[*p.box, p.offset] for p in self.staging.layout.mine]
        names = [p.name for p in self.staging.layout.mine]
        return {
            "kind": "saved",
            "size": self.staging.layout.size_bytes,
            "chunks": list(zip(names, boxes, digests, strict=True)),
        }

    def _parts(self, digests: list[str]) -> Iterator[memoryview]:
        whole = memoryview(self.staging.bytes.numpy().data)
        for piece in self.staging.layout.mine:
            if self._cancel.is_set():
                raise Cancelled
            part = whole[piece.offset : piece.offset + piece.size_bytes]
            digests.append(hashlib.sha256(part).hexdigest())
            yield part

    def _conclude(self, own: dict[str, Any]) -> Verdict:
        if self._acks is None:
            return self._judge([own])
        self._acks.set(f"{self._rank}", json.dumps(own))
        if self._rank == 0:
            keys = [f"{rank}" for rank in range(self._world_size)]
            self._await(keys)
            verdict = self._judge([json.loads(self._acks.get(key)) for key in keys])
            for key in keys:
                self._acks.delete_key(key)
            self._acks.set("verdict", json.dumps([verdict.kind, verdict.text, verdict.rank]))
            return verdict
        self._await(["verdict"])
        kind, text, rank = json.loads(self._acks.get("verdict"))
        return Verdict(kind=kind, text=text, rank=rank)

    def _await(self, keys: list[str]) -> None:
        assert self._acks is not None
        deadline = time.monotonic() + self._timeout_s
        pause_s = _POLL_S
        while not self._acks.check(keys):
            if self._cancel.wait(pause_s):
                raise Cancelled
            if time.monotonic() > deadline:
                raise RuntimeError(f"the ranks did not write within {self._timeout_s:g} s.")
            pause_s = min(2 * pause_s, 0.1)

    def _judge(self, acks: list[dict[str, Any]]) -> Verdict:
        for rank, ack in enumerate(acks):
            if ack["kind"] == "kept":
                return Verdict(kind="saved")
            if ack["kind"] != "saved":
                return Verdict(kind=ack["kind"], text=ack["text"], rank=rank)
        try:
            commit(self._store, self._manifest(acks))
            self._prune()
        except OSError as error:
            return Verdict(kind="disk", text=f"{type(error).__name__}: {error}")
        return Verdict(kind="saved")

    def _manifest(self, acks: list[dict[str, Any]]) -> Manifest:
        layout: Layout = self.staging.layout
        chunks: dict[str, list[Chunk]] = {name: [] for name in layout.shapes}
        for rank, ack in enumerate(acks):
            for name, (offsets, sizes, at), digest in ack["chunks"]:
                chunk = Chunk(tuple(offsets), tuple(sizes), f"rank-{rank}.bin", at, digest)
                chunks[name].append(chunk)
        return Manifest(
            step=self.step,
            best=self._best,
            world_size=self._world_size,
            saved_at=time.time(),
            versions={
                "paceline": paceline.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            files={f"rank-{r}.bin": ack["size"] for r, ack in enumerate(acks) if ack["chunks"]},
            tree=self._tree,
            tensors={n: Saved(*layout.shapes[n], tuple(found)) for n, found in chunks.items()},
        )
