"""The pages of the documents on DCP and on ``save`` and ``load`` run as they stand."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import warm

PAGES = Path(__file__).parents[2] / "docs" / "frameworks"


@pytest.mark.parametrize("name", ["dcp", "torch-save"])
def test_page_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    code = re.findall(
        r"^```python\n(.*?)^```$", (PAGES / f"{name}.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(code) >= 2
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(code))
    command = [
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore:torch.distributed is:UserWarning",
        script.name,
    ]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("DATASTATES_")
    } | {"DATASTATES_MEMORY": "64M"}
    done = warm.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "goes on from" not in done.stderr
