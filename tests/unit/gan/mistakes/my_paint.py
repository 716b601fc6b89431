from json import dumps  # noqa: F401 - no run of this file

from gan.runs import Run


def paint(width: int = 4, *, rate=0.5, name: str = "x", betas: tuple[float, float] = (0.0, 0.9)) -> Run:
    """Paint.

    Args:
        width: How wide.
    """
    return Run(width, rate, 7)


def other() -> "Run": ...


def number() -> int: ...


def fails() -> Run:
    return 3


def options(devices: int = 3) -> Run: ...
