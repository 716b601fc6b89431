"""docs/build.py, which reads what the guides say."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
assert spec is not None and spec.loader is not None
guides = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guides)
