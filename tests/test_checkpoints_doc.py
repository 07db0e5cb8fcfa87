"""The code of docs/checkpoints.md runs, and runs again where it stopped."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import checkpoint_jobs
import tiny_models
from pool import Pool

PAGE = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_runs_and_goes_on(pool: Pool, tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(tmp_path / "MODEL")  # type: ignore[operator]
    for done in (0, 2):
        assert pool.run(4, checkpoint_jobs.run_page, BLOCKS, str(tmp_path)) == [done] * 4
        steps = sorted(path.name for path in (tmp_path / "RUN").iterdir())
        assert steps == [f"step-{step:08}" for step in range(1, 5)]
        for step in steps[2:]:
            shutil.rmtree(tmp_path / "RUN" / step)
    assert (tmp_path / "OUT/model.safetensors").is_file()
