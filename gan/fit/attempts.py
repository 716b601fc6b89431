"""A failure that comes back at the same step ends a run under a person's own torchrun, too.

Our own agent counts failures itself. torchrun starts its ranks again after every kind of failure, and tells them only
the number of the attempt. So the ranks note their steps in torchrun's folder, and the first rank of the next attempt
reads there how far the last one has come.
"""

import json
import os
from pathlib import Path

from gan.errors import UserError
from strategies.processes import agent
from strategies.processes.failure import FILE
from strategies.processes.launched import Launched
from strategies.processes.progress import NEVER, Progress


def folder(place: Launched | None) -> Path | None:
    """The folder that a person's torchrun has made for itself. It is the same for all attempts on this host."""
    if place is None or place.by != "torchrun" or FILE not in os.environ or agent.speaks():
        return None
    return Path(os.environ[FILE]).parents[2]


def note_steps(place: Launched | None) -> None:
    """Let this rank note its steps where the next attempt finds them. Call it before training."""
    if (there := folder(place)) is not None:
        os.environ[Progress.VARIABLE] = str(there / "steps")


def check(place: Launched | None) -> None:
    """For the first rank: refuse to begin again if the last three attempts have failed at the same step."""
    there = folder(place)
    if there is None:
        return
    noted, failed = there / "failures.json", {}
    if noted.exists():
        failed = json.loads(noted.read_text())
        # When a host comes or goes, the ranks start again too, and the number of the attempt stays.
        failed.setdefault(str(place.restarts), max(Progress.read(place.local_size)))
    last = [step for attempt, step in failed.items() if attempt != "0"][-agent.SAME_STEP :]
    if len(last) == agent.SAME_STEP and len(set(last)) == 1:
        where = f"at step {last[0]}" if last[0] != NEVER else "before the first step"
        raise UserError(
            f"the last {agent.SAME_STEP} attempts have failed {where}, so the ranks are not started again; see above "
            f"what each of them said"
        )
    noted.write_text(json.dumps(failed))
    Progress.clear(place.local_size)
