"""A training that is configured with Hydra. It starts its ranks itself, or is started by torchrun, srun or mpirun.

    python samples/hydra_train.py strategy=zero3 trainer.devices=2 settings.batch_size=16
    torchrun --nproc-per-node 2 samples/hydra_train.py trainer.max_steps=50

It needs `pip install hydra-core`. Every rank runs this program with the arguments that were typed. Hydra makes a folder
for each of them, `outputs/NAME/rank-N`, with its configuration and its log.
"""

import os

import hydra
from hydra.utils import to_absolute_path
from lightning import Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf

from gan.runs import build
from strategies import PhaseStrategy
from strategies.processes.launchers import launched


def rank() -> int:
    """The number of this process, which the folder's name has. Nobody has started the first of our own ranks."""
    place = launched()
    return int(os.environ.get("LOCAL_RANK", 0)) if place is None else place.rank


OmegaConf.register_new_resolver("rank", rank)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    seed_everything(config.seed)
    run = build(config.run, **config.settings)
    trainer = Trainer(
        strategy=PhaseStrategy(config.strategy),
        default_root_dir=to_absolute_path(f"outputs/{config.name}"),
        **config.trainer,
    )
    trainer.fit(run.game, run.data)


if __name__ == "__main__":
    main()
