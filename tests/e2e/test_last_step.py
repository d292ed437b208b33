"""The ranks that are left save the last step, whatever they do when another rank dies."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from launching import finish, run, start, wait_until
from scripts import training_script

from paceline.checkpoint.store import committed, open_store

WRITE = """
from paceline.checkpoint.store import Store
write = Store.write
def changed(self, name, parts):
    if "rank-" in name:
        {0}
    write(self, name, parts)
Store.write = changed
"""
DIES_IN_SAVE = WRITE.format('os.environ["RANK"] == "1" and os.kill(os.getpid(), signal.SIGKILL)')
SLOW_SAVE = WRITE.format('open("writing", "w").close(); time.sleep(2)')


@pytest.mark.ci
def test_a_rank_that_is_killed_in_the_last_save_does_not_lose_it(tmp_path: Path) -> None:
    script = training_script(epochs=1, before=DIES_IN_SAVE, checkpoints='"kept"')
    done = run("--nproc-per-node=2", script, tmp_path)
    assert done.code == 137, done
    assert committed(open_store(str(tmp_path / "kept"))) == [8], done


@pytest.mark.ci
def test_the_first_signal_does_not_cut_the_save_after_a_failure(tmp_path: Path) -> None:
    dies = "if job.rank == 1 and step.number == 5: os.kill(os.getpid(), signal.SIGKILL)"
    script = training_script(before=SLOW_SAVE, before_update=dies, checkpoints='"kept"')
    (tmp_path / "train.py").write_text(script)
    process = start(["run", "--nproc-per-node=2", "train.py"], tmp_path)
    wait_until((tmp_path / "writing").exists, process)
    process.send_signal(signal.SIGTERM)
    finish(process)
    (step,) = committed(open_store(str(tmp_path / "kept")))
    assert step in (4, 5)  # 5 if the gradients of rank 1 had arrived
