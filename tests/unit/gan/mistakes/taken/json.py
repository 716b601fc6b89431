from gan.runs import Run


def paint() -> Run: ...
