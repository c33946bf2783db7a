"""Which of a project's draft-head configurations are read, as which form, and why the others are refused.

    python benches/head_configs.py FOLDER --source https://github.com/sgl-project/SpecForge --commit COMMIT

FOLDER has `config.json` files under any names, such as SpecForge's `configs`, from a checkout that you have. Nothing of
them is kept but names and hashes. No weights are read: a form that tensors tell apart is taken for the first that the
names allow.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from common import write_result
from specrs.models import UnsupportedModelError
from specrs.models.block_config import BlockConfig
from specrs.models.head_config import Eagle1Config, Eagle3Config
from specrs.models.head_forms import form_of

READERS = {"eagle1": Eagle1Config, "eagle3": Eagle3Config, "parallel": Eagle3Config, "block": BlockConfig}


def examined(path: Path) -> dict[str, Any]:
    """What specrs says of a file: its form and notes, or the key and the reason for which it is refused."""
    raw = path.read_bytes()
    said: dict[str, Any] = {"sha256": hashlib.sha256(raw).hexdigest()}
    try:
        form = form_of(json.loads(raw))
        config = READERS[form.kind].from_dict(json.loads(raw), None, form)
    except UnsupportedModelError as error:
        return {**said, "refused": str(error)}
    return {**said, "form": form.name, "notes": list(config.notes)}


def main() -> None:
    """Read all files, print a line for each, and write benches/results/head_configs.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", default=None, help="where the folder comes from")
    parser.add_argument("--commit", default=None, help="its commit")
    args = parser.parse_args()
    files = {str(path.relative_to(args.folder)): examined(path) for path in sorted(args.folder.rglob("*.json"))}
    for name, said in files.items():
        print(f"{name}: {said.get('form') or 'refused: ' + said['refused']}")
    counts = Counter(said.get("form", "refused") for said in files.values())
    print(dict(counts))
    record = {"source": args.source, "source_commit": args.commit, "counts": dict(counts), "files": files}
    write_result("head_configs", record)


if __name__ == "__main__":
    main()
