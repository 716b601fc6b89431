"""What decides a training. gan.fit and gan.verify make their strategy and Trainer here, so that both train alike."""

from typing import Any

from jsonargparse import Namespace
from lightning import Trainer

from strategies import PhaseStrategy


def strategy_of(
    settings: Namespace, policy: str, kind: type[PhaseStrategy] = PhaseStrategy, **beside: Any
) -> PhaseStrategy:
    """The strategy, with what the settings say of checks. `beside` is where it trains, not what."""
    check = "often" if settings.check and settings.debug else settings.check
    return kind(policy, check=check, check_replicas=settings.debug, **beside)


def trainer_of(settings: Namespace, strategy: PhaseStrategy, max_steps: int, **beside: Any) -> Trainer:
    """The Trainer. `beside` are devices, loggers, validation and callbacks, which change nothing in the training."""
    return Trainer(
        strategy=strategy,
        precision=settings.precision,
        max_steps=max_steps,
        sync_batchnorm=True,
        deterministic="warn" if settings.debug else None,
        detect_anomaly=settings.debug,
        enable_model_summary=False,
        enable_checkpointing=False,
        **beside,
    )
