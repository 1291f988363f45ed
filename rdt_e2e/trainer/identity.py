"""What makes two trainer fleets the same: whether ranks left by an earlier run may be taken over."""

import hashlib
import json
from pathlib import Path

from rdt_e2e.config import Config


def trainer_identity(config: Config, root: Path) -> str:
    """Condense everything that a trainer rank depends on.

    Args:
        config: The run's configuration.
        root: The checkpoint folder.

    Returns:
        A hexadecimal digest; it changes with the configuration of the trainer and of the sync, the
        number of consumers, the checkpoint's files (name, size, time of change) and this package's
        own code.
    """
    code = Path(__file__).parents[1]
    content = {
        "trainer": config.trainer.model_dump(mode="json"),
        "sync": config.sync.model_dump(mode="json", exclude={"iters"}),
        "pulls": config.verify.pulls,
        "num_consumers": config.num_consumers,
        "root": str(root.resolve()),
        "files": [
            (path.name, path.stat().st_size, path.stat().st_mtime_ns)
            for path in sorted(root.iterdir())
            if path.is_file()
        ],
        "code": [
            (str(path.relative_to(code)), hashlib.sha256(path.read_bytes()).hexdigest())
            for path in sorted(code.rglob("*.py"))
        ],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
