"""The page of the documents on Lightning runs as it stands."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import warm

PAGE = Path(__file__).parents[2] / "docs" / "frameworks" / "lightning.md"


@pytest.mark.long
def test_page_runs_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    code = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(code) == 4
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(code))
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("DATASTATES_")
    } | {"DATASTATES_MEMORY": "64M"}
    done = warm.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "goes on from" in done.stderr, "one more epoch"
    assert "may differ" not in done.stderr
