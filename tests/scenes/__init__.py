"""Games, and what is true of them: tests/ranks/test_scenes.py asks each the same five questions."""

from tests.scenes.draws import DRAWS
from tests.scenes.games import BUILT_IN
from tests.scenes.losses import LOSSES
from tests.scenes.meta import META
from tests.scenes.optimizers import OPTIMIZERS
from tests.scenes.pipelines import PIPELINES
from tests.scenes.policies import POLICY_GAMES
from tests.scenes.updates import UPDATES
from tests.scenes.words import WORDS
from tests.scenes.writing import WRITTEN
from tests.support.scene import Scene

SCENES: dict[str, Scene] = (
    WORDS | LOSSES | META | DRAWS | OPTIMIZERS | UPDATES | WRITTEN | POLICY_GAMES | PIPELINES | BUILT_IN
)
